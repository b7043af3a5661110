"""transactional=True: what the handler writes and the success of its row are in the table together, or neither is."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from celery_claim import Done, Fail, Retry, Skip, Status
from celery_claim.exceptions import DatabaseUnavailable

ADD = text("INSERT INTO effect (id, mail) VALUES (:id, :mail)")


def with_effects(queue, end=None, before=None, **options):
    """A queue whose handler adds a row to the table `effect` and then ends as it is told."""

    def handler(row, session):
        mail.handled.append(row.id)
        if before is not None:
            before(row, session)
        session.execute(ADD, {"id": 100 * len(mail.handled) + row.id, "mail": row.id})
        outcome = end(row) if callable(end) else end
        if isinstance(outcome, Exception) and not isinstance(outcome, Done):
            raise outcome
        return outcome

    mail = queue(handler, transactional=True, **options)
    with mail.engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS effect (id INTEGER PRIMARY KEY, mail INTEGER NOT NULL)"))
    return mail


def effects(mail):
    with mail.engine.connect() as connection:
        return sorted(connection.execute(text("SELECT mail FROM effect")).scalars())


def test_writes_and_success_are_committed_together(queue):
    mail = with_effects(queue, Done({"answer": "yes"}), rows=3)

    assert mail.task.drain().succeeded == 3
    assert effects(mail) == [1, 2, 3] == mail.keys(Status.SUCCEEDED)
    assert mail.row(2).answer == "yes"


@pytest.mark.parametrize(
    ("end", "status"),
    [(ValueError("no"), 3), (Fail("no"), 3), (Retry(countdown=9), 5), (Skip(), 0)],
    ids=["exception", "fail", "retry", "skip"],
)
def test_nothing_is_committed_of_a_row_that_does_not_succeed(queue, end, status):
    mail = with_effects(queue, end, rows=1)

    mail.task.drain()

    assert (effects(mail), mail.row().status) == ([], status)


def test_nothing_is_committed_when_the_run_is_interrupted(queue):
    mail = with_effects(queue, lambda row: interrupt(), rows=2)

    with pytest.raises(KeyboardInterrupt):
        mail.task.drain()

    assert (effects(mail), mail.keys(Status.PENDING)) == ([], [1, 2])


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.needs("row_locks")
def test_an_owner_that_lost_its_row_commits_nothing(queue):
    def take_over(row, session):
        if len(mail.handled) == 1:
            mail.age(1000)
            mail.task.recover()

    mail = with_effects(queue, before=take_over, rows=1)

    counts = mail.task.drain(limit=1)

    assert (counts.succeeded, counts.lost, effects(mail)) == (0, 1, [])
    assert mail.task.drain().succeeded == 1
    assert effects(mail) == [1]


@pytest.mark.needs("row_locks")
def test_of_two_owners_of_one_row_one_commits(queue):
    """The late owner and the new one end at the same time, on two connections."""
    for _ in range(5):
        both = threading.Barrier(2, timeout=20)

        def meet(row, session, both=both):
            both.wait()

        mail = with_effects(queue, before=meet, batch_size=1)
        with mail.engine.begin() as connection:
            connection.execute(text("DELETE FROM effect"))
            connection.execute(text("DELETE FROM mail"))
        mail.insert(1)
        late = threading.Thread(target=lambda mail=mail: mail.task.drain(limit=1))
        late.start()
        while not mail.handled:
            time.sleep(0.01)
        mail.age(1000)
        mail.task.recover()
        mail.task.drain(limit=1)
        late.join()

        assert len(mail.handled) == 2
        assert (effects(mail), mail.row().status) == ([1], Status.SUCCEEDED)


@pytest.mark.needs("network")
@pytest.mark.parametrize("reached_the_server", [True, False])
def test_a_commit_whose_answer_was_lost_happened_once_or_is_repeated(queue, database, proxied, reached_the_server):
    proxy = proxied(database)
    lose = proxy.swallow_reply if reached_the_server else proxy.lose_request

    def lose_the_next_commit(row, session):
        if len(mail.handled) == 2:
            lose(rb"^COMMIT")

    mail = with_effects(queue, before=lose_the_next_commit, rows=4, url=proxy.url)

    first = mail.task.drain()
    second = mail.task.drain()

    assert len(proxy.swallowed) + len(proxy.lost) == 1
    assert first.succeeded + second.succeeded == 4
    assert (first.lost, second.lost) == (0, 0)
    assert effects(mail) == [1, 2, 3, 4] == mail.keys(Status.SUCCEEDED)
    assert len(mail.handled) == (4 if reached_the_server else 5)


@pytest.mark.needs("mysql")
def test_a_connection_lost_while_a_transaction_begins_is_an_outage_and_nothing_else(queue, database, proxied):
    proxy = proxied(database)
    mail = with_effects(queue, rows=2, url=proxy.url)
    # PostgreSQL's driver sends the level with the handler's first statement instead.
    proxy.lose_request(rb"ISOLATION LEVEL READ COMMITTED", times=None)
    with pytest.raises(DatabaseUnavailable):
        mail.task.drain()
    proxy.heal()

    assert mail.keys(Status.FAILED) == []
    mail.task.release([1, 2])
    mail.task.drain()
    assert effects(mail) == [1, 2] == mail.keys(Status.SUCCEEDED)


@pytest.mark.needs("network")
def test_a_connection_lost_inside_the_handler_commits_nothing_and_fails_nothing(queue, database, proxied):
    proxy = proxied(database)

    def cut(row, session):
        if len(mail.handled) == 2:
            session.execute(ADD, {"id": 1, "mail": 99})
            proxy.cut()

    mail = with_effects(queue, before=cut, rows=3, url=proxy.url)

    try:
        counts = mail.task.drain()
    except DatabaseUnavailable:
        counts = None
    mail.task.drain()

    assert counts is None or counts.failed == 0
    assert effects(mail) == [1, 2, 3] == mail.keys(Status.SUCCEEDED)


def test_what_the_handler_commits_itself_is_still_undone_with_its_row(queue):
    def commit(row, session):
        session.execute(ADD, {"id": 7, "mail": 7})
        session.commit()

    mail = with_effects(queue, Fail("no"), before=commit, rows=1)
    mail.task.drain()

    assert effects(mail) == []


def test_a_handler_that_rolls_back_its_session_did_not_succeed(queue):
    def handler(row, session):
        session.execute(ADD, {"id": 1, "mail": 1})
        session.rollback()

    mail = queue(handler, transactional=True, rows=1)
    with mail.engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS effect (id INTEGER PRIMARY KEY, mail INTEGER NOT NULL)"))

    assert mail.task.drain().failed == 1
    assert "rolled its session back" in mail.row().error_message
    assert effects(mail) == []


def test_what_the_table_refuses_at_flush_is_the_handlers_own_error(queue):
    def handler(row, session):
        session.add(mail.model(id=row.id, address="a second one of this key"))

    mail = queue(handler, transactional=True, rows=1)

    assert mail.task.drain().failed == 1
    assert "IntegrityError" in mail.row().error_message or "UNIQUE" in mail.row().error_message


def test_an_error_that_the_handler_hides_keeps_no_row_behind_it_waiting(queue):
    """PostgreSQL refuses whatever follows an error in its transaction, the write back too; others go on."""

    def handler(row, session):
        if row.id == 1:
            with contextlib.suppress(DBAPIError):
                session.execute(text("SELECT nothing FROM nowhere"))

    mail = queue(handler, transactional=True, rows=2)
    counts = mail.task.drain()

    assert counts.succeeded + counts.failed == 2
    assert mail.row(2).status == Status.SUCCEEDED


@pytest.mark.needs("row_locks")
@pytest.mark.slow
def test_a_long_transaction_that_holds_its_own_row_keeps_its_lease(queue):
    def hold(row, session):
        session.execute(text(f"UPDATE mail SET address = 'mine' WHERE id = {row.id}"))
        end = time.monotonic() + 5
        while time.monotonic() < end:
            assert mail.task.recover() == []
            time.sleep(0.2)

    mail = with_effects(queue, before=hold, rows=1, lease_seconds=2)
    counts = mail.task.drain()

    assert (counts.succeeded, counts.lost) == (1, 0)
    assert mail.row().address == "mine"
    assert effects(mail) == [1]


@pytest.mark.needs("row_locks")
def test_two_transactional_consumers_share_the_table(queue):
    mail = with_effects(queue, rows=40, batch_size=3)
    threads = [threading.Thread(target=mail.task.drain) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mail.task.drain()

    assert effects(mail) == mail.keys() == mail.keys(Status.SUCCEEDED)
