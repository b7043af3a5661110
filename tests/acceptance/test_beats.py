"""`celery beat -S claim`: several at once, killed, frozen, with wrong clocks, without database or broker."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import text

from celery_claim.dispatch import Dispatcher
from celery_claim.windows.window import Definition
from tests.acceptance.stage import Stage
from tests.acceptance.test_windows import QUICK, alive
from tests.conftest import Database
from tests.processes import eventually, shifted_clock
from tests.proxy import Proxy

Stages = Callable[..., Stage]

#: Ordinary entries beside a window: a task that writes down when it ran.
ENTRIES = """
    import os, time
    from celery import Celery
    from celery.schedules import crontab
    from celery_claim import setup

    app = Celery("entries", broker=os.environ["BROKER"])
    app.conf.update(
        claim_database_url=os.environ["DATABASE"],
        claim_lease_ttl=3,
        beat_max_loop_interval=1,
        beat_enable_remote_control=True,
        broker_connection_timeout=float(os.environ.get("PATIENCE", "1")),
        timezone=os.environ.get("ZONE", "UTC"),
        task_default_queue="entries",
    )
    setup(app)

    @app.task(name="tick")
    def tick():
        "Only its message matters."

    app.conf.beat_schedule = {
        "every": {"task": "tick", "schedule": 1.0},
        "minutely": {"task": "tick", "schedule": crontab(), "options": {"queue": "minutely"}},
    }
"""


def slots_of(show: Stage, window: str = "work") -> list[int]:
    """The slots that were fired, one for each fire."""
    fires = {(run["fire_seq"], run["slot_start"]) for run in show.windows.history(window=window, limit=100_000)
             if run["consumer_id"] is not None}  # fmt: skip
    return sorted(slot for _, slot in fires)


def each_once(slots: list[int], frequency: int) -> None:
    assert max(Counter(slots).values()) == 1, "no slot twice"
    assert slots == list(range(slots[0], slots[-1] + frequency, frequency)), "no slot left out"


@pytest.mark.slow
def test_eight_beats_fire_each_slot_once(database: Database, tmp_path: Path) -> None:
    """300 slots, eight processes that ask for each as fast as they can; the history accounts for each slot once."""
    frequency, slots = (50, 300) if database.name != "sqlite" else (100, 100)
    racer = """
import sys, time
from celery import Celery
from celery_claim.dispatch import Dispatcher
from celery_claim.exceptions import ClaimError
app = Celery("race", broker="memory://"); app.conf.claim_database_url = sys.argv[1]
dispatcher = Dispatcher.of(app)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    try:
        dispatcher.fire(["race"])
    except ClaimError as error:
        print(error)
