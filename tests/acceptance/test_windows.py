"""Windows over real workers: where their runs go, and what a kill, a freeze or an outage leaves behind."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.stage import PROGRAM, Stage
from tests.conftest import Database
from tests.processes import eventually

#: A fleet that notices a death within seconds.
QUICK = {
    "claim_node_heartbeat": 0.5,
    "claim_node_timeout": 3.0,
    "claim_accept_timeout": 1.0,
    "claim_maintenance_interval": 0.5,
}
Stages = Callable[..., Stage]


def runs(show: Stage, window: str, *states: str, **filters: Any) -> list[dict[str, Any]]:
    """Runs of a window that had a consumer, oldest first."""
    found = show.windows.history(window=window, states=states or None, limit=10_000, **filters)
    return [run for run in reversed(found) if run["consumer_id"] is not None]


def alive(show: Stage, count: int) -> None:
    """Wait until so many nodes take runs."""
    eventually(lambda: sum(n["alive"] and n["accepting"] for n in show.windows.nodes()) == count, 20, f"{count} nodes")


def places(show: Stage, window: str) -> dict[int, set[tuple[str, int]]]:
    """Fire -> the nodes and consumer ids it went to."""
    found: dict[int, set[tuple[str, int]]] = {}
    for run in runs(show, window):
        found.setdefault(run["fire_seq"], set()).add((run["node"], run["consumer_id"]))
    return found


@pytest.mark.slow
def test_each_run_type_goes_where_it_promises(mariadb: Database, stage: Stages) -> None:
    kinds = {kind: {"frequency": 2, "concurrency": 2, "run_type": kind} for kind in ("auto", "all", "main", "any")}
    show = stage(mariadb, windows=kinds, settings=QUICK)
    for number in (1, 2, 3):
        show.worker("-c", "4", "-n", f"w{number}@test", env={"CLAIM_NODE_ROLE": "main" if number == 2 else ""})
    alive(show, 3)

    show.beat()
    eventually(lambda: all(len(runs(show, kind, "empty")) >= 8 for kind in kinds), 30, "four fires of each window")

    names = {f"w{number}@test" for number in (1, 2, 3)}
    assert all(len({node for node, _ in each}) == 1 for each in places(show, "auto").values())
    # In turn among the least loaded; the main node is often not among them.
    assert len({node for each in places(show, "auto").values() for node, _ in each}) >= 2
    assert places(show, "all")[2] == {(node, number) for node in names for number in (0, 1)}
    assert {node for each in places(show, "main").values() for node, _ in each} == {"w2@test"}
    assert all({number for _, number in each} <= {0, 1} for each in places(show, "any").values())
    assert Counter(run["state"] for kind in kinds for run in runs(show, kind)).keys() <= {
        "empty",
        "pending",
        "running",
        "missed",  # on a machine that is too slow for slots of two seconds
    }


@pytest.mark.slow
def test_a_worker_that_greets_its_neighbours_takes_its_runs(mariadb: Database, stage: Stages) -> None:
    """As `celery worker` does by default, which costs the other workers of these tests a second each."""
    show = stage(mariadb, windows={"work": {"frequency": 1}}, settings=QUICK)
    show.processes.worker(PROGRAM, "-n", "w1@test", "-c", "2", env=show.environment)
    alive(show, 1)

    show.beat("-S", "claim")

    eventually(lambda: len(runs(show, "work", "empty")) >= 2, 20, "runs")


@pytest.mark.slow
def test_the_runs_of_a_killed_node_move_or_are_given_up_and_their_numbers_are_free_again(
    mariadb: Database, stage: Stages
) -> None:
    """Kill the chosen node before it starts its runs, and while it is at them."""
    show = stage(mariadb, windows={"auto": {"frequency": 20, "concurrency": 2}}, settings=QUICK, lease_seconds=3)
    first = show.worker("-c", "2", "-n", "w1@test")
    alive(show, 1)
    first.stop_signal(signal.SIGSTOP)  # it still seems to live, and starts nothing
    second = show.worker("-c", "2", "-n", "w2@test", ready=False)
    show.windows.register(show.declared())
    show.windows.fire(["auto"])
    assert {node for node, _ in places(show, "auto")[1]} == {"w1@test"}

    second.wait_ready()
    eventually(lambda: len(runs(show, "auto", "empty")) == 2, 15, "both runs on the other node")
    assert {(run["node"], run["attempt"]) for run in runs(show, "auto")} == {("w2@test", 2)}

    first.kill9()
    show.add(range(1, 5), "sleep 30")
    show.windows.trigger("auto")
    eventually(lambda: len(runs(show, "auto", "running")) == 2, 10, "two runs at work")
    second.kill9()
    third = show.worker("-c", "2", "-n", "w3@test")
    eventually(lambda: len(runs(show, "auto", "lost")) == 2, 15, "the killed runs are lost")
    show.windows.trigger("auto")
    eventually(lambda: {r["node"] for r in runs(show, "auto", "running")} == {"w3@test"}, 10, "free numbers")
    assert third.running


@pytest.mark.slow
def test_another_main_node_takes_over_when_the_main_node_dies(mariadb: Database, stage: Stages) -> None:
    show = stage(mariadb, windows={"main": {"frequency": 1, "run_type": "main"}}, settings=QUICK)
    show.worker("-c", "1", "-n", "w0@test")
    alive(show, 1)
    show.beat()
    eventually(lambda: show.windows.history(states=["missed"]), 10, "a missed slot without a main node")
    assert "no main node" in show.windows.history(states=["missed"])[0]["error"]
    mains = {
        f"m{number}@test": show.worker("-c", "1", "-n", f"m{number}@test", "--claim-role", "main") for number in (1, 2)
    }

    chosen = eventually(lambda: runs(show, "main", "empty"), 15, "a run on the main node")[-1]["node"]
    mains[chosen].kill9()
    (other,) = mains.keys() - {chosen}

    eventually(lambda: runs(show, "main", "empty")[-1]["node"] == other, 15, "takeover")
    assert {run["node"] for run in runs(show, "main")} == set(mains), "never on a node without the role"


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_a_row_of_three_slots_length_never_multiplies_consumers(mariadb: Database, stage: Stages, pool: str) -> None:
    show = stage(mariadb, windows={"work": {"frequency": 1, "concurrency": 4}}, settings=QUICK, batch_size=1)
    show.add(range(1, 9), "sleep 3")
    show.worker("-P", pool, "-c", "8", "-n", "w1@test")
    alive(show, 1)
    show.beat()

    show.ended(8, timeout=60 if pool != "solo" else 90)
    changes = sorted((e["at"], {"start": 1, "end": -1}[what]) for what in ("start", "end") for e in show.happened(what))
    at_once = peak = 0
    for _, change in changes:
        at_once += change
        peak = max(peak, at_once)
    assert peak <= 4
    assert set(show.starts().values()) == {1}


@pytest.mark.slow
def test_a_fleet_that_was_down_starts_no_avalanche_and_history_tells_of_it(mariadb: Database, stage: Stages) -> None:
    """C69: sixty slots pass while no worker is there, under a beat that sends messages and one that fires itself."""
    show = stage(mariadb, windows={"work": {"frequency": 0.2, "concurrency": 2, "run_type": "any"}}, settings=QUICK)
    first = show.worker("-c", "2", "-n", "w1@test")
    alive(show, 1)
    stock = show.beat("-S", "celery.beat.PersistentScheduler", "-s", str(show.log_path.with_name("schedule")))
    eventually(lambda: runs(show, "work", "empty"), 10, "a run")
    first.terminate()
    before = len(runs(show, "work"))
    eventually(lambda: stock.log().count("Sending due task") > 60, 30, "sixty slots")

    down_until = time.time() * 1000
    show.worker("-c", "2", "-n", "w2@test")
    eventually(lambda: len(runs(show, "work", "empty")) > before + 4, 20, "runs again")

    after = [run for run in runs(show, "work") if run["created_at"] > down_until]
    slots = Counter((run["slot_start"], run["consumer_id"]) for run in after)
    assert max(slots.values()) == 1, "one fire per slot, whatever waited"
    missed = [run for run in show.windows.history(states=["missed"], limit=1000) if run["consumer_id"] is None]
    assert any("slots" in run["error"] for run in missed)


@pytest.mark.slow
def test_of_two_workers_of_one_name_the_later_gets_the_runs(mariadb: Database, stage: Stages) -> None:
    show = stage(mariadb, windows={"work": {"frequency": 1}}, settings=QUICK)
    older = show.worker("-c", "1", "-n", "same@test")
    alive(show, 1)
    newer = show.worker("-c", "1", "-n", "same@test")

    older.wait_for_log("another worker calls itself same@test")
    show.beat()
    eventually(lambda: len(runs(show, "work", "empty")) >= 4, 20, "runs")

    assert "claim-work" not in older.log()
    assert "claim-work" in newer.log()


@pytest.mark.slow
def test_concurrency_changes_while_consumers_are_at_work(mariadb: Database, stage: Stages) -> None:
    window = {"frequency": 60, "max_run_time": 30, "max_concurrency": 8}
    show = stage(mariadb, windows={"work": window}, settings=QUICK, batch_size=1)
    show.add(range(1, 2001), "sleep 0.1")
    show.worker("-c", "8", "-n", "w1@test")
    alive(show, 1)
    show.windows.register(show.declared())
    show.windows.trigger("work")
    eventually(lambda: len(runs(show, "work", "running")) == 1, 10, "one consumer")

    show.windows.set_concurrency("work", 8)
    eventually(lambda: len(runs(show, "work", "running")) == 8, 10, "eight consumers")
    show.windows.set_concurrency("work", 2)
    eventually(lambda: {r["consumer_id"] for r in runs(show, "work", "running")} == {0, 1}, 10, "two consumers")
    show.windows.pause("work")
    eventually(lambda: not runs(show, "work", "running"), 10, "none")

    assert set(show.starts().values()) == {1}


@pytest.mark.slow
def test_a_continuous_window_drains_its_backlog_at_full_speed(mariadb: Database, stage: Stages) -> None:
    window = {"frequency": 30, "max_run_time": 0.5, "continuous": True, "concurrency": 2}
    show = stage(mariadb, windows={"work": window}, settings=QUICK, batch_size=5)
    show.add(range(1, 201), "sleep 0.02")
    show.worker("-c", "2", "-n", "w1@test")
    alive(show, 1)
    show.windows.register(show.declared())

    show.windows.trigger("work")
    show.ended(200, timeout=20)

    kinds = Counter(run["kind"] for run in runs(show, "work"))
    assert kinds["manual"] == 2
    assert kinds["chained"] >= 2
    assert {run["fire_seq"] for run in runs(show, "work")} == {1}
