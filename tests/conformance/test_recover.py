"""What brings rows back: recovery after a lost owner, due retries, and what an operator asks for."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import BigInteger, Column, text

from celery_claim import Status, signals
from celery_claim.claims.write_back import Outcome
from celery_claim.database import server_time
from celery_claim.exceptions import MappingError
from tests.conformance.tables import mail_model

RETRY = Outcome(Status.RETRYING, "later", delay=10)


# ---- recover


def test_rows_with_one_try_left_are_tried_one_at_a_time(queue):
    """One of them may kill its owner, and the others would be counted with it."""
    seen = {}

    def handle(row):
        seen[row.id] = [(mail.row(key).status, mail.row(key).reclaim_count) for key in (1, 2, 3, 4)]

    mail = queue(handle, rows=4, max_reclaims=2, batch_size=4, write_back="row")
    mail.change([1, 2, 4], reclaim_count=2)

    counts = mail.task.drain()

    pending, working, done = int(Status.PENDING), int(Status.PROCESSING), int(Status.SUCCEEDED)
    assert seen == {
        1: [(working, 2), (pending, 2), (working, 0), (pending, 2)],
        3: [(done, 2), (pending, 2), (working, 0), (pending, 2)],
        2: [(done, 2), (working, 2), (done, 0), (pending, 2)],
        4: [(done, 2), (done, 2), (done, 0), (working, 2)],
    }
    assert (counts.succeeded, counts.released) == (4, 3)


def test_with_no_second_try_at_all_rows_are_tried_together(queue):
    mail = queue(rows=3, max_reclaims=0)

    assert mail.task.drain().released == 0


def test_rows_of_a_silent_owner_come_back_when_their_lease_is_over(queue):
    mail = queue(rows=3)
    mail.claim(lease_seconds=60)

    mail.age(59)
    assert mail.task.recover() == []
    mail.age(3)
    assert mail.task.recover() == [1, 2, 3]

    row = mail.row(2)
    assert (row.status, row.reclaim_count, row.retry_count) == (0, 1, 0)
    assert (row.claim_token, row.claim_time, row.lease_seconds, row.worker_id) == (None, None, None, None)


def test_each_row_is_judged_by_the_lease_its_owner_was_promised(queue):
    mail = queue(rows=2, lease_seconds=5)
    mail.claim(limit=1, lease_seconds=1000)
    mail.claim(limit=1, lease_seconds=5)
    mail.age(10)

    assert mail.task.recover() == [2]


def test_an_operator_may_judge_by_another_lease(queue):
    mail = queue(rows=2)
    mail.claim(limit=1, lease_seconds=1000)
    mail.claim(limit=1, lease_seconds=10)
    mail.age(50)

    assert mail.task.recover(lease_seconds=100) == []
    assert mail.task.recover(lease_seconds=40) == [1, 2]


def test_a_row_without_a_lease_of_its_own_has_the_tasks(queue):
    mail = queue(rows=1, lease_seconds=100)
    mail.claim()
    mail.change(lease_seconds=None)
    mail.age(90)
    assert mail.task.recover() == []
    mail.age(12)
    assert mail.task.recover() == [1]


def test_a_row_whose_lease_never_ends_is_not_recovered_and_is_counted_as_stuck(queue):
    mail = queue(rows=1, lease_seconds=None)
    mail.claim(lease_seconds=None)
    mail.age(10**9)

    assert mail.task.recover() == []
    with mail.claims.linked() as link:
        assert link.execute(mail.statements.stuck, {"limit": 100}).scalar_one() == 1


def test_a_row_in_progress_without_a_time_gets_a_lease_and_is_recovered_at_its_end(queue):
    mail = queue(rows=1)
    mail.change(status=1, claim_time=None)

    assert mail.task.recover() == []
    mail.age(590)
    assert mail.task.recover() == []
    mail.age(12)
    assert mail.task.recover() == [1]


def test_recover_leaves_alone_what_is_not_in_progress(queue):
    mail = queue(rows=7)
    for status in Status:
        mail.change([int(status) + 1], status=int(status), claim_time=1, lease_seconds=1)

    assert mail.task.recover() == [2]
    assert mail.task.recover(lease_seconds=2) == []


def test_the_sixth_lost_owner_fails_the_row_with_the_reason(queue):
    mail = queue(rows=1, max_reclaims=5)
    for lost in range(1, 6):
        mail.claim(lease_seconds=60)
        mail.age(62)
        assert mail.task.recover() == [1]
        assert (mail.row().status, mail.row().reclaim_count, mail.row().error_message) == (0, lost, None)

    mail.claim(lease_seconds=60)
    mail.age(62)

    assert mail.task.recover() == [1]
    assert (mail.row().status, mail.row().reclaim_count) == (3, 6)
    assert mail.row().error_message.startswith("lost 6 owners")


def test_no_row_may_lose_an_owner_with_max_reclaims_zero(queue):
    mail = queue(rows=1, max_reclaims=0)
    mail.claim(lease_seconds=60)
    mail.age(62)
    mail.task.recover()

    assert mail.row().status == Status.FAILED


def test_a_row_may_lose_any_number_of_owners_without_max_reclaims(queue):
    mail = queue(rows=1, max_reclaims=None)
    mail.change(reclaim_count=1000)
    mail.claim(lease_seconds=60)
    mail.age(62)
    mail.task.recover()

    assert (mail.row().status, mail.row().reclaim_count) == (0, 1001)


def test_all_expired_rows_are_recovered_however_many_pages_they_fill(queue):
    mail = queue(rows=450)
    mail.claim(limit=450, lease_seconds=60)
    mail.age(62)

    assert mail.task.recover() == mail.keys() == mail.keys(Status.PENDING)


def test_two_recoverers_at_once_count_each_lost_owner_once(queue):
    mail = queue(rows=300)
    mail.claim(limit=300, lease_seconds=60)
    mail.age(62)
    recovered: list[int] = []
    threads = [threading.Thread(target=lambda: recovered.extend(mail.task.recover())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recovered.extend(mail.task.recover())

    assert {mail.row(key).reclaim_count for key in (1, 150, 300)} == {1}
    assert mail.keys(Status.PENDING) == mail.keys()
    assert set(recovered) == set(mail.keys())


def test_a_row_that_ended_between_the_look_and_the_change_keeps_its_end(queue):
    """Recover repeats the condition under which it chose a row: here the owner finishes in between."""
    mail = queue(rows=2)
    late = mail.claim(lease_seconds=60)
    mail.age(62)
    statements = mail.statements
    with mail.claims.linked() as link:
        reading = {"lease": 600, "limit": 10}
        assert link.execute(statements.expired(override=False), reading).scalars().all() == [1, 2]
        mail.write_back(late, keys=[1])
        link.execute(statements.renew, {"keys": [2], "token": late.token})
        update = statements.recover(override=False, bounded=True)
        link.execute(update, {"keys": [1, 2], "lease": 600, "max_reclaims": 5, "error": "lost"})

    assert mail.row(1).status == Status.SUCCEEDED
    assert (mail.row(2).status, mail.row(2).claim_token) == (1, late.token)


@pytest.mark.needs("row_locks")
def test_a_locked_row_does_not_keep_the_others_from_coming_back(queue):
    mail = queue(rows=4)
    mail.claim(lease_seconds=60)
    mail.age(62)
    with mail.engine.begin() as side:
        side.execute(text("SELECT id FROM mail WHERE id = 2 FOR UPDATE"))

        assert mail.task.recover() == [1, 3, 4]
    assert mail.task.recover() == [2]


def test_recovered_rows_are_told_by_a_signal(queue):
    told: list[object] = []

    def on_recovered(sender, keys, **_):
        told.append((sender.name, keys))

    mail = queue(rows=2)
    mail.claim(lease_seconds=60)
    mail.age(62)
    signals.rows_recovered.connect(on_recovered)
    try:
        mail.task.recover()
        mail.task.recover()
    finally:
        signals.rows_recovered.disconnect(on_recovered)

    assert told == [("work", [1, 2])]


# ---- promote


def test_a_retry_becomes_claimable_when_it_is_due_and_not_before(queue):
    mail = queue(rows=2)
    mail.write_back(mail.claim(), RETRY)

    mail.age(9)
    assert mail.task.promote() == []
    assert mail.claim().rows == {}
    mail.age(2)
    assert mail.task.promote() == [1, 2]

    row = mail.row()
    assert (row.status, row.retry_count, row.error_message) == (0, 1, "later")
    assert list(mail.claim().rows) == [1, 2]


def test_a_retry_that_was_put_aside_again_between_the_look_and_the_change_is_not_early(queue):
    mail = queue(rows=2)
    mail.write_back(mail.claim(), RETRY)
    mail.age(12, [1])
    with mail.claims.linked() as link:
        link.execute(mail.statements.promote, {"keys": [1, 2]})

    assert (mail.row(1).status, mail.row(2).status) == (Status.PENDING, Status.RETRYING)


def test_a_run_promotes_what_is_due_before_it_claims(queue):
    mail = queue(rows=1)
    mail.write_back(mail.claim(), RETRY)
    mail.age(12)

    assert mail.task.drain().succeeded == 1


def test_a_retry_without_a_time_is_due(queue):
    mail = queue(rows=1)
    mail.change(status=int(Status.RETRYING), next_retry_time=None)

    assert mail.task.promote() == [1]


def test_the_longest_due_retries_are_promoted_first_and_all_in_the_end(queue):
    mail = queue(rows=250)
    mail.change(status=int(Status.RETRYING), next_retry_time=2000)
    mail.change([249, 250], next_retry_time=1000)

    promoted = mail.task.promote()

    assert sorted(promoted) == mail.keys()
    assert {249, 250} <= set(promoted[:100])


# ---- what an operator asks for


def test_release_gives_a_row_back_whoever_owns_it_and_refuses_the_owners_result(queue):
    mail = queue(rows=3)
    owner = mail.claim(limit=2)

    assert mail.task.release([1, 2, 3, 99]) == [1, 2]
    assert (mail.row(1).status, mail.row(1).reclaim_count) == (0, 0)
    assert mail.write_back(owner).lost == [1, 2]


def test_cancel_takes_what_nobody_has_started(queue):
    mail = queue(rows=7)
    for status in Status:
        mail.change([int(status) + 1], status=int(status))

    assert mail.task.cancel(mail.keys()) == [1, 5, 6]
    assert mail.keys(Status.CANCELLED) == [1, 5, 6, 7]
    assert mail.claim().rows == {}


def test_retry_failed_makes_rows_claimable_with_fresh_counters(queue):
    mail = queue(rows=3)
    mail.change(status=3, retry_count=4, reclaim_count=6, next_retry_time=5, error_message="why")
    mail.change([3], status=2)

    assert mail.task.retry_failed([1, 3, 99]) == [1]
    row = mail.row()
    assert (row.status, row.retry_count, row.reclaim_count, row.next_retry_time) == (0, 0, 0, None)
    assert mail.task.retry_failed("all") == [2]


def test_retry_failed_finds_rows_by_their_error(queue):
    mail = queue(rows=4)
    mail.change(status=3)
    for key, error in enumerate(["SMTPError: 451 busy", "ValueError: 5", "SMTPError: 550 no", None], start=1):
        mail.change([key], error_message=error)

    assert mail.task.retry_failed(error_like="451") == [1]
    assert mail.task.retry_failed(error_like="SMTP%") == [3]
    assert mail.task.retry_failed([2, 4], error_like="Value") == [2]


def test_retry_failed_asks_which(queue):
    mail = queue(rows=1)
    with pytest.raises(ValueError, match="say which rows"):
        mail.task.retry_failed()
    with pytest.raises(TypeError, match="list of keys"):
        mail.task.retry_failed("1")


def test_all_failed_rows_are_retried_however_many_pages_they_fill(queue):
    mail = queue(rows=450)
    mail.change(status=3)

    assert mail.task.retry_failed("all") == mail.keys(Status.PENDING) == mail.keys()


def test_thousands_of_keys_can_be_released_at_once(queue):
    mail = queue(rows=450)
    mail.claim(limit=450)

    assert sorted(mail.task.release(list(range(450, 0, -1)))) == mail.keys()


# ---- status


def test_status_counts_rows_by_state(queue):
    mail = queue(rows=9)
    for status in Status:
        mail.change([int(status) + 1], status=int(status))

    assert mail.task.status() == {
        "pending": 3, "processing": 1, "succeeded": 1, "failed": 1, "queued": 1, "retrying": 1, "cancelled": 1,
        "oldest_pending_seconds": None,
    }  # fmt: skip


def test_the_age_of_the_oldest_pending_row_is_told_where_the_table_knows_it(queue):
    model = mail_model()
    model.__table__.append_column(Column("created_time", BigInteger))
    mail = queue(model=model.__table__, rows=3)
    with mail.claims.linked() as link:
        now = server_time(link)
    mail.change(created_time=now)
    mail.change([1], status=2, created_time=5)
    mail.age(100, [2])

    assert mail.task.status()["oldest_pending_seconds"] in range(100, 110)


# ---- age, the tests' own clock


def test_age_leaves_what_has_no_time_alone(queue):
    mail = queue(rows=2)
    mail.claim(limit=1)
    before = mail.row(1).claim_time

    mail.age(100)

    assert mail.row(1).claim_time == before - 100
    assert (mail.row(2).claim_time, mail.row(1).next_retry_time) == (None, None)


def test_a_table_must_have_the_columns_of_a_claim(queue):
    mail = queue(columns={"claim_time": "nowhere"})
    with pytest.raises(MappingError, match="no column 'nowhere' for claim_time"):
        mail.task.drain()
