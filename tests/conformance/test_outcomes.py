"""What a handler may return or raise, and what becomes of its row."""

from __future__ import annotations

import time

import celery.exceptions
import kombu.exceptions
import pytest
from sqlalchemy import String, TypeDecorator, select
from sqlalchemy.exc import OperationalError

from celery_claim import ClaimTask, Done, Fail, Retry, Skip, Status, signals
from celery_claim.database import server_time
from tests.conformance.tables import mail_model


class Busy(Exception):
    pass


def raising(*errors):
    """A handler that raises (or returns) these, one after the other, by key."""

    def handler(row):
        end = errors[(row.id - 1) % len(errors)]
        if isinstance(end, BaseException) and not isinstance(end, Done):
            raise end
        return end

    return handler


def test_a_row_succeeds_whatever_its_handler_returns(queue):
    mail = queue(raising(None, 0, False, "text", {"status": 3}, Done(), Exception), rows=6)

    counts = mail.task.drain()

    assert (counts.claimed, counts.succeeded) == (6, 6)
    assert mail.keys(Status.SUCCEEDED) == mail.keys()


def test_a_row_fails_at_its_first_exception(queue):
    mail = queue(raising(ValueError("no such address")), rows=1)

    assert mail.task.drain().failed == 1
    row = mail.row()
    assert (row.status, row.retry_count, row.error_message) == (3, 0, "ValueError: no such address")


@pytest.mark.parametrize("raised", [True, False])
def test_fail_fails_without_a_retry(queue, raised):
    def handler(row):
        if raised:
            raise Fail("unknown address")
        return Fail("unknown address")

    mail = queue(handler, rows=1, max_retries=5)

    assert mail.task.drain().failed == 1
    assert mail.row().error_message == "unknown address"


def test_an_exception_is_retried_with_growing_pauses_and_fails_in_the_end(queue):
    mail = queue(raising(Busy("busy")), rows=1, max_retries=3, retry_backoff=10, retry_jitter=False)
    for pause, retries in ((10, 1), (20, 2), (40, 3)):
        with mail.claims.linked() as link:
            before = server_time(link)
            assert mail.task.drain().retried == 1
            after = server_time(link)
        row = mail.row()
        assert (row.status, row.retry_count, row.error_message) == (5, retries, "Busy: busy")
        # Never early, and at most two seconds late.
        assert before + pause <= row.next_retry_time <= after + pause + 1
        mail.age(pause + 2)

    assert mail.task.drain().failed == 1
    assert (mail.row().status, mail.row().retry_count) == (3, 3)


def test_the_pause_of_a_retry_has_a_bound_and_jitter(queue):
    mail = queue(raising(Busy()), rows=40, max_retries=None, retry_backoff=100, retry_backoff_max=120)
    with mail.claims.linked() as link:
        before = server_time(link)
    mail.task.drain()

    pauses = [mail.row(key).next_retry_time - before for key in range(1, 41)]
    assert all(50 <= pause <= 125 for pause in pauses)
    assert len(set(pauses)) > 5


def test_some_exceptions_are_not_retried(queue):
    mail = queue(raising(Busy(), KeyError("x")), rows=2, max_retries=3, no_retry_for=(LookupError,))

    counts = mail.task.drain()

    assert (counts.retried, counts.failed) == (1, 1)
    assert mail.row(2).error_message == "KeyError: 'x'"


def test_an_explicit_retry_is_obeyed_without_max_retries(queue):
    mail = queue(raising(Retry(countdown=0, reason="again")), rows=1)
    for retries in (1, 2, 3):
        assert mail.task.drain(limit=1).retried == 1
        assert (mail.row().status, mail.row().retry_count, mail.row().error_message) == (5, retries, "again")


def test_an_explicit_retry_counts_like_an_exception_with_max_retries(queue):
    mail = queue(raising(Retry(countdown=0, reason="again")), rows=1, max_retries=1)
    mail.task.drain(limit=1)

    assert mail.task.drain(limit=1).failed == 1
    assert mail.row().error_message == "no more retries (max_retries=1): again"


def test_a_countdown_is_never_early_and_hardly_late(queue, eventually):
    mail = queue(rows=1)
    started: list[float] = []

    def handler(row):
        started.append(time.monotonic())
        if len(started) == 1:
            raise Retry(countdown=1)

    mail = queue(handler, model=mail.model)
    mail.task.drain()

    eventually(lambda: mail.task.drain().succeeded, timeout=10)

    assert 1 <= started[1] - started[0] < 4


def test_self_retry_runs_the_row_again_and_not_the_window(queue):
    class Work(ClaimTask):
        abstract = True

        def process(self, row):
            try:
                raise Busy("451")
            except Busy as error:
                raise self.retry(exc=error, countdown=30) from error

    mail = queue(base=Work, rows=1)

    assert mail.task.drain().retried == 1
    assert (mail.row().status, mail.row().error_message) == (5, "Busy: 451")


