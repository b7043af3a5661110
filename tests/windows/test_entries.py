"""Ordinary entries while database and broker are away, in turn and together: nothing is lost, nothing sent twice."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab, schedule
from sqlalchemy import select, update

from celery_claim import setup, window
from celery_claim.beat import ClaimScheduler
from celery_claim.broker import Broker
from celery_claim.dispatch import Dispatcher
from celery_claim.nodes import leases
from celery_claim.windows import entries
from celery_claim.windows.sql.entries import EntryStatements
from celery_claim.windows.window import Definition
from tests.conftest import Database
from tests.processes import eventually
from tests.proxy import Proxy
from tests.windows.fleet import HOUR, Fleet

#: Seconds: so rare that it is sent once in a test, and one that was lost does not come again.
RARE = 3600.0
#: Seconds of the lease of ordinary entries.
TTL = 1.5

#: The statements that write a sending down, and that take it back.
CLAIM = rb"^UPDATE celery_claim_entry SET .*total_run_count \+ "
UNDO = rb"^UPDATE celery_claim_entry SET .*total_run_count - "


class Beats:
    """Beats of one app that has an entry `rare`, due now, on a broker behind a proxy."""

    def __init__(
        self, database: Database, server: Any, broker: Proxy, *, scheme: str = "redis", schedule: Any = None
    ) -> None:  # fmt: skip
        """`schedule`: what else is in beat_schedule."""
        self._database = database
        self._schedule = schedule or {}
        self._messages = Celery(broker=server.url.replace("redis", scheme, 1), set_as_current=False)
        self.broker = broker
        self._url = server.url.replace("redis", scheme, 1).replace(f":{server.port}/", f":{broker.port}/")
        self.running: list[ClaimScheduler] = []
        self.app = self._app(database.url)
        self._table = Dispatcher.of(self.app)
        self._table.prepare()
        self.entry = EntryStatements(self._table.statements.tables)._entry
        self.make_due()

    def _app(self, url: str) -> Celery:
        app = Celery("beats", broker=self._url, set_as_current=False)
        app.conf.update(
            claim_database_url=url,
            claim_lease_ttl=TTL,
            beat_max_loop_interval=1,
            broker_connection_timeout=1,
            task_default_queue="rare",
            result_expires=None,  # or Celery adds an entry of its own
            beat_schedule={"rare": {"task": "no.task", "schedule": RARE}, **self._schedule},
        )
        setup(app)
        return app

    def make_due(self) -> None:
        """The entry was sent last so long ago that it is due."""
        last = int(time.time() * 1000) - round(RARE * 1000) - 1000
        with self._table.database.linked() as link:
            statements = EntryStatements(self._table.statements.tables)
            entries.load(link, statements, {"rare": repr(schedule(RARE))}, last)
            link.execute(update(self.entry).values(last_run_at=last, total_run_count=0))

    def start(self, url: str | None = None) -> ClaimScheduler:
        """One more beat; `url` leads to the database by a way of its own."""
        beat = ClaimScheduler(app=self._app(url or self._database.url))
        self.running.append(beat)
        return beat

    def until(self, predicate: Callable[[], Any], what: str, timeout: float = 15) -> None:
        """Let all beats tick until something is true."""

        def tick() -> Any:
            for beat in self.running:
                beat.tick()
            return predicate()

        eventually(tick, timeout, what)

    def go_on(self, seconds: float) -> None:
        """Let all beats tick for so long, in which nothing more may happen."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end, "the time", seconds + 10)

    def close(self) -> None:
        for beat in self.running:
            beat.close()

    def sent(self, queue: str = "rare") -> int:
        with self._messages.connection_for_read() as connection, suppress(*connection.channel_errors):
            return int(connection.default_channel.queue_declare(queue, passive=True).message_count)
        return 0  # nobody has made the queue

    def slots(self, name: str) -> int:
        """How many slots of a window were fired."""
        return len({run["slot_start"] for run in self._table.history(window=name, states=["pending", "missed"])})

    def counted(self) -> int:
        """How often the entry was sent, as the table says."""
        with self._table.database.linked() as link:
            return int(link.execute(select(self.entry.c.total_run_count)).scalar_one())


