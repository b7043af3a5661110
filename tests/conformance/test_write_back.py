"""Write backs: only the owner's result gets into the table, and it gets there whatever happens to the connection."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import text

from celery_claim import Done, Fail, Retry, Status, signals
from celery_claim.claims.write_back import Outcome, release
from celery_claim.exceptions import DatabaseUnavailable
from tests.conformance.tables import mail_model

EMOJI = "sent \U0001f4a5"


def retrying(seconds: float, why: str | None = None) -> Outcome:
    return Outcome(Status.RETRYING, why, delay=seconds)


OUTCOMES = [Outcome(Status.SUCCEEDED), Outcome(Status.FAILED, "why"), retrying(5, "later")]


# ---- who may write


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.status.name.lower())
def test_a_late_worker_cannot_overwrite_the_new_owner(queue, outcome):
    mail = queue(rows=1)
    late = mail.claim(lease_seconds=60)
    mail.age(62)
    assert mail.task.recover() == [1]
    new = mail.claim()

    assert mail.write_back(late, outcome).lost == [1]
    assert mail.row().claim_token == new.token
    assert list(mail.write_back(new, outcome).written) == [1]
    assert mail.row().status == outcome.status


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.status.name.lower())
def test_a_late_worker_cannot_overwrite_the_new_owners_result(queue, outcome):
    mail = queue(rows=1)
    late = mail.claim(lease_seconds=60)
    mail.age(62)
    mail.task.recover()
    mail.write_back(mail.claim())

    assert mail.write_back(late, outcome).lost == [1]
    assert mail.row().status == Status.SUCCEEDED
    assert mail.row().error_message is None


def test_a_late_worker_cannot_write_to_a_row_that_waits_for_its_next_owner(queue):
    mail = queue(rows=1)
    late = mail.claim(lease_seconds=60)
    mail.age(62)
    mail.task.recover()

    assert mail.write_back(late).lost == [1]
    assert mail.row().status == Status.PENDING


def test_a_result_that_comes_too_late_is_reported_and_its_effect_not_repeated(queue):
    lost: list[object] = []

    def handler(row):
        mail.handled.append(row.id)
        if len(mail.handled) == 1:
            mail.age(1000)
            mail.task.recover()

    def on_lost(sender, keys, **_):
        lost.append((sender.name, keys))

    mail = queue(handler, rows=1)
    signals.claim_lost.connect(on_lost)
    try:
        counts = mail.task.drain(limit=1)
    finally:
        signals.claim_lost.disconnect(on_lost)

    assert (counts.claimed, counts.succeeded, counts.failed, counts.lost) == (1, 0, 0, 1)
    assert lost == [("work", [1])]
    assert mail.handled == [1]
    assert mail.row().status == Status.PENDING


def test_a_row_deleted_by_its_handler_is_lost_and_nothing_else(queue):
    def handler(row):
        with mail.engine.begin() as connection:
            connection.execute(text(f"DELETE FROM mail WHERE id = {row.id}"))

    mail = queue(handler, rows=3)

    counts = mail.task.drain()

    assert (counts.claimed, counts.lost, counts.failed) == (3, 3, 0)


# ---- what is counted


def test_a_hand_back_counts_nothing(queue):
    mail = queue(rows=3)
    claimed = mail.claim()

    with mail.claims.linked() as link:
        assert release(link, mail.statements, claimed.token, [1, 2, 3]) == []

    row = mail.row(2)
    assert (row.status, row.retry_count, row.reclaim_count) == (0, 0, 0)
    assert (row.claim_token, row.claim_time, row.worker_id, row.lease_seconds) == (None, None, None, None)


def test_a_hand_back_leaves_the_new_owners_rows_alone(queue):
    mail = queue(rows=2)
    late = mail.claim(lease_seconds=60)
    mail.age(62, [2])
    mail.task.recover()
    new = mail.claim()

    with mail.claims.linked() as link:
        assert release(link, mail.statements, late.token, [1, 2]) == [2]
    assert mail.row(2).claim_token == new.token


def test_a_retry_counts_one(queue):
    mail = queue(rows=1)

    mail.write_back(mail.claim(), retrying(0, "once more"))

    row = mail.row()
    assert (row.status, row.retry_count, row.reclaim_count, row.error_message) == (5, 1, 0, "once more")


def test_a_counter_at_its_end_never_makes_a_write_fail(queue):
    mail = queue(rows=1)
    mail.change(retry_count=32767, reclaim_count=32767)

    mail.write_back(mail.claim(lease_seconds=60), retrying(0))
    mail.age(1)
    mail.task.promote()
    mail.claim(lease_seconds=60)
    mail.age(62)
    mail.task.recover()

    assert (mail.row().retry_count, mail.row().reclaim_count) == (32767, 32767)


# ---- lost answers


@pytest.mark.needs("network")
@pytest.mark.parametrize("write_back", ["row", "batch"])
@pytest.mark.parametrize("reached_the_server", [True, False])
@pytest.mark.parametrize("outcome", [Done(), Done({"answer": "yes"}), Fail("no"), Retry(100)], ids=repr)
def test_a_result_whose_answer_was_lost_is_written_once_and_its_effect_done_once(
    queue, database, proxied, write_back, reached_the_server, outcome
):
    proxy = proxied(database)

    def handler(row):
        mail.handled.append(row.id)
        return outcome

    mail = queue(handler, rows=10, url=proxy.url, write_back=write_back)
    lose = proxy.swallow_reply if reached_the_server else proxy.lose_request
    lose(rb"^UPDATE mail.*SET status=[235]", times=2)

    counts = mail.task.drain()

    assert len(proxy.swallowed) + len(proxy.lost) == 2
    assert mail.handled == list(range(1, 11))
    assert (counts.succeeded + counts.failed + counts.retried, counts.lost) == (10, 0)
    assert {mail.row(key).retry_count for key in mail.handled} == {int(isinstance(outcome, Retry))}
    assert mail.keys(Status.PROCESSING) == mail.keys(Status.PENDING) == []


@pytest.mark.needs("network")
def test_a_hand_back_whose_answer_was_lost_loses_no_row(queue, database, proxied):
    proxy = proxied(database)

    def handler(row):
        raise KeyboardInterrupt

    mail = queue(handler, rows=5, url=proxy.url)
    proxy.swallow_reply(rb"^UPDATE mail.*SET status=0")
    with pytest.raises(KeyboardInterrupt):
        mail.task.drain()

    assert mail.keys(Status.PENDING) == [1, 2, 3, 4, 5]


@pytest.mark.needs("network")
@pytest.mark.parametrize("write_back", ["row", "batch"])
def test_a_result_is_written_after_the_database_was_away(queue, database, proxied, write_back):
    proxy = proxied(database)
    back = threading.Timer(1.0, proxy.up)

    def handler(row):
        mail.handled.append(row.id)
        if row.id == 2:
            proxy.down()
            back.start()

    mail = queue(handler, rows=4, url=proxy.url, write_back=write_back)

    counts = mail.task.drain()

    back.join()
    assert (counts.succeeded, counts.lost) == (4, 0)
    assert mail.handled == [1, 2, 3, 4]


@pytest.mark.needs("network")
def test_results_are_given_up_when_the_lease_ends_and_the_row_is_done_again(queue, database, proxied):
    proxy = proxied(database)

    def handler(row):
        mail.handled.append(row.id)
        if len(mail.handled) == 1:
            proxy.down()

    mail = queue(handler, rows=1, url=proxy.url, lease_seconds=2)
    with pytest.raises(DatabaseUnavailable):
        mail.task.drain()
    proxy.up()
    assert mail.row().status == Status.PROCESSING
    mail.age(3)
    mail.task.recover()

    assert mail.task.drain().succeeded == 1
    assert mail.handled == [1, 1]


# ---- the row's own values


@pytest.mark.parametrize("write_back", ["row", "batch"])
def test_done_writes_the_rows_own_values_with_its_status(queue, write_back):
    mail = queue(lambda row: Done({"answer": f"to {row.id}"}), rows=250, batch_size=250, write_back=write_back)

    mail.task.drain()

    assert [mail.row(key).answer for key in (1, 100, 101, 250)] == ["to 1", "to 100", "to 101", "to 250"]
    assert mail.keys(Status.SUCCEEDED) == mail.keys()


@pytest.mark.parametrize("write_back", ["row", "batch"])
def test_values_of_different_columns_are_written_to_the_rows_they_belong_to(queue, write_back):
    def handler(row):
        return [Done(), Done({"answer": "A"}), Done({"address": "B"}), Done({"answer": None, "address": "C"})][
            row.id % 4
        ]

    mail = queue(handler, write_back=write_back)
    mail.insert(range(8), answer="old", address="old")

    mail.task.drain()

    expected = [("old", "old"), ("A", "old"), ("old", "B"), (None, "C")] * 2
    assert [(mail.row(key).answer, mail.row(key).address) for key in range(8)] == expected


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"nowhere": 1}, "no such column"),
        ({"status": 0}, "claim itself writes"),
        ({"claim_token": "mine"}, "claim itself writes"),
        ({"id": 7}, "claim itself writes"),
    ],
)
def test_done_cannot_write_what_is_not_the_rows_own(queue, values, why):
    mail = queue(lambda row: Done(values), rows=1)

    assert mail.task.drain().failed == 1
    assert why in mail.row().error_message


@pytest.mark.parametrize("write_back", ["row", "batch"])
def test_a_value_the_table_refuses_fails_its_row_alone_and_runs_none_again(queue, database, write_back):
    too_long = "x" * 101 if database.name != "sqlite" else object()

    def handler(row):
        mail.handled.append(row.id)
        return Done({"answer": too_long if row.id == 2 else "fits"})

    mail = queue(handler, rows=3, write_back=write_back)

    counts = mail.task.drain()

    assert (counts.succeeded, counts.failed, counts.lost) == (2, 1, 0)
    assert mail.handled == [1, 2, 3]
    assert "refuses its values" in mail.row(2).error_message
    assert (mail.row(1).answer, mail.row(3).answer) == ("fits", "fits")


# ---- text that a column cannot hold


def narrow(mail):
    """The table as many old ones are: utf8mb3, which has no room for an emoji."""
    with mail.engine.begin() as connection:
        connection.execute(text("ALTER TABLE mail CONVERT TO CHARACTER SET utf8"))
        token = "claim_token CHAR(32) CHARACTER SET ascii COLLATE ascii_bin NULL"
        connection.execute(text(f"ALTER TABLE mail MODIFY {token}"))


@pytest.mark.needs("mysql")
@pytest.mark.parametrize("write_back", ["row", "batch"])
def test_an_emoji_the_column_cannot_hold_is_escaped_and_the_effect_done_once(queue, write_back):
    def handler(row):
        mail.handled.append(row.id)
        if row.id % 2:
            raise ValueError(EMOJI)
        return Done({"answer": EMOJI})

    mail = queue(handler, rows=4, write_back=write_back)
    narrow(mail)

    counts = mail.task.drain()

    assert (counts.succeeded, counts.failed, counts.lost) == (2, 2, 0)
    assert mail.handled == [1, 2, 3, 4]
    assert mail.row(1).error_message == "ValueError: sent \\U0001f4a5"
    assert mail.row(2).answer == "sent \\U0001f4a5"


def test_an_emoji_the_column_can_hold_is_kept(queue):
    def handler(row):
        raise ValueError(EMOJI)

    mail = queue(handler, rows=1)
    mail.task.drain()

    assert mail.row().error_message == f"ValueError: {EMOJI}"


def test_no_text_of_an_error_keeps_its_status_from_being_written(queue):
    texts = ["nul \0 byte", "x" * 5000, "lone \ud800 surrogate", "per%cent :colon 'quote' \\ back", "", "é" * 600]

    def handler(row):
        mail.handled.append(row.id)
        raise ValueError(texts[row.id - 1])

    mail = queue(handler, rows=len(texts))

    assert mail.task.drain().failed == len(texts)
    assert mail.handled == mail.keys(Status.FAILED)
    assert mail.row(1).error_message == "ValueError: nul \\x00 byte"
    assert len(mail.row(2).error_message) == 500
    assert mail.row(3).error_message == "ValueError: lone \\ud800 surrogate"
    assert mail.row(4).error_message == "ValueError: per%cent :colon 'quote' \\ back"


def test_an_exception_whose_text_cannot_be_made_still_fails_its_row(queue):
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError

    def handler(row):
        raise Broken

    mail = queue(handler, rows=1)

    assert mail.task.drain().failed == 1
    assert mail.row().error_message.startswith("Broken")


def test_a_success_clears_the_error_of_the_try_before(queue):
    mail = queue(rows=1)
    mail.change(error_message="once it failed")

    mail.task.drain()

    assert mail.row().error_message is None


def test_a_worker_id_is_cut_to_its_column(queue):
    mail = queue(rows=1)
    long = "n" * 500

    mail.claim(worker_id=long)

    assert mail.row().worker_id == "n" * 128


def test_an_object_that_a_handler_changed_is_not_saved(queue):
    def handler(row):
        row.address = "changed"

    mail = queue(handler, model=mail_model(), rows=1)
    mail.task.drain()

    assert mail.row().address is None
