"""What a caller, or a table, gets wrong is refused with a name, and touches no row."""

from __future__ import annotations

import math

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, text

from celery_claim import ClaimTask


@pytest.mark.parametrize("verb", ["cancel", "release", "retry_failed"])
@pytest.mark.parametrize("key", [1.9, True])
def test_a_fraction_is_no_key_of_another_row(queue, verb, key):
    mail = queue(rows=2)

    with pytest.raises(TypeError, match="never fractions"):
        getattr(mail.task, verb)([key])

    assert [mail.row(number).status for number in (1, 2)] == [0, 0]


@pytest.mark.parametrize("limits", [{"max_run_time": math.nan}, {"max_run_time": -1}, {"limit": "2"}, {"limit": -1}])
def test_a_drain_refuses_limits_that_are_none(queue, limits):
    mail = queue(rows=1)

    with pytest.raises(ValueError, match=next(iter(limits))):
        mail.task.drain(**limits)

    assert mail.row(1).status == 0


@pytest.mark.parametrize("lease_seconds", [-5, 1.5, "x"])
def test_recover_refuses_a_lease_that_would_take_live_rows(queue, lease_seconds):
    mail = queue(rows=1)
    mail.claim()

    with pytest.raises(ValueError, match="lease_seconds"):
        mail.task.recover(lease_seconds=lease_seconds)

    assert mail.row(1).status == 1


def test_check_names_an_optional_column_that_cannot_hold_what_is_written(queue, database):
    """A user's own worker_id, the number of an employee, would be overwritten or make every claim fail."""
    mail = queue(rows=0)
    columns = [Column("status", Integer), Column("claim_time", Integer), Column("claim_token", String(32))]
    table = Table("staff", MetaData(), Column("id", Integer, primary_key=True), *columns, Column("worker_id", Integer))
    with database.engine().begin() as connection:
        token = "CHAR(32) CHARACTER SET ascii COLLATE ascii_bin" if database.can("mysql") else "CHAR(32)"
        connection.execute(
            text(
                "CREATE TABLE staff (id INTEGER PRIMARY KEY, status INTEGER, claim_time BIGINT, "
                f"claim_token {token}, worker_id INTEGER)"
            )
        )

    def hire(row):
        """Never called."""

    task = mail.task.app.task(base=ClaimTask, model=table, name=f"staff_{database.name}", max_reclaims=None)(hire)

    findings = {finding.code: finding for finding in task.check()}
    assert "worker_id" in findings["wrong-type"].message
    assert "columns={'worker_id': None}" in findings["wrong-type"].remedy