@pytest.fixture
def beats_of(redis_server: Any) -> Iterator[Callable[..., Beats]]:
    """beats_of(database, scheme="redis-streams", ...) -> Beats."""
    with Proxy("127.0.0.1", redis_server.port) as broker:
        started: list[Beats] = []

        def make(database: Database, **options: Any) -> Beats:
            started.append(Beats(database, redis_server, broker, **options))
            return started[-1]

        yield make
        broker.heal()
        for beats in started:
            beats.close()


@pytest.mark.needs("network")
def test_a_sending_that_the_broker_refused_while_the_database_was_away_is_made_up_for(
    database: Database, beats_of: Callable[..., Beats], proxied: Callable[..., Proxy]
) -> None:
    beats, proxy = beats_of(database), proxied(database)
    beat = beats.start(proxy.url)
    beats.broker.down()
    proxy.lose_request(UNDO, times=3)

    beats.until(lambda: len(proxy.lost) == 3, "three tries to take the sending back")
    assert beats.counted() == 1, "it is written down, and not sent"
    beats.broker.up()
    beats.until(beats.sent, "the sending")
    beats.go_on(TTL)

    assert beats.sent() == 1
    assert beats.counted() == 1
    assert beat.schedule["rare"].total_run_count == 1


@pytest.mark.needs("network")
def test_a_beat_that_lost_its_lease_gives_the_sending_back_to_the_next_one(
    database: Database, beats_of: Callable[..., Beats], proxied: Callable[..., Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    beats, proxy = beats_of(database), proxied(database)
    beats.start(proxy.url)
    beats.broker.down()
    proxy.lose_request(UNDO)
    beats.until(lambda: proxy.lost, "a sending that is not taken back")
    proxy.down()
    second = beats.start()
    beats.until(lambda: second._entries.is_ours, "the other has the lease")
    beats.broker.up()
    beats.go_on(TTL)
    assert beats.sent() == 0, "it is written down as sent"

    proxy.up()
    beats.until(beats.sent, "the sending, by the other", timeout=TTL / 3 + 3)
    beats.go_on(TTL)

    assert beats.sent() == 1
    assert beats.counted() == 1
    assert second._entries.is_ours


@pytest.mark.needs("network")
@pytest.mark.parametrize("answer", ["lost", "never asked"])
def test_a_sending_whose_note_got_no_answer_is_sent_once(
    database: Database, beats_of: Callable[..., Beats], proxied: Callable[..., Proxy], answer: str
) -> None:
    beats, proxy = beats_of(database), proxied(database)
    beats.start(proxy.url)
    (proxy.swallow_reply if answer == "lost" else proxy.lose_request)(CLAIM)

    beats.until(beats.sent, "the sending")
    beats.go_on(TTL)

    assert len(proxy.swallowed + proxy.lost) == 1
    assert beats.sent() == 1
    assert beats.counted() == 1


@pytest.mark.needs("network")
def test_a_sending_is_taken_back_once_when_that_gets_no_answer(
    database: Database, beats_of: Callable[..., Beats], proxied: Callable[..., Proxy]
) -> None:
    beats, proxy = beats_of(database), proxied(database)
    beats.start(proxy.url)
    beats.broker.down()
    proxy.swallow_reply(UNDO)

    beats.until(lambda: proxy.swallowed, "it is taken back")
    beats.broker.up()
    beats.until(beats.sent, "the sending")
    beats.go_on(TTL)

    assert beats.sent() == 1
    assert beats.counted() == 1


@pytest.mark.needs("network")
def test_a_beat_that_ends_gives_back_what_it_could_not_send(
    database: Database, beats_of: Callable[..., Beats], proxied: Callable[..., Proxy]
) -> None:
    beats, proxy = beats_of(database), proxied(database)
    beat = beats.start(proxy.url)
    beats.broker.down()
    proxy.lose_request(UNDO)
    beats.until(lambda: proxy.lost, "a sending that is not taken back")

    beats.running.clear()
    beat.close()
    assert beats.counted() == 0
    beats.broker.up()
    beats.start()
    beats.until(beats.sent, "the sending, by the next")
    assert beats.counted() == 1


@pytest.mark.needs("network")
def test_a_beat_that_ends_and_cannot_give_a_sending_back_says_so(
    database: Database, beats_of: Callable[..., Beats], proxied: Callable[..., Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    beats, proxy = beats_of(database), proxied(database)
    beat = beats.start(proxy.url)
    beats.broker.down()
    proxy.lose_request(UNDO, times=None)
    beats.until(lambda: proxy.lost, "a sending that is not taken back")

    beats.running.clear()
    beat.close()

    assert "entry rare was due and could not be sent, and is not noted as due" in caplog.text


def test_an_entry_that_is_added_while_beat_runs_is_sent_in_its_time(
    sqlite: Database, beats_of: Callable[..., Beats], caplog: pytest.LogCaptureFixture
) -> None:
    beats = beats_of(sqlite)
    beats.app.conf.claim_lease_ttl = 600
    beat = beats.start()
    beat._entries._ttl = 600  # so that the next renewal is no help
    beats.until(beats.sent, "the sending of another")

    beat.add(name="added", task="no.task", schedule=0.5, options={"queue": "added"})
    added = time.monotonic()
    beats.until(lambda: beats.sent("added") == 2, "two sendings")

    assert time.monotonic() - added < 3
    assert not [record for record in caplog.records if record.exc_info], caplog.text


def test_an_entry_that_gets_another_schedule_while_beat_runs_goes_by_that(
    sqlite: Database, beats_of: Callable[..., Beats]
) -> None:
    beats = beats_of(sqlite)
    beat = beats.start()
    beat._entries._ttl = 600
    beats.until(beats.sent, "the sending")

    beat.update_from_dict({"rare": {"task": "no.task", "schedule": 0.5}})
    changed = time.monotonic()
    beats.until(lambda: beats.sent() == 3, "two more")

    assert time.monotonic() - changed < 3
    with beats._table.database.linked() as link:
        assert link.execute(select(beats.entry.c.schedule)).scalar_one() == repr(schedule(0.5))


def test_an_interval_that_a_wrong_clock_sent_in_the_future_begins_anew_and_a_crontab_is_not_sent_again(
    sqlite: Database, beats_of: Callable[..., Beats]
) -> None:
    plans = {"often": schedule(1.0), "minutely": crontab()}
    declared = {name: {"task": "no.task", "schedule": plan, "options": {"queue": name}} for name, plan in plans.items()}
    beats = beats_of(sqlite, schedule=declared)
    statements, now = EntryStatements(beats._table.statements.tables), int(time.time() * 1000)
    with beats._table.database.linked() as link:
        entries.load(link, statements, {name: repr(plan) for name, plan in plans.items()}, now + 3_600_000)

    beats.start()
    beats.go_on(4)

    assert beats.sent("often") in {2, 3, 4}
    assert beats.sent("minutely") == 0


# ---- a broker that says nothing


@pytest.mark.parametrize("scheme", ["redis", "redis-streams"])
def test_a_broker_that_swallows_everything_does_not_hold_windows_up(
    sqlite: Database, beats_of: Callable[..., Beats], scheme: str
) -> None:
    every_second = window("no.task", frequency=1, run_type="any", queue="runs")
    beats = beats_of(sqlite, scheme=scheme, schedule={"runs": every_second})
    beat = beats.start()
    beats.until(lambda: beats.sent("runs") and beats.sent(), "both are sent")
    beats.make_due()
    beats.broker.pause()

    longest, end = 0.0, time.monotonic() + 12
    before = beats.slots("runs")
    while time.monotonic() < end:
        began = time.monotonic()
        beat.tick()
        longest = max(longest, time.monotonic() - began)
    fired = beats.slots("runs") - before
    beats.broker.resume()
    beats.until(lambda: beats.sent() == 2, "the sending")
    beats.go_on(TTL)

    # A tick sends a run and an entry at most; each waits for broker_connection_timeout, here a second.
    assert longest < 2, "broker_connection_timeout, here a second, and a little"
    assert fired >= 8, "of twelve slots"
    assert beats.sent() == 2
    assert beats.counted() == 1


@pytest.mark.parametrize("scheme", ["redis", "redis-streams"])
def test_a_connection_that_was_closed_while_nothing_was_sent_is_no_trouble(
    sqlite: Database, beats_of: Callable[..., Beats], scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    beats = beats_of(sqlite, scheme=scheme)
    beats.start()
    beats.until(beats.sent, "the sending")

    beats.broker.cut()
    beats.make_due()
    beats.until(lambda: beats.sent() == 2, "another")
    beats.go_on(TTL)

    assert beats.sent() == 2
    assert "does not work" not in caplog.text


def test_what_the_user_says_of_the_broker_stays_as_it_is() -> None:
    app = Celery("says", broker="redis://", set_as_current=False)
    app.conf.update(broker_connection_timeout=7, broker_transport_options={"socket_timeout": 60, "priority_steps": [0]})

    ours, theirs = Broker(app).connection(), app.connection_for_write()

    assert ours.transport_options["socket_timeout"] == 60
    assert ours.transport_options["priority_steps"] == [0]
    assert ours.transport_options["socket_connect_timeout"] == 7
    assert theirs.transport_options == {"socket_timeout": 60, "priority_steps": [0]}


# ---- an entry that no broker would take


def test_an_entry_that_cannot_be_sent_does_not_hold_up_the_others(
    sqlite: Database, beats_of: Callable[..., Beats], caplog: pytest.LogCaptureFixture
) -> None:
    hopeless = {"task": "no.task", "schedule": 0.1, "kwargs": {"not": object()}}
    beats = beats_of(sqlite, schedule={"hopeless": hopeless, "often": {"task": "no.task", "schedule": 0.5}})
    beats.start()

    beats.until(lambda: beats.sent() >= 6, "rare once, and often", timeout=6)

    said = [record.getMessage() for record in caplog.records if "hopeless" in record.getMessage()]
    assert len(said) == 1, said
    assert "sending the entry hopeless does not work, trying again" in said[0]


def test_a_run_that_cannot_be_sent_does_not_hold_up_those_of_other_windows(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    def hopeless(*arguments: Any, **options: Any) -> None:
        raise TypeError("no JSON")

    fleet.first.app.task(name="hopeless", apply_async=hopeless)(hopeless)
    fleet.first.register({"hopeless": Definition("hopeless", "hopeless", HOUR * 1000, 1000, run_type="any")})
    fleet.declare("w")

    fleet.first.fire(["hopeless", "w"])
    fleet.pass_time(6)
    fleet.maintain()

    published = {run["window"]: bool(run["published_at"]) for run in fleet.runs()}
    assert published == {"hopeless": False, "w": True}
    assert fleet.first.broker_error == "no JSON"
    said = [record.getMessage() for record in caplog.records if "no JSON" in record.getMessage()]
    assert said == ["sending runs of window hopeless does not work, trying again: no JSON"]


# ---- the statements


def test_only_the_very_sending_is_taken_back(fleet: Fleet) -> None:
    statements = EntryStatements(fleet.tables)
    with fleet.link() as link:

        def claim(owner: str, before: entries.Sent, at: int) -> entries.Sending:
            lease = leases.acquire(link, fleet.tables.nodes, "beat", owner, ttl_ms=1000)
            assert lease is not None
            sending = entries.Sending("e", before, at)
            assert entries.claim(link, statements, lease, sending)
            fleet.pass_time(1)
            return sending

        def stored() -> entries.Sent:
            return entries.load(link, statements, {"e": "every"}, 0)["e"]

        new = entries.load(link, statements, {"e": "every"}, 1000)["e"]
        first = claim("a", new, 2000)
        second = claim("b", first.after, 3000)
        # A beat whose clock is behind writes the time that the first one wrote.
        third = claim("c", second.after, 2000)

        assert not entries.undo(link, statements, first), "another has sent since, at what it took for the same time"
        assert not entries.undo(link, statements, second)
        assert stored() == third.after == entries.Sent(2000, 3)
        assert entries.undo(link, statements, third)
        assert not entries.undo(link, statements, third), "once"
        assert entries.undo(link, statements, second)
        assert entries.undo(link, statements, first), "what it wrote stands there again"
        assert stored() == new

        again = claim("a", new, 2000)
        entries.load(link, statements, {"e": "another schedule"}, 5000)
        assert not entries.undo(link, statements, again), "the entry has begun anew"
