"""A run: started once, kept by its lease, ended by its owner, followed by at most one other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import update

from celery_claim.exceptions import DatabaseUnavailable
from celery_claim.windows.fire import Outcome
from celery_claim.windows.runs import RunLease, lose_earlier_starts
from tests.conftest import Database
from tests.windows.fleet import HOUR, Fleet


def test_a_second_delivery_finds_the_run_started(fleet: Fleet) -> None:
    fleet.node("n1")
    fleet.declare(run_type="auto")
    fleet.fire()
    (run,) = fleet.runs()

    assert fleet.start(run) is not None
    assert fleet.start(run) is None
    assert [each["state"] for each in fleet.runs()] == ["running"]


def test_a_message_that_comes_too_late_starts_nothing(fleet: Fleet) -> None:
    fleet.declare()
    fleet.fire()
    (run,) = fleet.runs()
    fleet.pass_time(HOUR)

    assert fleet.start(run) is None
    assert [(each["state"], each["error"]) for each in fleet.runs()] == [
        ("missed", "its message came when its time was over")
    ]


def test_how_long_a_run_may_start_rows_counts_from_its_start(fleet: Fleet) -> None:
    fleet.declare(max_run_time=20)
    fleet.fire()
    fleet.pass_time(10)

    (run,) = fleet.start_all()

    assert 19_000 < run.left <= 20_000


def test_the_last_run_to_end_frees_the_window(fleet: Fleet) -> None:
    fleet.declare(concurrency=2)
    fleet.trigger()
    first, second = fleet.start_all()

    fleet.end(first, claimed=3, succeeded=3)
    assert fleet.trigger() is Outcome.OCCUPIED
    fleet.end(second, "empty")

    assert fleet.window().active_until is None
    assert fleet.trigger() is Outcome.FIRED
    assert [(run["state"], run["claimed"]) for run in fleet.runs(fire_seq=1)] == [("done", 3), ("empty", 0)]


def test_a_run_of_an_earlier_fire_does_not_free_the_window(fleet: Fleet) -> None:
    fleet.declare(max_run_time=1)
    fleet.trigger()
    (long,) = fleet.start_all()
    fleet.pass_time(30)  # it was cut off: nobody renewed it
    fleet.trigger()

    fleet.end(long)

    assert fleet.trigger() is Outcome.OCCUPIED


def test_a_killed_consumer_frees_its_number_when_its_lease_ends(fleet: Fleet) -> None:
    fleet.declare(max_run_time=1)
    fleet.trigger()
    fleet.start_all()
    fleet.pass_time(5)
    assert fleet.trigger() is Outcome.BUSY

    fleet.pass_time(20)

    assert fleet.trigger() is Outcome.FIRED


def test_a_restarted_worker_frees_the_numbers_of_its_earlier_start_at_once(fleet: Fleet) -> None:
    fleet.declare(max_run_time=1, concurrency=2)
    fleet.trigger()
    fleet.start_all(node="n1", boot="first")
    fleet.pass_time(2)
    assert fleet.trigger() is Outcome.BUSY

    with fleet.link() as link:
        assert lose_earlier_starts(link, fleet.first.statements, "n1", "second") == 2

    assert fleet.trigger() is Outcome.FIRED
    assert {run["state"] for run in fleet.runs(fire_seq=1)} == {"lost"}


def test_a_renewed_run_stays_live(fleet: Fleet) -> None:
    fleet.declare(max_run_time=1)
    fleet.trigger()
    (run,) = fleet.start_all()
    lease = RunLease(fleet.first.statements, run, fleet.first.rules, heartbeat=0.0)
    fleet.pass_time(19)

    with fleet.link() as link:
        lease.keep(link)
    fleet.pass_time(19)

    assert not lease.over
    assert fleet.trigger() is Outcome.BUSY


def test_a_run_that_was_given_up_stops_and_its_end_is_refused(fleet: Fleet) -> None:
    fleet.declare(max_run_time=1, continuous=True)
    fleet.trigger()
    (run,) = fleet.start_all()
    lease = RunLease(fleet.first.statements, run, fleet.first.rules, heartbeat=0.0)
    fleet.pass_time(30)
    fleet.maintain()
    assert [each["state"] for each in fleet.runs()] == ["lost"]

    with fleet.link() as link:
        lease.keep(link)

    assert lease.over
    assert lease.lost
    assert fleet.end(run, unfinished=True) is None
    assert [each["state"] for each in fleet.runs()] == ["lost"]


def test_a_consumer_that_was_replaced_does_not_come_back(fleet: Fleet) -> None:
    """Frozen for longer than its lease, awake before any maintenance has marked it: its number is another's now."""
    fleet.declare(max_run_time=1, continuous=True)
    fleet.trigger()
    (frozen,) = fleet.start_all()
    lease = RunLease(fleet.first.statements, frozen, fleet.first.rules, heartbeat=0.0)
    fleet.pass_time(30)
    assert fleet.trigger() is Outcome.FIRED
    assert [run["state"] for run in fleet.runs()] == ["running", "pending"]

    with fleet.link() as link:
        lease.keep(link)

    assert lease.lost
    assert fleet.runs()[0]["lease_until"] < fleet.first.look().now


def test_a_consumer_that_was_replaced_has_no_successor(fleet: Fleet) -> None:
    fleet.declare(max_run_time=1, continuous=True)
    fleet.trigger()
    (frozen,) = fleet.start_all()
    fleet.pass_time(30)
    assert fleet.trigger() is Outcome.FIRED

    assert fleet.end(frozen, "timeout", unfinished=True) == []

    assert [run["state"] for run in fleet.runs()] == ["timeout", "pending"]


