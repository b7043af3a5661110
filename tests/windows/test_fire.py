"""Opening windows: once per slot, where the runs go, and what the history says of slots without runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from celery_claim.exceptions import ConfigurationError, DatabaseUnavailable
from celery_claim.schedules import window
from celery_claim.windows.fire import Outcome
from tests.conftest import Database
from tests.proxy import Proxy
from tests.windows.fleet import HOUR, Fleet


def test_a_slot_is_fired_once_whoever_asks(fleet: Fleet) -> None:
    fleet.declare(concurrency=2)

    assert [fleet.fire(), fleet.fire(), fleet.fire(by=fleet.second)] == [
        Outcome.FIRED,
        Outcome.NOT_DUE,
        Outcome.NOT_DUE,
    ]
    assert [(run["consumer_id"], run["ordinal"], run["consumers"]) for run in fleet.runs()] == [(0, 0, 2), (1, 1, 2)]
    assert all(run["published_at"] for run in fleet.runs())


def test_the_next_slot_is_fired_again(fleet: Fleet) -> None:
    fleet.declare()
    fleet.fire()
    for run in fleet.start_all():
        fleet.end(run)

    fleet.pass_time(HOUR)

    assert fleet.fire() is Outcome.FIRED
    assert [run["fire_seq"] for run in fleet.runs()] == [1, 2]
    assert fleet.events() == []


def test_a_first_fire_has_missed_nothing(fleet: Fleet) -> None:
    fleet.declare()

    fleet.fire()

    assert fleet.events() == []


def test_slots_that_nobody_fired_are_one_row_of_the_history(fleet: Fleet) -> None:
    fleet.declare()
    fleet.fire()
    for run in fleet.start_all():
        fleet.end(run)

    fleet.pass_time(5 * HOUR)
    fleet.fire()

    (missed,) = fleet.events("missed")
    assert missed["error"].startswith("4 slots")
    assert missed["slot_start"] == fleet.window().last_slot_start - 4 * HOUR * 1000


@pytest.mark.needs("network")
def test_a_trigger_whose_commit_got_no_answer_knows_that_it_won(
    database: Database, proxied: Callable[[Database], Proxy]
) -> None:
    proxy = proxied(database)
    fleet = Fleet(database, url=proxy.url)
    fleet.declare(concurrency=2)
    proxy.swallow_reply(rb"^COMMIT")

    triggered = fleet.first.trigger("w", by="a test")

    assert proxy.swallowed == [b"COMMIT"]
    assert (triggered.outcome, triggered.fire_seq) == (Outcome.FIRED, 1)
    assert len(fleet.runs("pending")) == 2
    assert all(run["published_at"] for run in fleet.runs())


@pytest.mark.needs("network")
def test_a_trigger_whose_commit_never_came_has_opened_nothing(
    database: Database, proxied: Callable[[Database], Proxy]
) -> None:
    proxy = proxied(database)
    fleet = Fleet(database, url=proxy.url)
    fleet.declare(concurrency=2)
    proxy.lose_request(rb"^COMMIT")

    with pytest.raises(DatabaseUnavailable) as raised:
        fleet.trigger()

    assert "not known" not in str(raised.value)
    assert fleet.runs() == []
    assert fleet.trigger() is Outcome.FIRED


@pytest.mark.needs("network")
def test_a_trigger_that_cannot_find_out_whether_it_won_says_so(
    database: Database, proxied: Callable[[Database], Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_claim.windows.fire.ANSWER_SECONDS", 0.5)
    proxy = proxied(database)
    fleet = Fleet(database, url=proxy.url)
    fleet.declare()
    proxy.swallow_reply(rb"^COMMIT", times=None)

    with pytest.raises(DatabaseUnavailable, match="whether window w was opened is not known"):
        fleet.trigger()

    proxy.heal()
    assert len(fleet.runs("pending")) == 1


def test_a_window_whose_consumers_have_time_left_is_occupied(fleet: Fleet) -> None:
    fleet.declare()
    fleet.trigger()

    assert fleet.fire() is Outcome.OCCUPIED


def test_a_fire_starts_only_consumers_that_are_not_at_work(fleet: Fleet) -> None:
    """A row of two slots' length occupies its consumer, and concurrency stays what it says."""
    fleet.declare(concurrency=3, max_run_time=1)
    fleet.fire()
    long, *short = fleet.start_all()
    for run in short:
        fleet.end(run)
    fleet.pass_time(2)  # its time is over, its row is not

    fleet.trigger()

    assert [run["consumer_id"] for run in fleet.runs("pending")] == [1, 2]
    assert long.consumer_id == 0


def test_a_slot_that_finds_every_consumer_at_work_is_skipped(fleet: Fleet) -> None:
    fleet.declare(max_run_time=1)
    fleet.trigger()
    fleet.start_all()
    fleet.pass_time(2)

    assert fleet.fire() is Outcome.BUSY
    assert [row["state"] for row in fleet.events()] == ["skipped"]
    assert fleet.trigger() is Outcome.BUSY
    assert fleet.fire() is Outcome.NOT_DUE