def test_celerys_own_exceptions_mean_what_they_mean(queue):
    mail = queue(
        raising(
            celery.exceptions.Retry(exc=Busy("later"), when=60),
            celery.exceptions.Ignore(),
            celery.exceptions.Reject("poison", requeue=False),
            celery.exceptions.Reject("later", requeue=True),
        ),
        rows=4,
    )

    counts = mail.task.drain()

    assert (counts.retried, counts.released, counts.failed) == (1, 2, 1)
    assert [mail.row(key).status for key in (1, 2, 3, 4)] == [5, 0, 3, 0]
    assert mail.row(1).error_message == "Busy: later"
    assert "poison" in mail.row(3).error_message


def test_a_skipped_row_goes_back_when_the_run_ends_and_is_not_claimed_twice_by_it(queue):
    def handler(row):
        mail.handled.append(row.id)
        if row.id == 2:
            raise Skip

    mail = queue(handler, rows=5, batch_size=1)

    counts = mail.task.drain()

    assert (counts.succeeded, counts.released) == (4, 1)
    assert mail.handled == [1, 2, 3, 4, 5]
    row = mail.row(2)
    assert (row.status, row.retry_count, row.reclaim_count, row.claim_token) == (0, 0, 0, None)


# ---- what is no verdict on the row


@pytest.mark.parametrize("interruption", [SystemExit, KeyboardInterrupt, celery.exceptions.SoftTimeLimitExceeded])
@pytest.mark.parametrize("write_back", ["row", "batch"])
def test_an_interruption_writes_what_is_finished_and_gives_back_the_rest(queue, interruption, write_back):
    def handler(row):
        if row.id == 3:
            raise interruption

    mail = queue(handler, rows=6, write_back=write_back, max_retries=3)
    with pytest.raises(interruption):
        mail.task.drain()

    assert mail.keys(Status.SUCCEEDED) == [1, 2]
    assert mail.keys(Status.PENDING) == [3, 4, 5, 6]
    assert (mail.row(3).retry_count, mail.row(3).reclaim_count) == (0, 0)


def database_error(*arguments):
    MySQLdb = pytest.importorskip("MySQLdb")
    return OperationalError("SELECT 1", {}, MySQLdb.OperationalError(*arguments))


@pytest.mark.parametrize(
    "fault",
    [
        lambda: database_error(1213, "Deadlock found"),
        lambda: database_error(1205, "Lock wait timeout exceeded"),
        lambda: database_error(2006, "Server has gone away"),
        lambda: database_error(2013, "Lost connection"),
        lambda: database_error(1290, "read-only"),
        lambda: database_error(1020, "Record has changed"),
        lambda: kombu.exceptions.OperationalError("broker down"),
    ],
    ids=["1213", "1205", "2006", "2013", "1290", "1020", "broker"],
)
def test_a_fault_of_the_database_or_broker_is_no_failure_of_the_row(queue, fault):
    mail = queue(raising(fault()), rows=1, max_retries=3)

    counts = mail.task.drain()

    assert (counts.failed, counts.retried, counts.released) == (0, 0, 1)
    assert (mail.row().status, mail.row().retry_count, mail.row().error_message) == (0, 0, None)


# ---- batches of rows


class Batch(ClaimTask):
    """Hands each batch to `ends`, a function of its rows that a test sets."""

    abstract = True

    def process_batch(self, rows):
        return self.ends(rows)


def batch(queue, ends, **options):
    Work = type("Work", (Batch,), {"abstract": True, "ends": lambda self, rows: ends(rows)})
    return queue(base=Work, **options)


def test_a_batch_that_returns_nothing_succeeded(queue):
    seen: list[list[int]] = []
    mail = batch(queue, lambda rows: seen.append([row.id for row in rows]), rows=5, batch_size=3)

    assert mail.task.drain().succeeded == 5
    assert seen == [[1, 2, 3], [4, 5]]


def test_each_row_of_a_batch_has_an_end_of_its_own(queue):
    ends = {
        1: None,
        2: Done({"answer": "B"}),
        3: Retry(countdown=50),
        4: Fail("why"),
        5: Skip(),
        6: Busy("no"),
        7: Done({"answer": "G"}),
    }
    mail = batch(queue, lambda rows: ends, rows=7 + 1)
    mail.change([8], status=2)

    counts = mail.task.drain()

    assert (counts.succeeded, counts.failed, counts.retried, counts.released) == (3, 2, 1, 1)
    assert [mail.row(key).status for key in ends] == [2, 2, 5, 3, 0, 3, 2]
    assert (mail.row(2).answer, mail.row(7).answer, mail.row(1).answer) == ("B", "G", None)
    assert (mail.row(4).error_message, mail.row(6).error_message) == ("why", "Busy: no")


