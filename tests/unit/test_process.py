"""How a handler's end is judged, without a database."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import celery.exceptions
import pytest

from celery_claim import Done, Fail, Retry, Skip, Status
from celery_claim.backoff import exponential, full_jitter
from celery_claim.claims.sql.load import Unreadable
from celery_claim.rows.consume import Pace
from celery_claim.rows.process import Judge, RetryPolicy, process, process_batch


def judge(retries=0, **policy):
    return Judge(RetryPolicy(**policy), lambda row: retries, lambda values: values)


def ended(end, **options):
    return judge(**options)(end, object())


# ---- backoff


def test_pauses_double_up_to_their_bound():
    pauses = [exponential(attempt, base=5, cap=60, jitter=False) for attempt in range(6)]

    assert pauses == [5, 10, 20, 40, 60, 60]
    assert exponential(10**6, base=5, cap=3600, jitter=False) == 3600


def test_jitter_spreads_a_pause_around_itself_and_never_over_the_bound():
    pauses = {exponential(2, base=10, cap=50) for _ in range(200)}

    assert len(pauses) > 100
    assert min(pauses) >= 20
    assert max(pauses) <= 50


def test_a_statement_is_repeated_within_its_bound():
    assert all(0.005 <= full_jitter(attempt) <= 0.2 for attempt in range(100))


# ---- the verdict


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (Done(), Status.SUCCEEDED),
        (Fail("why"), Status.FAILED),
        (Retry(countdown=3), Status.RETRYING),
        (ValueError("x"), Status.FAILED),
        (celery.exceptions.Reject("x", requeue=False), Status.FAILED),
        (celery.exceptions.Retry(when=4), Status.RETRYING),
    ],
)
def test_an_end_has_a_status(end, status):
    assert ended(end).outcome.status is status


@pytest.mark.parametrize("end", [Skip(), celery.exceptions.Ignore(), celery.exceptions.Reject("x", requeue=True)])
def test_some_ends_are_no_verdict(end):
    assert ended(end).outcome is None
    assert ended(end).unexpected is False


def test_only_what_was_not_meant_counts_for_the_breaker():
    assert ended(ValueError()).unexpected
    assert not ended(Fail("why")).unexpected
    assert not ended(Retry()).unexpected


@pytest.mark.parametrize(("retries", "status"), [(0, 5), (1, 5), (2, 3), (3, 3)])
def test_exceptions_are_retried_so_often(retries, status):
    assert ended(ValueError(), retries=retries, max_retries=2).outcome.status == status


def test_a_retry_takes_its_own_countdown_and_else_the_backoff():
    assert ended(Retry(countdown=7)).outcome.delay == 7
    assert ended(Retry(), retries=2, retry_backoff=10, retry_jitter=False).outcome.delay == 40


def test_a_retry_of_celery_may_name_a_moment():
    moment = datetime.now(timezone.utc) + timedelta(hours=1)

    assert 3590 < ended(celery.exceptions.Retry(when=moment)).outcome.delay <= 3600
    assert 3590 < ended(celery.exceptions.Retry(when=moment.replace(tzinfo=None))).outcome.delay <= 3600
    assert ended(celery.exceptions.Retry(when=moment - timedelta(days=1))).outcome.delay == 0


def test_a_pause_without_end_is_cut_to_what_can_be_stored():
    assert ended(celery.exceptions.Retry(when=1e30)).outcome.delay == 2**31 - 1


@pytest.mark.parametrize("countdown", [-1, float("inf"), float("nan"), 1e30])
def test_a_countdown_that_means_nothing_is_refused(countdown):
    with pytest.raises(ValueError, match="expected seconds from 0"):
        Retry(countdown=countdown)


def test_an_outcome_may_be_returned_or_raised():
    def raises(row):
        raise Fail("why")

    assert process(1, raises, judge()) == process(1, lambda row: Fail("why"), judge())
    assert process(1, lambda row: "anything", judge()).outcome.status is Status.SUCCEEDED


@pytest.mark.parametrize("interruption", [SystemExit, KeyboardInterrupt, celery.exceptions.SoftTimeLimitExceeded])
def test_what_interrupts_a_run_is_no_verdict_on_a_row(interruption):
    def raises(row):
        raise interruption

    with pytest.raises(interruption):
        process(1, raises, judge())
    with pytest.raises(interruption):
        process_batch({1: 1}, raises, judge())


def test_a_row_that_cannot_be_read_never_reaches_the_handler():
    called: list[object] = []
    unreadable = Unreadable(ValueError("half a document"), retries=0)

    verdict = process(unreadable, called.append, judge(max_retries=1))
    batch = process_batch({1: unreadable, 2: "row"}, lambda rows: called.append(rows), judge())

    assert verdict.outcome.status is Status.RETRYING
    assert (batch[1].outcome.status, batch[2].outcome.status) == (Status.FAILED, Status.SUCCEEDED)
    assert called == [["row"]]


def test_a_batch_may_end_all_its_rows_alike():
    verdicts = process_batch({1: "a", 2: "b"}, lambda rows: Fail("both"), judge())

    assert {verdict.outcome.error for verdict in verdicts.values()} == {"both"}


# ---- the size of a claim


def test_a_claim_grows_to_what_fits_into_the_time_left():
    pace = Pace()
    assert pace.fitting(20, float("inf")) == 20
    assert pace.fitting(20, 5.0) == 1

    pace.saw(10, 1.0)

    assert pace.fitting(20, 0.55) == 5
    assert pace.fitting(20, 100) == 20
    assert pace.fitting(20, 0.01) == 1


def test_the_pace_follows_what_it_sees():
    pace = Pace()
    for _ in range(30):
        pace.saw(1, 1.0)
    for _ in range(30):
        pace.saw(1, 0.1)

    assert 0.09 < pace.seconds < 0.11