def test_a_pause_and_a_lower_concurrency_end_consumers(fleet: Fleet) -> None:
    fleet.declare(concurrency=2)
    fleet.trigger()
    leases = [RunLease(fleet.first.statements, run, fleet.first.rules, heartbeat=60) for run in fleet.start_all()]

    def over() -> list[bool]:
        with fleet.link() as link:
            for lease in leases:
                lease.keep(link)
        return [lease.over for lease in leases]

    assert over() == [False, False]
    fleet.first.set_concurrency("w", 1)
    assert over() == [False, True]
    fleet.first.pause("w")
    assert over() == [True, True]
    assert leases[0].due() <= time.monotonic() + 1.01


# ---- chained


def test_an_unfinished_run_of_a_continuous_window_is_followed_by_one(fleet: Fleet) -> None:
    fleet.declare(continuous=True, concurrency=2)
    fleet.trigger()
    first, second = fleet.start_all()

    (successor,) = fleet.end(first, "timeout", unfinished=True)
    assert fleet.end(second, "done") == []

    chained = [run for run in fleet.runs() if run["kind"] == "chained"]
    assert [(run["consumer_id"], run["attempt"], run["fire_seq"]) for run in chained] == [(0, 2, 1)]
    assert successor.task_id == chained[0]["task_id"]
    assert fleet.start(chained[0]) is not None


def test_no_successor_after_a_pause_a_lower_concurrency_or_in_an_ordinary_window(fleet: Fleet) -> None:
    fleet.declare("ordinary")
    fleet.declare("lowered", continuous=True, concurrency=2)
    fleet.declare("paused", continuous=True)
    for name in ("ordinary", "lowered", "paused"):
        fleet.trigger(name)
    started = {(run.window, run.consumer_id): run for run in fleet.start_all()}
    fleet.first.set_concurrency("lowered", 1)
    fleet.first.pause("paused")

    assert fleet.end(started["ordinary", 0], "timeout", unfinished=True) == []
    assert fleet.end(started["lowered", 1], "timeout", unfinished=True) == []
    assert fleet.end(started["paused", 0], "timeout", unfinished=True) == []
    assert len(fleet.end(started["lowered", 0], "timeout", unfinished=True)) == 1


def test_the_next_slot_fills_only_numbers_without_a_chained_run(fleet: Fleet) -> None:
    fleet.declare(continuous=True, concurrency=2, max_run_time=2 * HOUR)
    fleet.fire()
    first, second = fleet.start_all()
    fleet.pass_time(2 * HOUR)
    soon = fleet.first.look().now + 20_000
    with fleet.link() as link:  # their leases were renewed all the while
        link.execute(update(fleet.tables.run).values(lease_until=soon))
    fleet.end(first, "timeout", unfinished=True)
    fleet.end(second)

    assert fleet.fire() is Outcome.FIRED
    waiting = [(run["fire_seq"], run["consumer_id"]) for run in fleet.runs("pending")]
    assert waiting == [(1, 0), (2, 1)]


def test_empty_runs_are_left_out_of_the_history_if_asked(fleet_with: Callable[..., Fleet]) -> None:
    fleet = fleet_with(claim_log_empty_runs=False)
    fleet.declare(concurrency=2)
    fleet.trigger()
    first, second = fleet.start_all()

    fleet.end(first, "empty")
    fleet.end(second, "done", claimed=1)

    assert [run["state"] for run in fleet.runs()] == ["done"]
    assert fleet.window().active_until is None


# ---- more consumers while it is open


def test_an_open_window_gets_its_further_consumers_at_once(fleet: Fleet) -> None:
    fleet.declare(concurrency=1, max_concurrency=8)
    fleet.trigger()
    (first,) = fleet.start_all()

    fleet.first.set_concurrency("w", 4)
    assert [run["consumer_id"] for run in fleet.runs("pending")] == [1, 2, 3]
    for run in fleet.start_all():
        fleet.end(run)
    fleet.first.set_concurrency("w", 2)
    fleet.first.set_concurrency("w", 4)

    waiting = [(run["consumer_id"], run["attempt"]) for run in fleet.runs("pending")]
    assert waiting == [(2, 2), (3, 2)], "those that came on top, each as a further attempt"
    assert first.consumer_id == 0


def test_a_closed_window_gets_its_further_consumers_with_its_next_slot(fleet: Fleet) -> None:
    fleet.declare()

    fleet.first.set_concurrency("w", 3)
    assert fleet.runs() == []
    fleet.fire()

    assert len(fleet.runs()) == 3


# ---- lost answers


def test_a_lost_answer_to_a_commit_doubles_no_fire(
    database: Database, proxied: Callable[[Database], Any], fleet: Fleet
) -> None:
    proxy = proxied(database)
    cut = Fleet(database, url=proxy.url)
    cut.declare()
    proxy.swallow_reply(b"COMMIT")

    with pytest.raises(DatabaseUnavailable):
        cut.fire()

    assert fleet.fire() is Outcome.NOT_DUE
    assert [run["published_at"] for run in fleet.runs()] == [None], "the maintenance sends it"


def test_a_lost_answer_to_the_end_of_a_run_is_no_lost_run(
    database: Database, proxied: Callable[[Database], Any], fleet: Fleet
) -> None:
    proxy = proxied(database)
    cut = Fleet(database, url=proxy.url)
    cut.declare(continuous=True)
    cut.trigger()
    (run,) = cut.start_all()
    proxy.swallow_reply(b"COMMIT")

    with pytest.raises(DatabaseUnavailable):
        cut.end(run, "timeout", unfinished=True)

    assert cut.end(run, "timeout", unfinished=True) == [], "ours, and its successor is in the table"
    assert [(each["state"], each["attempt"]) for each in fleet.runs()] == [("timeout", 1), ("pending", 2)]