def test_a_row_that_a_batch_does_not_name_succeeded(queue):
    mail = batch(queue, lambda rows: {2: Fail("why")}, rows=3)

    assert mail.task.drain().succeeded == 2


def test_what_a_batch_raises_each_of_its_rows_has_raised(queue):
    def ends(rows):
        raise Busy("all of them")

    mail = batch(queue, ends, rows=3, max_retries=1)

    assert mail.task.drain().retried == 3
    assert {mail.row(key).error_message for key in (1, 2, 3)} == {"Busy: all of them"}


@pytest.mark.parametrize("returned", [{99: None}, [1, 2], 7, "text", {1: "text", 2: 5, 3: []}])
def test_an_answer_of_a_batch_that_means_nothing_is_an_error_of_its_rows(queue, returned):
    mail = batch(queue, lambda rows: returned, rows=3)

    assert mail.task.drain().failed == 3
    assert "process_batch returned" in mail.row().error_message


# ---- the breaker


def test_the_breaker_ends_a_run_in_which_everything_fails(queue):
    mail = queue(raising(Busy()), rows=100, failure_breaker=(10, 0.8), batch_size=100)

    counts = mail.task(claim={})

    assert counts["failed"] == 10
    assert len(mail.keys(Status.PENDING)) == 90


def test_the_breaker_ignores_rows_that_fail_on_purpose(queue):
    mail = queue(raising(Fail("unknown address")), rows=40, failure_breaker=(10, 0.8))

    assert mail.task(claim={})["failed"] == 40


def test_the_breaker_needs_its_share_of_failures(queue):
    mail = queue(raising(Busy(), None), rows=40, failure_breaker=(10, 0.8))

    assert mail.task(claim={})["claimed"] == 40


def test_the_breaker_is_off_in_a_drain_called_directly(queue):
    mail = queue(raising(Busy()), rows=40, failure_breaker=(10, 0.8))

    assert mail.task.drain().failed == 40


# ---- rows that cannot be read


class Exact(TypeDecorator):
    """A column type whose decoder refuses some of what is stored."""

    impl = String(100)
    cache_ok = True

    def process_result_value(self, value, dialect):
        if value == "{":
            raise ValueError("half a document")
        return value


def test_a_row_whose_values_cannot_be_decoded_fails_alone(queue):
    model = mail_model()
    model.__table__.c.address.type = Exact()
    mail = queue(model=model, rows=5)
    mail.change([2, 4], address="{")

    counts = mail.task.drain()

    assert (counts.succeeded, counts.failed) == (3, 2)
    assert mail.handled == [1, 3, 5]
    with mail.engine.connect() as connection:
        error = select(mail.table.c.error_message).where(mail.table.c.id == 2)
        assert connection.execute(error).scalar_one() == "ValueError: half a document"


# ---- signals


def test_signals_carry_what_happened_to_each_row(queue):
    told: list[tuple[str, dict[str, object]]] = []
    names = ("row_claimed", "row_succeeded", "row_failed", "row_retried", "claim_lost", "run_finished")

    def listener(name):
        def receive(sender, signal, **payload):
            told.append((name, {"sender": sender.name, **payload}))

        return receive

    ends = raising(None, Fail("why"), Retry(countdown=9, reason="later"), Busy("b"))
    mail = queue(ends, rows=4)
    listeners = {name: listener(name) for name in names}
    for name, receive in listeners.items():
        getattr(signals, name).connect(receive)
    try:
        counts = mail.task.drain()
    finally:
        for name, receive in listeners.items():
            getattr(signals, name).disconnect(receive)

    by_name = {name: [payload for told_name, payload in told if told_name == name] for name in names}
    (claimed,) = by_name["row_claimed"]
    assert claimed["keys"] == [1, 2, 3, 4]
    assert [row.id for row in claimed["rows"]] == [1, 2, 3, 4]
    assert by_name["row_succeeded"] == [{"sender": "work", "key": 1}]
    fail, busy = by_name["row_failed"]
    assert (fail["key"], fail["reason"]) == (2, "why")
    assert (busy["key"], busy["reason"], type(busy["exception"])) == (4, "Busy: b", Busy)
    (retried,) = by_name["row_retried"]
    assert (retried["key"], retried["countdown"], retried["reason"]) == (3, 9, "later")
    assert by_name["run_finished"] == [{"sender": "work", "counts": counts}]
    assert by_name["claim_lost"] == []


def test_a_receiver_that_raises_changes_nothing_for_the_row(queue):
    def broken(**_):
        raise RuntimeError

    mail = queue(rows=2)
    signals.row_succeeded.connect(broken)
    try:
        counts = mail.task.drain()
    finally:
        signals.row_succeeded.disconnect(broken)

    assert counts.succeeded == 2