def test_a_paused_window_is_not_fired_and_resumes_at_its_next_slot(fleet: Fleet) -> None:
    """C70: nothing runs at once, and what was slept through is not called missed."""
    fleet.declare()
    fleet.first.pause("w")
    assert [fleet.fire(), fleet.trigger()] == [Outcome.PAUSED, Outcome.PAUSED]
    fleet.pass_time(3 * HOUR)

    fleet.first.resume("w")

    assert fleet.fire() is Outcome.NOT_DUE
    fleet.pass_time(HOUR)
    assert fleet.fire() is Outcome.FIRED
    assert fleet.events() == []


def test_a_trigger_moves_no_slot_and_says_who(fleet: Fleet) -> None:
    fleet.declare(kwargs={"a": 1}, queue="q2")
    before = fleet.window().last_slot_start

    assert fleet.trigger() is Outcome.FIRED

    (run,) = fleet.runs()
    assert (run["kind"], run["triggered_by"]) == ("manual", "a test")
    window = fleet.window()
    assert (window.last_slot_start, window.triggered_by) == (before, "a test")
    assert (window.definition.queue, window.definition.kwargs) == ("q2", {"a": 1})


def test_of_many_triggers_one_wins(fleet: Fleet, database: Database) -> None:
    fleet.declare()
    outcomes: list[Outcome] = []
    callers, each = (8, 62) if database.can("row_locks") else (4, 10)

    def call() -> None:
        dispatcher = fleet.dispatcher()
        for _ in range(each):
            outcomes.append(dispatcher.trigger("w", by="many")[0])

    threads = [threading.Thread(target=call) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert Counter(outcomes) == {Outcome.FIRED: 1, Outcome.OCCUPIED: callers * each - 1}


def test_of_many_fires_in_one_slot_one_wins(fleet: Fleet) -> None:
    """Also when the first one's consumers have ended long before the others ask."""
    fleet.declare(max_run_time=1)
    outcomes = []
    for _ in range(3):
        outcomes.append(fleet.fire())
        for run in fleet.start_all():
            fleet.end(run, "empty")

    assert outcomes == [Outcome.FIRED, Outcome.NOT_DUE, Outcome.NOT_DUE]


def test_of_eight_beats_at_every_slot_one_fires(fleet: Fleet, database: Database) -> None:
    fleet.declare(max_run_time=1)
    callers, slots = (8, 15) if database.can("row_locks") else (4, 5)
    together = threading.Barrier(callers)
    outcomes: list[list[Outcome]] = [[] for _ in range(slots)]

    def beat() -> None:
        dispatcher = fleet.dispatcher()
        for slot in range(slots):
            together.wait()
            outcomes[slot].append(fleet.fire(by=dispatcher))
            if together.wait() == 0:
                fleet.pass_time(HOUR)

    threads = [threading.Thread(target=beat) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [Counter(each)[Outcome.FIRED] for each in outcomes] == [1] * slots
    assert [run["fire_seq"] for run in fleet.runs()] == list(range(1, slots + 1))
    assert fleet.events() == []


def test_min_interval_holds_back_triggers_and_no_slot(fleet: Fleet) -> None:
    fleet.declare(min_interval=60)
    fleet.trigger()
    for run in fleet.start_all():
        fleet.end(run)

    assert fleet.trigger() is Outcome.TOO_SOON
    assert fleet.fire() is Outcome.FIRED
    for run in fleet.start_all():
        fleet.end(run)
    fleet.pass_time(61)
    assert fleet.trigger() is Outcome.FIRED


def test_wake_opens_the_windows_of_a_task(fleet: Fleet) -> None:
    fleet.declare("one")
    fleet.declare("two")
    fleet.declare("three", enabled=False)

    assert fleet.first.wake("proj.work") is True
    assert {run["window"] for run in fleet.runs()} == {"one", "two"}
    assert fleet.first.wake("proj.work") is False
    with pytest.raises(LookupError, match=r"proj\.other"):
        fleet.first.wake("proj.other")


def test_a_message_with_fields_that_no_window_has_fires_nothing(fleet: Fleet) -> None:
    """C73: no address in a message is ever asked."""
    declared = {**window("proj.work", frequency=HOUR, name="w", run_type="any")["kwargs"]["window"]}

    with pytest.raises(ConfigurationError, match="unknown fields callback, url"):
        fleet.first.fire_declared({**declared, "url": "http://127.0.0.1:9/", "callback": "file:///etc/passwd"})
    with pytest.raises(ConfigurationError, match="no frequency"):
        fleet.first.fire_declared({key: value for key, value in declared.items() if key != "frequency"})

    assert fleet.first.look().windows == {}
    assert fleet.first.fire_declared(declared) is Outcome.FIRED


# ---- where runs go


def nodes_of(fleet: Fleet) -> list[tuple[str, int]]:
    return [(run["node"], run["consumer_id"]) for run in fleet.runs("pending")]


def test_all_goes_to_every_node_that_lives_and_takes_runs(fleet: Fleet) -> None:
    fleet.node("dead")
    fleet.pass_time(30)
    fleet.node("n1")
    fleet.node("n2")
    fleet.node("closing", accepting=False)
    fleet.declare(run_type="all", concurrency=2)

    fleet.fire()

    assert nodes_of(fleet) == [("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1)]
    assert [run["ordinal"] for run in fleet.runs()] == [0, 1, 2, 3]


def test_auto_goes_to_the_node_with_the_least_to_do_and_else_in_turn(fleet: Fleet) -> None:
    fleet.node("busy", running=3)
    fleet.node("n1")
    fleet.node("n2")
    fleet.declare(concurrency=2, run_type="auto")

    seen = []
    for _ in range(4):
        fleet.fire()
        seen.append({node for node, _ in nodes_of(fleet)})
        for run in fleet.start_all():
            fleet.end(run)
        fleet.pass_time(HOUR)
        for name, running in (("busy", 3), ("n1", 0), ("n2", 0)):
            fleet.node(name, running=running)

    assert all(len(nodes) == 1 for nodes in seen)
    assert {node for nodes in seen for node in nodes} == {"n1", "n2"}
    assert seen[0] != seen[1]


def test_windows_that_open_together_are_spread_over_the_nodes(fleet: Fleet) -> None:
    for name in ("n1", "n2", "n3"):
        fleet.node(name)
    for name in ("a", "b", "c"):
        fleet.declare(name, run_type="auto", concurrency=2)

    fleet.first.fire(["a", "b", "c"])

    assert Counter(node for node, _ in nodes_of(fleet)) == {"n1": 2, "n2": 2, "n3": 2}


def test_main_goes_to_the_main_node_and_to_no_other(fleet: Fleet) -> None:
    fleet.node("n1")
    fleet.declare(run_type="main", concurrency=2)
    assert fleet.fire() is Outcome.NO_NODE
    assert "no main node" in fleet.events("missed")[0]["error"]

    fleet.node("n2", role="main")
    fleet.make_main("n2")
    fleet.pass_time(HOUR)
    fleet.node("n1")
    fleet.node("n2", role="main")
    fleet.make_main("n2")

    assert fleet.fire() is Outcome.FIRED
    assert nodes_of(fleet) == [("n2", 0), ("n2", 1)]


def test_claim_main_node_names_the_main_node(fleet_with: Callable[..., Fleet]) -> None:
    fleet = fleet_with(claim_main_node="n2")
    fleet.node("n1", role="main")
    fleet.make_main("n1")
    fleet.node("n2")
    fleet.declare(run_type="main")

    fleet.fire()

    assert nodes_of(fleet) == [("n2", 0)]


def test_a_patient_fire_leaves_the_slot_for_a_node_that_comes(fleet: Fleet) -> None:
    fleet.declare(run_type="auto")
    assert fleet.fire(patient=True) is Outcome.NO_NODE
    assert fleet.events() == []

    fleet.node("n1")

    assert fleet.fire(patient=True) is Outcome.FIRED


def test_queue_chooses_the_nodes_that_consume_it(fleet: Fleet) -> None:
    fleet.node("n1", queues=("celery",))
    fleet.node("n2", queues=("celery", "heavy"))
    fleet.declare(run_type="all", queue="heavy")
    fleet.declare("nowhere", run_type="auto", queue="nobody")

    fleet.fire()
    fleet.fire("nowhere")

    assert nodes_of(fleet) == [("n2", 0)]
    assert "nobody" in fleet.events("missed")[0]["error"]


# ---- definitions


def test_a_longer_and_a_shorter_frequency_never_stop_a_window(fleet: Fleet) -> None:
    for frequency in (10, 3600, 5):
        fleet.declare(frequency=frequency)
        fleet.pass_time(frequency)
        assert fleet.fire() is Outcome.FIRED
        for run in fleet.start_all():
            fleet.end(run)

    assert fleet.events() == []


def test_a_changed_frequency_does_not_fire_at_once(fleet: Fleet) -> None:
    fleet.declare(frequency=2 * HOUR)
    fleet.fire()
    for run in fleet.start_all():
        fleet.end(run)

    fleet.declare(frequency=HOUR)

    assert fleet.fire() is Outcome.NOT_DUE


def test_what_a_person_set_outlives_a_deploy(fleet: Fleet) -> None:
    fleet.declare(concurrency=2)
    fleet.first.set_concurrency("w", 5)
    fleet.first.pause("w")

    fleet.declare(concurrency=3, frequency=2 * HOUR)

    window = fleet.window()
    assert (window.concurrency, window.enabled, window.frequency) == (5, False, 2 * HOUR * 1000)
    fleet.first.set_concurrency("w", None)
    assert fleet.window().concurrency == 3


def test_concurrency_above_a_cap_is_refused_with_both_numbers(fleet: Fleet) -> None:
    fleet.declare(max_concurrency=4)

    with pytest.raises(ConfigurationError, match="concurrency 5 does not work, expected 1 to 4"):
        fleet.first.set_concurrency("w", 5)


def test_names_that_differ_in_case_are_two_windows(fleet: Fleet) -> None:
    fleet.declare("mail")
    fleet.declare("Mail")

    assert fleet.fire("mail") is fleet.fire("Mail") is Outcome.FIRED
