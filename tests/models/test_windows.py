"""A model of slots, runs and triggers beside real tables: any order of fires, starts, ends, kills and changes.

Owners of runs keep them for ever and come back at any time, as frozen workers do.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import delete

from celery_claim.exceptions import ConfigurationError
from celery_claim.windows.fire import Outcome
from tests.windows.fleet import HOUR, Fleet

CAP = 4


class Windows(RuleBasedStateMachine):
    """What beats, workers and people may do, in any order."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self.fleet = fleet
        self.owners: list = []
        #: (fire, place, attempt) of every run that somebody started.
        self.starts: list = []
        self.fired: list[int] = []
        #: Every run that was ever in the table: its history is complete.
        self.known: set[int] = set()
        self.slot_fired = False

    @initialize(kind=st.sampled_from(["any", "all", "auto"]), continuous=st.booleans(), concurrency=st.integers(1, 3))
    def declare(self, kind, continuous, concurrency):
        with self.fleet.link() as link:
            for table in self.fleet.tables:
                link.execute(delete(table))
        for name in ("n1", "n2"):
            self.fleet.node(name)
        self.kind = kind
        self.fleet.declare(
            run_type=kind, continuous=continuous, concurrency=concurrency, max_concurrency=CAP, max_run_time=HOUR / 4
        )

    # ---- beats and people

    @rule(second=st.booleans())
    def fire(self, second):
        before = {run["id"] for run in self.fleet.runs()}
        outcome = self.fleet.fire(by=self.fleet.second if second else None)
        self.within_concurrency(before)
        if outcome in (Outcome.FIRED, Outcome.BUSY, Outcome.NO_NODE):
            assert not self.slot_fired, "one fire per slot"
            self.slot_fired = True

    @rule()
    def trigger(self):
        before = self.fleet.window().last_slot_start
        runs = {run["id"] for run in self.fleet.runs()}
        outcome = self.fleet.trigger()
        self.within_concurrency(runs)
        assert self.fleet.window().last_slot_start == before
        if outcome is Outcome.FIRED:
            assert self.fleet.trigger() is Outcome.OCCUPIED

    def within_concurrency(self, before):
        """What was added has a number below the concurrency of this moment."""
        added = [run["consumer_id"] for run in self.fleet.runs() if run["id"] not in before]
        assert all(number < self.fleet.window().concurrency for number in added)

    @rule()
    def pause(self):
        self.fleet.first.pause("w")

    @rule()
    def resume(self):
        paused = not self.fleet.window().enabled
        self.fleet.first.resume("w")
        self.slot_fired |= paused

    @rule(number=st.integers(1, CAP + 1))
    def set_concurrency(self, number):
        if number > CAP:
            with pytest.raises(ConfigurationError):
                self.fleet.first.set_concurrency("w", number)
        else:
            self.fleet.first.set_concurrency("w", number)

    # ---- workers

    @rule(data=st.data())
    def start(self, data):
        waiting = self.fleet.runs()
        if waiting:
            self.begin(data.draw(st.sampled_from(waiting)))

    def begin(self, run):
        started = self.fleet.start(run, node=run["node"] or "n1")
        if started is not None:
            self.owners.append(started)
            self.starts.append((run["fire_seq"], run["node"], run["consumer_id"], run["attempt"]))
        return started

    @rule(data=st.data(), unfinished=st.booleans())
    def end(self, data, unfinished):
        """By a punctual owner, or by one who was taken for dead, or twice."""
        if self.owners:
            owner = data.draw(st.sampled_from(self.owners))
            state = "timeout" if unfinished else "done"
            before = {run["id"]: run["state"] for run in self.fleet.runs()}
            successors = self.fleet.end(owner, state, unfinished=unfinished)
            if before[owner.id] != "running":
                assert not successors, "only the end of a running run has a successor"
            if before[owner.id] in ("lost", "missed"):
                assert successors is None

    @rule(data=st.data())
    def renew(self, data):
        """By any owner, late ones too: a lease that is over stays so."""
        if self.owners:
            owner = data.draw(st.sampled_from(self.owners))
            before = {run["id"]: run for run in self.fleet.runs()}[owner.id]
            now = self.fleet.first.look().now
            with self.fleet.link() as link:
                ours = {"run_id": owner.id, "by_token": owner.token, "timeout": self.fleet.first.rules.node_timeout}
                renewed = link.execute(self.fleet.first.statements.renew, ours).rowcount
            if before["state"] != "running" or before["lease_until"] <= now:
                assert not renewed

    @rule()
    def maintain(self):
        self.fleet.maintain()

    @rule(share=st.sampled_from([0.003, 0.1, 0.3, 1, 2]))
    def pass_time(self, share):
        seconds = share * HOUR
        before = self.fleet.window().last_slot_start
        now = self.fleet.first.look().now
        self.fleet.pass_time(seconds)
        for name in ("n1", "n2"):
            self.fleet.node(name)
        # The grid stands still while the times move back: a slot is over when its start lies before this one.
        moved = before - round(seconds * 1000) if before else 0
        self.slot_fired = bool(before) and moved >= now - now % (HOUR * 1000)

    @rule()
    def wake_up_late(self):
        """An owner was frozen for longer than its lease and its place filled, before any maintenance."""
        self.resume()
        self.trigger()
        owners = [started for started in map(self.begin, self.fleet.runs("pending")) if started is not None]
        self.pass_time(0.3)
        self.trigger()
        for owner in owners:
            self.fleet.end(owner, "timeout", unfinished=True)

    # ---- what holds at any time

    @invariant()
    def no_number_has_two_live_runs(self):
        now = self.fleet.first.look().now if hasattr(self, "kind") else 0
        runs = self.fleet.runs() if now else []
        ids = {run["id"] for run in runs}
        assert self.known <= ids
        self.known = ids
        live = [
            (run["node"] if self.kind == "all" else "", run["consumer_id"])
            for run in runs
            if (run["state"] == "pending" and run["start_before"] > now)
            or (run["state"] == "running" and run["lease_until"] > now)
        ]
        assert len(live) == len(set(live))
        assert len(live) <= CAP * (2 if self.kind == "all" else 1)

    @invariant()
    def nothing_starts_twice(self):
        places = [
            (fire, consumer, attempt, node if self.kind == "all" else "")
            for fire, node, consumer, attempt in self.starts
        ]
        assert len(places) == len(set(places))

    @invariant()
    def fires_are_counted_up(self):
        if hasattr(self, "kind"):
            self.fired.append(self.fleet.window().fire_seq)
            assert self.fired == sorted(self.fired)


@pytest.mark.slow
def test_windows_keep_their_promises_in_any_order_of_events(fleet: Fleet) -> None:
    run_state_machine_as_test(
        lambda: Windows(fleet),
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
