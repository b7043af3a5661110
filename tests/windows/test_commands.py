"""`celery claim windows|show|trigger|concurrency|pause|resume|log|nodes|prune`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from tests.acceptance.conftest import stage
from tests.acceptance.stage import PROGRAM, Stage
from tests.conftest import Database
from tests.processes import REPOSITORY, eventually
from tests.windows.fleet import HOUR

__all__ = ["stage"]

#: A program that fires windows of tasks that other machines have.
BEAT_ONLY = """
import os
from celery import Celery
from celery_claim import window

app = Celery("beatonly", broker="memory://")
app.conf.claim_database_url = os.environ["PROJ_DATABASE"]
app.conf.beat_schedule = {"theirs": window("other.task", frequency=60)}
"""
Stages = Callable[..., Stage]


def started(show: Stage, *arguments: str, program: str = PROGRAM, **env: str) -> subprocess.Popen[str]:
    """`celery -A proj claim ...`"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **show.environment, **env}
    command = [sys.executable, "-m", "celery", "-A", program, "claim", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def claim(show: Stage, *arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    """`celery -A proj claim ...`, run to its end."""
    process = started(show, *arguments, **options)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def answer(show: Stage, *arguments: str, **env: str) -> Any:
    done = claim(show, *arguments, "--json", **env)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def moved(show: Stage, **values: Any) -> None:
    """Give every run of the history other values, as a worker or the time would have."""
    run = show.windows.statements.tables.run
    with show.engine.begin() as connection:
        connection.execute(update(run).values(**values))


@pytest.fixture
def show(sqlite: Database, stage: Stages) -> Stage:
    """A window of run_type any, so long that its slot never ends."""
    window = {"frequency": HOUR, "run_type": "any", "concurrency": 2, "max_concurrency": 4}
    return stage(sqlite, windows={"work": window})


def test_windows_are_listed_before_anybody_fires_them(show: Stage) -> None:
    (window,) = answer(show, "windows")

    assert (window["name"], window["run_type"], window["concurrency"], window["declared"]) == ("work", "any", 2, True)
    assert (window["last_slot_start"], window["fire_seq"], window["overridden"]) == (None, 0, [])
    assert "waiting" in claim(show, "windows").stdout
    assert answer(show, "show", "work")["runs"] == []
    assert not show.windows.look().windows, "who looks enters nothing into the table"


def test_a_trigger_opens_once_and_the_loser_exits_with_75(show: Stage) -> None:
    first, second = claim(show, "trigger", "work"), claim(show, "trigger", "work")

    assert (first.returncode, second.returncode) == (0, 75), first.stderr + second.stderr
    assert "opened, 2 consumers" in first.stdout
    assert "still have their time" in second.stderr
    runs = answer(show, "log", "work")
    assert {run["kind"] for run in runs} == {"manual"}
    assert all("@" in run["triggered_by"] for run in runs), "who"


def test_of_twenty_processes_that_trigger_one_wins(mariadb: Database, stage: Stages) -> None:
    show = stage(mariadb, windows={"work": {"frequency": HOUR, "run_type": "any"}})
    racers = [started(show, "trigger", "work") for _ in range(20)]

    for racer in racers:
        racer.communicate(timeout=120)

    codes = sorted(racer.returncode for racer in racers)

    assert codes == [0, *[75] * 19]


def test_a_paused_window_is_not_triggered_and_says_what_to_do(show: Stage) -> None:
    assert claim(show, "pause", "work").returncode == 0
    refused = claim(show, "trigger", "work")
    assert refused.returncode == 1
    assert "celery claim resume" in refused.stderr
    assert answer(show, "windows")[0]["enabled"] is False

    assert claim(show, "resume", "work").returncode == 0
    assert claim(show, "trigger", "work").returncode == 0


def test_concurrency_is_changed_within_its_cap_and_reset(show: Stage) -> None:
    assert answer(show, "concurrency", "work", "4") == {
        "window": "work",
        "concurrency": 4,
        "overridden": ["concurrency"],
    }
    above = claim(show, "concurrency", "work", "5")
    assert above.returncode == 1
    assert "expected 1 to 4 (max_concurrency of the window)" in above.stderr
    assert answer(show, "concurrency", "work", "--reset")["concurrency"] == 2
    assert claim(show, "concurrency", "work", "0").returncode == 64


def test_an_unknown_window_is_refused_with_the_closest(show: Stage) -> None:
    for command in ("show", "trigger", "pause", "resume", "concurrency", "log"):
        done = claim(show, command, "wrk")
        assert done.returncode == 64, command
        assert "no window is called 'wrk'. Did you mean 'work'?" in done.stderr
        assert "Traceback" not in done.stderr


def test_no_node_is_an_answer_and_no_race(sqlite: Database, stage: Stages) -> None:
    show = stage(sqlite, windows={"work": {"frequency": HOUR}})

    done = claim(show, "trigger", "work")

    assert done.returncode == 1
    assert "no live node accepts runs" in done.stderr


def test_all_but_the_sending_works_while_the_broker_is_down(show: Stage) -> None:
    down = {"PROJ_BROKER": "redis://127.0.0.1:1/0"}
    for command in (
        ["windows"],
        ["show", "work"],
        ["log"],
        ["nodes"],
        ["prune"],
        ["pause", "work"],
        ["resume", "work"],
    ):
        done = claim(show, *command, **down)
        assert done.returncode == 0, (command, done.stderr)

    sent_later = claim(show, "trigger", "work", **down)

    assert sent_later.returncode == 69
    assert "a worker sends the runs later" in sent_later.stderr
    assert [run["published_at"] for run in answer(show, "log")] == [None, None]


def test_a_database_that_is_down_exits_with_69(show: Stage, mariadb: Database) -> None:
    url = mariadb.server.url(mariadb.schema, port=1)

    done = claim(show, "windows", PROJ_DATABASE=url)

    assert done.returncode == 69
    assert "the database is not available" in done.stderr
    assert "pa55" not in done.stderr


def test_a_window_that_code_no_longer_declares_is_shown_found_and_taken_out(show: Stage) -> None:
    show.windows.register({"old": next(iter(show.declared().values())).__class__("old", "proj.work", 1000, 500)})

    assert {each["name"]: each["declared"] for each in answer(show, "windows")} == {"old": False, "work": True}
    checked = answer(show, "check")
    assert [each["code"] for each in checked if each["task"] == "windows"] == ["window-not-declared"]
    assert claim(show, "prune", "--window", "work").returncode == 64
    assert claim(show, "prune", "--window", "old").returncode == 0
    assert [each["name"] for each in answer(show, "windows")] == ["work"]


def test_a_concurrency_above_the_cap_is_refused_where_it_is_declared(sqlite: Database, stage: Stages) -> None:
    wide = stage(sqlite, windows={"work": {"frequency": 60, "concurrency": 3}}, settings={"claim_max_concurrency": 2})

    worker = wide.worker(ready=False)

    # The program itself cannot be imported: window() knows the settings that stand before it.
    assert worker.process.wait(30) == 2, worker.log()
    assert "concurrency=3 is more than claim_max_concurrency=2" in worker.log()


def test_two_windows_of_one_name_are_refused(sqlite: Database, stage: Stages) -> None:
    twice = stage(sqlite, windows={"a": {"frequency": 60, "name": "same"}, "b": {"frequency": 60, "name": "same"}})

    done = claim(twice, "check")

    assert done.returncode == 1
    assert "two windows are called 'same'" in done.stdout
    beat = twice.command("beat", "-S", "claim")
    assert beat.returncode == 78
    assert "two windows are called 'same'" in beat.stderr


def test_a_trigger_within_min_interval_exits_with_75(sqlite: Database, stage: Stages) -> None:
    show = stage(
        sqlite, windows={"work": {"frequency": 1, "max_run_time": 0.1, "run_type": "any", "min_interval": 600}}
    )
    assert claim(show, "trigger", "work").returncode == 0
    eventually(lambda: not answer(show, "windows")[0]["active"], 15, "the end of its consumers' time")

    again = claim(show, "trigger", "work")

    assert again.returncode == 75
    assert "less than min_interval ago" in again.stderr


def test_a_wait_says_what_the_runs_of_this_trigger_did(sqlite: Database, stage: Stages) -> None:
    show = stage(sqlite, windows={"work": {"frequency": HOUR, "run_type": "any", "concurrency": 2}})
    show.worker("-c", "2")
    show.add(range(1, 8))

    waited = answer(show, "trigger", "work", "--wait", "30")

    assert waited["outcome"] == "fired"
    assert {run["fire_seq"] for run in waited["runs"]} == {waited["fire_seq"]} == {1}
    assert all(run["finished_at"] for run in waited["runs"])
    assert sum(run["succeeded"] for run in waited["runs"]) == 7
    shown = answer(show, "show", "work")
    assert (shown["fire_seq"], len(shown["runs"]), type(shown["runs"][0]["created_at"])) == (1, 2, int)


def test_a_wait_exits_with_1_when_a_run_is_missed(sqlite: Database, stage: Stages) -> None:
    windows = {"work": {"frequency": HOUR, "run_type": "any", "queue": "nobody"}}
    show = stage(sqlite, windows=windows)
    waiting = started(show, "trigger", "work", "--wait", "60")
    (run,) = eventually(lambda: answer(show, "log"), 20, "its run")
    show.worker("-c", "1")  # for its maintenance: it does not consume that queue

    moved(show, start_before=run["created_at"])

    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 1, err
    assert "missed" in out
    assert [each["state"] for each in answer(show, "log", "--failed")] == ["missed"]


def test_a_wait_that_is_over_before_the_runs_are_says_so(show: Stage) -> None:
    done = claim(show, "trigger", "work", "--wait", "0.2")

    assert done.returncode == 1
    assert "2 of 2 have not ended" in done.stderr


def test_an_interrupted_wait_leaves_the_fire_whole(show: Stage) -> None:
    waiting = started(show, "trigger", "work", "--wait", "60")
    eventually(lambda: all(run["published_at"] for run in answer(show, "log")) and answer(show, "log"), 20, "its runs")

    waiting.send_signal(signal.SIGINT)

    _, err = waiting.communicate(timeout=20)
    assert waiting.returncode not in (0, None)
    assert "Traceback" not in err
    assert [(run["state"], run["fire_seq"]) for run in answer(show, "log")] == [("pending", 1)] * 2
    assert claim(show, "trigger", "work").returncode == 75, "the fire is as good as any"


def test_the_log_is_filtered_by_node_time_and_number(show: Stage) -> None:
    claim(show, "trigger", "work")
    moved(show, node="w7@test")

    assert len(answer(show, "log", "--node", "w7@test")) == 2
    assert answer(show, "log", "--node", "w8@test") == []
    assert len(answer(show, "log", "--limit", "1")) == 1
    assert len(answer(show, "log", "--since", "1h")) == 2
    moved(show, created_at=0)
    assert answer(show, "log", "--since", "1h") == []
    wrong = claim(show, "log", "--since", "yesterday")
    assert wrong.returncode == 64
    assert "15m, 2h or 7d" in wrong.stderr


def test_prune_deletes_what_is_older_and_has_ended(show: Stage) -> None:
    claim(show, "trigger", "work")
    assert answer(show, "prune", "--older-than", "0") == {"deleted": 0}, "runs that wait are no history yet"
    moved(show, state="done", created_at=1000, finished_at=2000)

    assert answer(show, "prune", "--older-than", "1d") == {"deleted": 2}
    assert answer(show, "log") == []


def test_a_program_without_tasks_of_its_own_checks_its_windows_and_makes_the_tables(
    sqlite: Database, stage: Stages, tmp_path: Path
) -> None:
    show = stage(sqlite)
    (tmp_path / "beatonly.py").write_text(BEAT_ONLY)
    show.environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{REPOSITORY}"

    made = claim(show, "initdb", "--json", program="beatonly")
    assert made.returncode == 0, made.stderr
    assert "celery_claim_window" in json.loads(made.stdout)["made"]
    checked = claim(show, "check", "--json", program="beatonly")
    assert [each["code"] for each in json.loads(checked.stdout)] == ["window-task-unknown"]
    assert claim(show, "check", "other.task", program="beatonly").returncode == 64


def test_the_own_tables_are_made_by_initdb_and_not_without(sqlite: Database, stage: Stages) -> None:
    show = stage(sqlite, windows={"work": {"frequency": 60}}, settings={"claim_create_tables": False})

    missing = claim(show, "windows")
    assert missing.returncode == 1
    assert "celery -A proj claim initdb" in missing.stderr
    made = answer(show, "initdb")["made"]
    assert {"celery_claim_window", "celery_claim_run", "celery_claim_node", "celery_claim_lease"} <= set(made)
    assert claim(show, "windows").returncode == 0
