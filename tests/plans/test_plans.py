"""How each server runs the statements of a claim on a table with a past: by index, without sorting, by primary key."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import text

from celery_claim import Status
from celery_claim.claims.claim import claim

ROWS = 24_000
#: What a table looks like after a while: nearly everything is done, a little waits, a few rows are under way.
SHARES = ((Status.SUCCEEDED, 20_000), (Status.PENDING, 3000), (Status.RETRYING, 500), (Status.PROCESSING, 500))


@pytest.fixture
def mail(queue, database):
    mail = queue()
    first = 1
    for status, number in SHARES:
        due = {"next_retry_time": 5} if status is Status.RETRYING else {}
        claimed = {"claim_time": 5, "lease_seconds": 60, "claim_token": "t" * 32}
        mail.insert(range(first, first + number), status=int(status), **due, **(claimed if number == 500 else {}))
        first += number
    with mail.engine.connect() as connection:
        if database.can("mysql"):
            connection.execute(text("ANALYZE TABLE mail"))
        else:
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE mail"))
    return mail


def plans(mail):
    with mail.claims.linked() as link:
        return {
            name: mail.claims.database.dialect.plan(link.ask, statement)
            for name, statement in mail.claims.explainable().items()
        }


def test_no_statement_scans_the_table_or_walks_its_past(mail, database):
    found = plans(mail)

    claim = found.pop("claim" if database.can("returning") else "candidates")
    # An index that holds the pending rows in order: what stands behind the finished ones is found without them.
    assert (claim.index in ("ix_mail_pending", "ix_mail_claim"), claim.sorts) == (True, False)
    assert found.pop("due").index == "ix_mail_retry"
    assert [name for name, plan in found.items() if plan is not None and plan.index is None] == []


@pytest.mark.needs("mysql")
def test_rows_are_changed_by_primary_key_however_many(mail):
    """Left to itself MariaDB changes the index at 200 ids, and two routes to the same rows deadlock."""
    samples = mail.claims.explainable()
    walked = {}
    with mail.claims.linked() as link:
        for number in (1, 20, 199, 200, 201, 1000):
            keys = ", ".join(map(str, range(20_001, 20_001 + number)))
            for name in ("claim", "succeed", "renew", "release", "recover"):
                statement = samples[name].replace("IN (0)", f"IN ({keys})")
                assert str(number + 20_000) in statement
                walked[name, number] = mail.claims.database.dialect.plan(link.ask, statement).index

    assert {each: index for each, index in walked.items() if index != "PRIMARY"} == {}


@pytest.mark.needs("mysql")
def test_a_claim_reads_no_finished_row(mail):
    """What the server counts for a claim: the rows it stepped over, in any index or table."""
    with mail.claims.linked() as link:
        before = rows_read(link)
        with_offset = claim(link, mail.statements, limit=20, offset=40, lease_seconds=60, worker_id="me")
        read = rows_read(link) - before

    assert len(with_offset.rows) == 20
    assert read < 300


def rows_read(link):
    counters = link.ask("SHOW SESSION STATUS LIKE 'Handler_read%'")
    return sum(int(value) for _, value in counters)


@pytest.mark.needs("skip_locked", "returning")
def test_due_retries_are_found_without_reading_those_that_are_not(queue):
    mail = queue()
    with mail.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO mail (id, status, next_retry_time) "
                "SELECT n, 5, CASE WHEN n <= 10 THEN 5 ELSE 4000000000 END FROM generate_series(1, 100000) n"
            )
        )
    with mail.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE mail"))
    with mail.claims.linked() as link:
        lines = link.ask(f"EXPLAIN ANALYZE {mail.claims.explainable()['due']}")
    removed = [int(found[1]) for line in lines if (found := re.search(r"Removed by \w+: (\d+)", line[0]))]

    assert sum(removed) < 100


def test_check_finds_nothing_to_say_about_a_claimable_table(mail):
    assert [str(finding) for finding in mail.task.check()] == []
