"""Maintenance of windows: what was not sent is sent once, what does not start moves, what is old is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import func, insert, select

from celery_claim.windows.fire import Outcome
from tests.conftest import Database
from tests.windows.fleet import HOUR, Fleet


@pytest.fixture
def published(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runs that the fleet's first dispatcher sends from now on; the broker takes them."""
    seen: list[Any] = []
    send = fleet.first._send_one

    def note(run: Any, producer: Any) -> None:
        seen.append(run)
        send(run, producer)

    monkeypatch.setattr(fleet.first, "_send_one", note)
    return seen


def broken_broker(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection to the broker for the second dispatcher."""
    fleet.second.app.conf.broker_url = "redis://127.0.0.1:1/0"
    fleet.second.app.conf.broker_connection_timeout = 0.5


def test_a_fire_whose_messages_were_not_sent_is_sent_by_maintenance_once(
    fleet: Fleet, published: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_broker(fleet, monkeypatch)
    fleet.declare(concurrency=2)
    assert fleet.fire(by=fleet.second) is Outcome.FIRED
    assert [run["published_at"] for run in fleet.runs()] == [None, None]

    fleet.maintain()
    assert published == [], "it may still be on its way"
    fleet.pass_time(6)
    fleet.maintain()
    fleet.maintain()

    assert [(run.consumer_id, run.attempt) for run in published] == [(0, 1), (1, 1)]
    assert len(fleet.start_all()) == 2


def test_a_run_of_any_that_waits_in_a_busy_fleet_is_not_sent_again(fleet: Fleet, published: list[Any]) -> None:
    fleet.declare()
    fleet.fire()
    published.clear()

    fleet.pass_time(60)
    fleet.maintain()

    assert published == []
    assert len(fleet.runs("pending")) == 1


def test_a_run_of_auto_that_is_not_started_moves_to_a_node_with_a_free_place(
    fleet: Fleet, published: list[Any]
) -> None:
    fleet.node("n1", running=0)
    fleet.declare(run_type="auto")
    fleet.fire()
    (first,) = fleet.runs()
    fleet.node("full", pool_size=2, running=2)
    published.clear()
    fleet.pass_time(6)
    fleet.node("n1")
    fleet.node("full", pool_size=2, running=2)
    fleet.maintain()
    assert published == [], "it waits rather than move to a full node"

    fleet.node("n2")
    fleet.maintain()

    assert [(run.node, run.attempt) for run in published] == [("n2", 2)]
    (moved,) = fleet.runs()
    assert fleet.start(first, node="n1") is None, "its first message has lost"
    assert fleet.start(moved, node="n2") is not None


def test_a_run_that_came_back_to_its_first_node_is_not_started_by_its_first_message(fleet: Fleet) -> None:
    fleet.node("n1")
    fleet.declare(run_type="auto")
    fleet.fire()
    (first,) = fleet.runs()
    for other in ("n2", "n1"):
        fleet.pass_time(30)
        fleet.node(other)
        fleet.maintain()

    (back,) = fleet.runs()
    assert (back["node"], back["attempt"]) == ("n1", 3)
    assert fleet.start(first, node="n1") is None
    assert fleet.start(back, node="n1") is not None


@pytest.mark.parametrize("kind", ["all", "main"])
def test_runs_of_other_types_never_move(fleet: Fleet, published: list[Any], kind: str) -> None:
    fleet.node("n1", role="main")
    fleet.make_main("n1")
    fleet.declare(run_type=kind)
    fleet.fire()
    published.clear()
    fleet.pass_time(6)
    fleet.node("n2")

    fleet.maintain()

    assert published == []
    assert [run["node"] for run in fleet.runs("pending")] == ["n1"]


def test_what_nobody_started_or_kept_is_marked(fleet: Fleet) -> None:
    fleet.declare("late")
    fleet.declare("killed", max_run_time=10)
    fleet.fire("late")
    fleet.fire("killed")
    fleet.start({run["window"]: run for run in fleet.runs()}["killed"])
    fleet.pass_time(2 * HOUR)

    fleet.maintain()

    assert {run["window"]: run["state"] for run in fleet.runs()} == {"late": "missed", "killed": "lost"}
    assert fleet.window("killed").active_until is None


def test_old_runs_go_in_batches_and_live_ones_stay(fleet_with: Callable[..., Fleet]) -> None:
    fleet = fleet_with(claim_history_retention=HOUR)
    fleet.declare(concurrency=2)
    fleet.trigger()
    for run in fleet.start_all():
        fleet.end(run)
    fleet.pass_time(2 * HOUR)
    fleet.fire()

    with fleet.link() as link:
        assert fleet.first.prune(link) == 2
        assert fleet.first.prune(link) == 0

    assert {run["state"] for run in fleet.runs()} == {"pending"}


def fill(fleet: Fleet, rows: int, *, age_ms: int) -> None:
    now = fleet.first.look().now
    row = {
        "window": "w", "fire_seq": 1, "slot_start": 0, "kind": "scheduled", "state": "done", "start_before": 0,
        "max_run_time": 1, "created_at": now - age_ms, "finished_at": now - age_ms, "node": "",
    }  # fmt: skip
    with fleet.link() as link:
        for _ in range(rows // 1000):
            link.execute(insert(fleet.tables.run), [row] * 1000)


def test_the_history_never_has_more_rows_than_allowed(fleet_with: Callable[..., Fleet]) -> None:
    fleet = fleet_with(claim_history_max_rows=2000)
    fill(fleet, 5000, age_ms=1000)

    with fleet.link() as link:
        fleet.first.prune(link)
        left = link.execute(select(func.count()).select_from(fleet.tables.run)).scalar_one()

    assert left == 2000


@pytest.mark.slow
def test_two_that_prune_at_once_delete_each_row_once_and_wait_for_no_one(fleet_with: Callable[..., Fleet]) -> None:
    """C72: 50,000 old rows, two pruners."""
    fleet = fleet_with(claim_history_retention=HOUR)
    fill(fleet, 50_000, age_ms=2 * HOUR * 1000)
    deleted, errors = [], []

    def prune() -> None:
        dispatcher = fleet.dispatcher()
        try:
            with dispatcher.database.linked() as link:
                deleted.append(dispatcher.prune(link, batches=1000))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=prune) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not errors
    assert sum(deleted) == 50_000


def test_a_silent_node_leaves_the_register_after_an_hour(fleet: Fleet) -> None:
    fleet.node("gone")
    fleet.pass_time(2 * HOUR)
    fleet.node("here")

    with fleet.link() as link:
        assert fleet.first.forget_nodes(link, silent_seconds=HOUR) == ["gone"]

    assert [node["node"] for node in fleet.first.nodes()] == ["here"]


def test_fires_ends_and_changes_that_race_wait_for_each_other_and_never_for_ever(
    fleet: Fleet, database: Database
) -> None:
    """Consumers end, slots fire, triggers and changes come, all at once: no deadlock reaches anybody."""
    fleet.declare("w", concurrency=8, continuous=True)
    errors: list[BaseException] = []
    stop = threading.Event()

    def guarded(work: Callable[[Fleet], None]) -> Callable[[], None]:
        def run() -> None:
            mine = Fleet(database)
            while not stop.is_set():
                try:
                    work(mine)
                except Exception as error:
                    errors.append(error)

        return run

    def consume(mine: Fleet) -> None:
        for run in mine.start_all():
            mine.end(run, "timeout", unfinished=True, claimed=1)

    def change(mine: Fleet) -> None:
        for number in (2, 8):
            mine.first.set_concurrency("w", number)

    works = [consume, consume, consume, lambda mine: mine.trigger(), lambda mine: mine.maintain(), change]
    threads = [threading.Thread(target=guarded(work)) for work in works]
    for thread in threads:
        thread.start()
    stop.wait(5)
    stop.set()
    for thread in threads:
        thread.join()

    assert not errors
    live: dict[int, int] = {}
    for run in fleet.runs("pending", "running"):
        live[run["consumer_id"]] = live.get(run["consumer_id"], 0) + 1
    assert max(live.values(), default=0) <= 1