"""
    app = Celery("race", broker="memory://", set_as_current=False)
    app.conf.claim_database_url = database.url
    dispatcher = Dispatcher.of(app)
    definition = Definition("race", "no.task", frequency, frequency // 50, run_type="any")
    dispatcher.register({"race": definition})
    seconds = str(slots * frequency / 1000)
    racers = [
        subprocess.Popen([sys.executable, "-c", racer, database.url, seconds], stdout=subprocess.PIPE) for _ in range(8)
    ]
    errors = b"".join(each.communicate(timeout=120)[0] for each in racers)

    history = dispatcher.history(window="race", limit=100_000)
    fires = [run["slot_start"] for run in history if run["consumer_id"] is not None]
    skipped = [run["slot_start"] for run in history if run["state"] == "skipped"]
    missed = [
        run["slot_start"] + number * frequency
        for run in history
        if run["consumer_id"] is None and run["state"] == "missed"
        for number in range(int(run["error"].split()[0]))
    ]
    assert not errors
    each_once(sorted(fires + skipped + missed), frequency)
    assert dispatcher.look().windows["race"].fire_seq == len(fires + skipped)


@pytest.mark.slow
def test_no_beat_is_missed_and_none_is_doubled_while_one_lives(mariadb: Database, stage: Stages) -> None:
    """C67: of three beats one is killed, one frozen, one ten minutes ahead; a fourth begins in another year."""
    show = stage(mariadb, windows={"work": {"frequency": 1, "run_type": "any"}}, settings=QUICK)
    show.worker("-c", "2")
    alive(show, 1)
    first = show.beat("-S", "claim")
    second = show.beat("-S", "claim")
    show.beat("-S", "claim", env=shifted_clock("+10m"))
    eventually(lambda: len(slots_of(show)) >= 4, 20, "four slots")

    first.kill9()
    second.stop_signal(signal.SIGSTOP)
    before = len(slots_of(show))
    eventually(lambda: len(slots_of(show)) >= before + 4, 20, "four more")
    second.stop_signal(signal.SIGCONT)
    show.beat("-S", "claim", env=shifted_clock("-400d"))
    before = len(slots_of(show))
    eventually(lambda: len(slots_of(show)) >= before + 4, 20, "four more")

    each_once(slots_of(show), 1000)
    assert second.running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zone", "change"), [("US/Pacific", "2026-11-01 08:59:54"), ("Europe/Berlin", "2026-10-25 00:59:54")]
)
def test_windows_know_no_daylight_saving_time(mariadb: Database, stage: Stages, zone: str, change: str) -> None:
    """C65: a beat and a worker in a zone whose clocks change in this minute; `change` is in UTC."""
    show = stage(mariadb, windows={"work": {"frequency": 2, "run_type": "any"}}, settings={**QUICK, "timezone": zone})
    show.worker("-c", "2", env={"TZ": zone})
    alive(show, 1)

    show.beat("-S", "claim", env={**shifted_clock(f"@{change}"), "TZ": "UTC"})
    eventually(lambda: len(slots_of(show)) >= 6, 30, "six slots, over the change")

    each_once(slots_of(show), 2000)


@pytest.fixture
def entries(mariadb: Database, redis_server: Any, celery_processes: Any) -> Callable[..., Any]:
    """entries(...) -> a beat of the ordinary entries."""
    environment = {"BROKER": redis_server.url, "DATABASE": mariadb.url}

    def beat(**env: str) -> Any:
        return celery_processes.beat(ENTRIES, "-S", "claim", env={**environment, **env}, name="entries")

    return beat


@pytest.fixture
def sent(redis_server: Any) -> Callable[[], int]:
    """sent() -> how many messages of the entry `every` there are."""
    client = redis_server.client()
    yield lambda: client.llen("entries")
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zone", "before"), [("US/Pacific", "2026-03-08 09:56:00"), ("Europe/Berlin", "2026-03-29 00:56:00")]
)
def test_a_crontab_goes_through_the_beginning_of_summer_time(
    entries: Callable[..., Any], redis_server: Any, zone: str, before: str
) -> None:
    """C65: an entry of every minute, thirty times as fast, from four minutes before the change on, here in UTC.

    In autumn Celery's own crontab rests until its last minute comes again, under its stock scheduler too (celery
    #6438): docs/explanation/windows.md says so.
    """
    client = redis_server.client()
    beat = entries(**shifted_clock(f"@{before} x30"), TZ="UTC", ZONE=zone)
    began = time.monotonic()

    eventually(lambda: client.llen("minutely") >= 10, 60, "ten minutes of messages")

    minutes = (time.monotonic() - began) * 30 / 60
    assert client.llen("minutely") <= minutes + 1, "no minute twice"
    assert "Traceback" not in beat.log()
    client.close()


@pytest.mark.slow
def test_ordinary_entries_are_sent_once_and_go_on_when_their_beat_dies(
    entries: Callable[..., Any], sent: Callable[[], int]
) -> None:
    beats = [entries() for _ in range(3)]
    eventually(lambda: any("sends the ordinary entries" in beat.log() for beat in beats), 15, "an owner")
    (owner,) = [beat for beat in beats if "sends the ordinary entries" in beat.log()]
    started = time.monotonic()
    before = sent()
    eventually(lambda: sent() >= before + 4, 15, "four sendings")
    assert sent() - before <= time.monotonic() - started + 2, "one a second, whatever the number of beats"

    owner.kill9()
    killed = time.monotonic()
    before = sent()
    eventually(lambda: sent() >= before + 3, 15, "another goes on")
    assert time.monotonic() - killed < 3 + 1 + 3 + 3, "within the lease and a tick"


@pytest.mark.slow
def test_a_beat_that_was_frozen_sends_nothing_twice(entries: Callable[..., Any], sent: Callable[[], int]) -> None:
    """C68: the same process goes on, as a standby."""
    first = entries()
    eventually(sent, 15, "a sending")
    second = entries()
    first.stop_signal(signal.SIGSTOP)
    eventually(lambda: "sends the ordinary entries" in second.log(), 15, "takeover")
    before = sent()
    eventually(lambda: sent() >= before + 2, 15, "it sends")
    first.stop_signal(signal.SIGCONT)
    started, before = time.monotonic(), sent()
    eventually(lambda: sent() >= before + 5, 15, "it goes on")

    assert sent() - before <= time.monotonic() - started + 2
    assert first.running
    assert "Traceback" not in first.log()


@pytest.mark.slow
def test_a_beat_that_is_stopped_in_the_middle_of_a_sending_gives_it_back(
    entries: Callable[..., Any], sent: Callable[[], int], mariadb: Database, redis_server: Any
) -> None:
    def written_down() -> int:
        with mariadb.engine().connect() as connection:
            count = text("SELECT total_run_count FROM celery_claim_entry WHERE name = 'every'")
            return int(connection.execute(count).scalar_one())

    with Proxy("127.0.0.1", redis_server.port) as broker:
        url = redis_server.url.replace(f":{redis_server.port}/", f":{broker.port}/")
        beat = entries(BROKER=url, PATIENCE="20")
        eventually(sent, 15, "a sending")
        broker.pause()
        eventually(lambda: written_down() > sent(), 15, "a sending under way")

        assert beat.terminate(timeout=10) == 0
        broker.down()  # what it has swallowed is lost

    assert written_down() == sent()
    assert "Traceback" not in beat.log()


@pytest.fixture
def clock(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """clock("-1h") sets the clock of processes whose environment is what it returned before."""
    wrong_by = tmp_path / "clock"

    def set_clock(shift: str) -> dict[str, str]:
        wrong_by.write_text(shift)
        environment = shifted_clock("+0")
        del environment["FAKETIME"]  # it would have precedence
        return {**environment, "FAKETIME_TIMESTAMP_FILE": str(wrong_by), "FAKETIME_NO_CACHE": "1"}

    return set_clock


@pytest.mark.slow
def test_a_clock_that_is_set_while_beat_runs_moves_no_window(
    mariadb: Database, stage: Stages, clock: Callable[[str], dict[str, str]]
) -> None:
    show = stage(mariadb, windows={"work": {"frequency": 1, "run_type": "any"}}, settings=QUICK)
    show.worker("-c", "2")
    alive(show, 1)
    show.beat("-S", "claim", env=clock("+0"))
    eventually(lambda: len(slots_of(show)) >= 3, 20, "three slots")

    for shift in ("-1h", "+2h", "+0"):
        clock(shift)
        before = len(slots_of(show))
        eventually(lambda before=before: len(slots_of(show)) >= before + 3, 20, f"three more at {shift}")

    each_once(slots_of(show), 1000)


@pytest.mark.slow
def test_a_clock_that_is_set_while_beat_runs_neither_stops_nor_floods_an_interval(
    entries: Callable[..., Any], sent: Callable[[], int], clock: Callable[[str], dict[str, str]]
) -> None:
    beat = entries(**clock("+0"))
    eventually(lambda: sent() >= 2, 15, "two sendings")

    for shift in ("-1h", "+2h", "+0"):
        clock(shift)
        started, before = time.monotonic(), sent()
        eventually(lambda before=before: sent() >= before + 4, 15, f"it goes on at {shift}")
        assert sent() - before <= time.monotonic() - started + 2
    assert "Traceback" not in beat.log()


@pytest.mark.slow
def test_a_standby_answers_ping(entries: Callable[..., Any], redis_server: Any) -> None:
    owner = entries()
    eventually(lambda: "sends the ordinary entries" in owner.log(), 15, "an owner")
    standby = entries()
    owner.stop_signal(signal.SIGSTOP)  # so that whoever answers is the other
    app = Celery("ask", broker=redis_server.url, set_as_current=False)

    eventually(lambda: app.control.ping(timeout=0.5), 15, "an answer")
    assert standby.running


@pytest.mark.slow
@pytest.mark.parametrize("away", ["database", "broker"])
def test_beat_outlives_an_outage_without_a_flood(
    mariadb: Database, stage: Stages, proxied: Callable[[Database], Any], redis_server: Any, away: str
) -> None:
    window = {"work": {"frequency": 1, "run_type": "any"}}
    proxy = proxied(mariadb)
    show = stage(mariadb, windows=window, settings=QUICK)
    show.worker("-c", "2")
    alive(show, 1)
    beat = show.beat("-S", "claim", env={"PROJ_DATABASE": proxy.url})
    eventually(lambda: len(slots_of(show)) >= 2, 20, "two slots")

    before_lines = beat.log().count("\n")
    if away == "database":
        proxy.down()
    else:
        redis_server.stop(keep_data=True)
    threading.Event().wait(6)  # the outage itself lasts so long
    during = beat.log().count("\n") - before_lines
    if away == "database":
        proxy.up()
    else:
        redis_server.start()
    before = len(show.windows.history(states=["empty"], limit=10_000))
    eventually(lambda: len(show.windows.history(states=["empty"], limit=10_000)) >= before + 3, 30, "runs again")

    assert beat.running
    assert during < 40, beat.log()[-4000:]
    assert max(Counter(slots_of(show)).values()) == 1


def test_a_lease_shorter_than_the_loop_is_refused(mariadb: Database, stage: Stages) -> None:
    show = stage(
        mariadb, windows={"work": {"frequency": 5}}, settings={"claim_lease_ttl": 10, "beat_max_loop_interval": 10}
    )

    done = show.command("beat", "-S", "claim")

    assert done.returncode == 78
    assert "beat_max_loop_interval=10 is not less than claim_lease_ttl=10" in done.stderr
