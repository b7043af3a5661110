"""A model of who owns what, beside a real table: any order of claims, renewals, write backs, recoveries and verbs.

Owners keep their claims for ever and come back with them at any time, as frozen processes do. The model says which of
their writes may reach the table; after each step the table must hold exactly what the model holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select

from celery_claim import Status
from celery_claim.claims.renew import _renewed
from celery_claim.claims.write_back import Outcome, release

KEYS = st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True)
LEASE, AGE, MAX_RECLAIMS = 60, 100, 1
OUTCOMES = {
    Status.SUCCEEDED: Outcome(Status.SUCCEEDED),
    Status.FAILED: Outcome(Status.FAILED, "why"),
    Status.RETRYING: Outcome(Status.RETRYING, "later", delay=50),
}
WAITING = (Status.PENDING, Status.QUEUED, Status.RETRYING)


@dataclass
class Row:
    """What the model knows of one row."""

    status: Status = Status.PENDING
    #: Of the last owner; a write back keeps it, whatever else ends a claim removes it.
    token: str | None = None
    retries: int = 0
    reclaims: int = 0
    #: Of the lease, or of the wait for a retry: seconds since it began.
    age: int = 0

    def owned_by(self, token: str) -> bool:
        return self.status is Status.PROCESSING and self.token == token

    def give_back(self, status: Status = Status.PENDING) -> None:
        self.status, self.token = status, None


class Ownership(RuleBasedStateMachine):
    """The steps that processes and people may take, in any order."""

    def __init__(self, mail):
        super().__init__()
        self.mail = mail
        self.rows: dict[int, Row] = {}
        #: Every claim that was ever made: (token, its rows).
        self.owners: list[object] = []

    @initialize(number=st.integers(1, 12))
    def fill(self, number):
        with self.mail.engine.begin() as connection:
            connection.execute(self.mail.table.delete())
        self.mail.insert(number)
        self.rows = {key: Row() for key in range(1, number + 1)}

    def present(self, keys, *states):
        return [key for key in sorted(keys) if key in self.rows and self.rows[key].status in states]

    # ---- owners, punctual and late

    @rule(limit=st.integers(1, 8))
    def claim(self, limit):
        claimed = self.mail.claim(limit=limit, lease_seconds=LEASE)

        assert list(claimed.rows) == self.present(self.rows, Status.PENDING)[:limit]
        for key in claimed.rows:
            row = self.rows[key]
            row.status, row.token, row.age = Status.PROCESSING, claimed.token, 0
        if claimed.rows:
            self.owners.append(claimed)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), status=st.sampled_from(list(OUTCOMES)))
    def write_back(self, data, status):
        claimed, keys = self._some_rows_of_an_owner(data)
        result = self.mail.write_back(claimed, OUTCOMES[status], keys)

        owned = [key for key in keys if self.rows[key].owned_by(claimed.token)]
        # A write that is repeated after a lost answer finds its rows ended under its token: that is no loss.
        ended = [
            key
            for key in keys
            if self.rows[key].token == claimed.token and self.rows[key].status is not Status.PROCESSING
        ]
        assert sorted(result.written) == sorted(owned + ended)
        assert sorted(result.lost) == [key for key in keys if key not in owned and key not in ended]
        for key in owned:
            row = self.rows[key]
            row.status, row.age = status, 0
            row.retries += status is Status.RETRYING

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def renew(self, data):
        claimed, keys = self._some_rows_of_an_owner(data)
        with self.mail.claims.linked() as link:
            lost = _renewed(link, self.mail.statements, claimed.token, keys)

        owned = [key for key in keys if self.rows[key].owned_by(claimed.token)]
        assert not set(lost) & set(owned)
        assert {key for key in keys if self.rows[key].token != claimed.token} <= set(lost)
        for key in owned:
            self.rows[key].age = 0

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def hand_back(self, data):
        claimed, keys = self._some_rows_of_an_owner(data)
        with self.mail.claims.linked() as link:
            release(link, self.mail.statements, claimed.token, keys)

        for key in keys:
            if self.rows[key].owned_by(claimed.token):
                self.rows[key].give_back()

    def _some_rows_of_an_owner(self, data):
        claimed = data.draw(st.sampled_from(self.owners), label="owner")
        keys = data.draw(st.lists(st.sampled_from(sorted(claimed.rows)), min_size=1, unique=True), label="keys")
        return claimed, sorted(keys)

    # ---- time, and what it brings

    @rule(keys=KEYS)
    def time_passes(self, keys):
        self.mail.age(AGE, keys)
        for key in set(keys) & set(self.rows):
            self.rows[key].age += AGE

    @rule()
    def recover(self):
        recovered = self.mail.task.recover()

        expired = [key for key in self.present(self.rows, Status.PROCESSING) if self.rows[key].age > LEASE]
        assert recovered == expired
        for key in expired:
            row = self.rows[key]
            row.give_back(Status.FAILED if row.reclaims >= MAX_RECLAIMS else Status.PENDING)
            row.reclaims += 1

    @rule()
    def promote(self):
        promoted = self.mail.task.promote()

        due = [key for key in self.present(self.rows, Status.RETRYING) if self.rows[key].age > 0]
        assert sorted(promoted) == due
        for key in due:
            self.rows[key].status = Status.PENDING

    # ---- people

    @rule(keys=KEYS)
    def release(self, keys):
        released = self.mail.task.release(keys)

        assert sorted(released) == self.present(keys, Status.PROCESSING)
        for key in released:
            self.rows[key].give_back()

    @rule(keys=KEYS)
    def cancel(self, keys):
        cancelled = self.mail.task.cancel(keys)

        assert sorted(cancelled) == self.present(keys, *WAITING)
        for key in cancelled:
            self.rows[key].status = Status.CANCELLED

    @rule(keys=KEYS)
    def retry_failed(self, keys):
        retried = self.mail.task.retry_failed(keys)

        assert sorted(retried) == self.present(keys, Status.FAILED)
        for key in retried:
            row = self.rows[key]
            row.status, row.retries, row.reclaims = Status.PENDING, 0, 0

    # ---- what must be true after each step

    @invariant()
    def the_table_holds_what_the_model_holds(self):
        columns = self.mail.table.c
        statement = select(columns.id, columns.status, columns.claim_token, columns.retry_count, columns.reclaim_count)
        with self.mail.engine.connect() as connection:
            found = {row.id: tuple(row[1:]) for row in connection.execute(statement)}

        expected = {key: (int(row.status), row.token, row.retries, row.reclaims) for key, row in self.rows.items()}
        assert found == expected


@pytest.mark.slow
def test_no_order_of_steps_lets_a_row_have_two_owners_or_none(queue, database):
    mail = queue(max_reclaims=MAX_RECLAIMS, lease_seconds=LEASE)
    # The table has a connection of its own for the model's eyes; a new one for each look would cost most of the time.
    mail.engine = database.engine(poolclass=None)

    run_state_machine_as_test(
        lambda: Ownership(mail),
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            database=None,
            print_blob=True,
            # Without the search for what else fails: on a server it takes minutes.
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
