"""Claims: no two workers share a row, whatever is lost on the way."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import uuid
from collections import Counter

import pytest
from sqlalchemy import BINARY, BigInteger, LargeBinary, String, Uuid, text
from sqlalchemy.dialects.mysql import BIGINT

from celery_claim import Status
from celery_claim.exceptions import StatementRefused
from tests.conformance.tables import mail_model

ROWS = 400


def test_a_claim_takes_the_first_pending_rows_in_key_order(queue):
    mail = queue(rows=5)
    mail.change([1], status=int(Status.SUCCEEDED))

    claimed = mail.claim(limit=2, worker_id="node-c7", lease_seconds=77)

    assert list(claimed.rows) == [2, 3]
    row = mail.row(2)
    assert (row.status, row.claim_token, row.worker_id, row.lease_seconds) == (1, claimed.token, "node-c7", 77)
    assert mail.keys(Status.PROCESSING) == [2, 3]


def test_an_empty_table_is_no_error(queue):
    assert queue().claim().rows == {}


def test_a_claim_can_pass_over_the_first_candidates(queue, database):
    mail = queue(rows=10)

    claimed = mail.claim(limit=3, offset=4)

    # A database that claims in one statement has no use for the offset: nobody else can see these candidates.
    assert list(claimed.rows) == ([1, 2, 3] if database.can("returning") else [5, 6, 7])


@pytest.mark.parametrize("number", [1, 199, 200, 201])
def test_any_number_of_rows_can_be_claimed_at_once(queue, number):
    mail = queue(rows=250)

    claimed = mail.claim(limit=number)

    assert list(claimed.rows) == list(range(1, number + 1))
    assert mail.keys(Status.PROCESSING) == list(claimed.rows)


def test_two_claimers_never_share_a_row(queue):
    mail = queue(rows=ROWS)
    taken: list[int] = []

    def claim_all():
        while claimed := mail.claim(limit=7):
            if not claimed.candidates:
                return
            taken.extend(claimed.rows)
            assert mail.write_back(claimed).lost == []

    threads = [threading.Thread(target=claim_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert Counter(taken) == Counter(range(1, ROWS + 1))
    assert mail.keys(Status.SUCCEEDED) == list(range(1, ROWS + 1))


def test_a_row_taken_between_the_look_and_the_claim_is_not_taken_again(queue):
    mail = queue(rows=1)
    with mail.claims.linked() as link:
        keys = link.execute(mail.statements.candidates, {"limit": 1, "offset": 0}).scalars().all()
        owner = mail.claim()
        late = {"keys": keys, "token": "f" * 32, "lease": 60, "worker": "late"}
        link.execute(mail.statements.claim, late)

    assert (mail.row(1).status, mail.row(1).claim_token) == (Status.PROCESSING, owner.token)


def test_two_processes_never_share_a_row(queue, tmp_path):
    mail = queue(rows=ROWS, batch_size=7)

    def consume(number: int) -> None:
        with open(tmp_path / f"handled-{number}", "w") as handled:
            task = queue(lambda row: print(row.id, file=handled), model=mail.model, batch_size=7).task
            task.drain()

    children = [fork(lambda number=number: consume(number)) for number in range(3)]

    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    handled = [int(line) for file in tmp_path.glob("handled-*") for line in file.read_text().split()]
    assert Counter(handled) == Counter(range(1, ROWS + 1))


@pytest.mark.needs("row_locks")
def test_a_row_that_another_transaction_holds_is_waited_for_and_not_failed(queue):
    mail = queue(rows=3)
    with mail.engine.begin() as side:
        side.execute(text("SELECT id FROM mail WHERE id = 2 FOR UPDATE"))
        drained: list[object] = []
        consumer = threading.Thread(target=lambda: drained.append(mail.task.drain()))
        consumer.start()
        consumer.join(0.5)
    consumer.join()
    mail.task.drain()

    assert mail.keys(Status.SUCCEEDED) == [1, 2, 3]
    assert sorted(mail.handled) == [1, 2, 3]


@pytest.mark.needs("skip_locked")
def test_with_skip_locked_a_row_that_another_transaction_holds_is_passed_over(queue):
    mail = queue(rows=3, skip_locked=True)
    with mail.engine.begin() as side:
        side.execute(text("SELECT id FROM mail WHERE id = 2 FOR UPDATE"))

        assert mail.task.drain().succeeded == 2

    assert mail.task.drain().succeeded == 1
    assert mail.handled == [1, 3, 2]


# ---- keys


KINDS = ["bigint", "char36", "uuid", "binary16", "string"]


def keys_of(kind: str) -> tuple[object, list[object]]:
    return {
        "bigint": (BigInteger, [-(2**63) + 1, -5, 0, 1, 2**53 + 1, 2033735037361704962, 2**63 - 1]),
        "unsigned": (BIGINT(unsigned=True), [0, 1, 2**53 + 1, 2**63, 2**64 - 1]),
        "char36": (String(36), sorted(str(uuid.UUID(int=n)) for n in (0, 1, 2**64, 2**128 - 1))),
        "uuid": (Uuid, [uuid.UUID(int=n) for n in (0, 1, 2**64, 2**128 - 1)]),
        "binary16": (
            LargeBinary(16).with_variant(BINARY(16), "mysql", "mariadb"),
            [uuid.UUID(int=n).bytes for n in (0, 1, 2**64, 2**128 - 1)],
        ),
        "string": (String(60), ["0", "a'b", "back\\slash", "per%cent", 'quote"`', "z"]),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_any_kind_and_size_arrive_exactly(queue, kind):
    key_type, keys = keys_of(kind)
    mail = queue(model=mail_model(key_type), max_retries=1, retry_backoff=0)
    mail.insert(keys)

    counts = mail.task.drain()

    assert counts.succeeded == len(keys)
    assert sorted(mail.handled) == sorted(keys)
    assert mail.keys(Status.SUCCEEDED) == mail.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_any_kind_are_recovered_and_released(queue, kind):
    key_type, keys = keys_of(kind)
    mail = queue(model=mail_model(key_type))
    mail.insert(keys)
    mail.claim(lease_seconds=60)
    mail.age(62)

    assert sorted(mail.task.recover()) == sorted(keys)
    mail.claim()
    assert sorted(mail.task.release(keys)) == sorted(keys)
    assert sorted(mail.task.cancel(keys)) == sorted(keys)


@pytest.mark.needs("mysql")
def test_unsigned_keys_arrive_and_are_recovered_up_to_their_maximum(queue):
    key_type, keys = keys_of("unsigned")
    mail = queue(model=mail_model(key_type))
    mail.insert(keys)
    mail.claim(lease_seconds=60)
    mail.age(62)

    assert mail.task.recover() == keys
    assert mail.task.drain().succeeded == len(keys)
    assert mail.handled == keys == mail.keys(Status.SUCCEEDED)


# ---- lost answers


@pytest.mark.needs("network")
@pytest.mark.parametrize("reached_the_server", [True, False])
def test_a_claim_whose_answer_was_lost_still_gives_its_rows_to_one_owner(queue, database, proxied, reached_the_server):
    proxy = proxied(database)
    mail = queue(rows=20, url=proxy.url, batch_size=8)
    (proxy.swallow_reply if reached_the_server else proxy.lose_request)(rb"^UPDATE mail.*claim_token", times=2)

    counts = mail.task.drain()

    assert len(proxy.swallowed) + len(proxy.lost) == 2
    assert sorted(mail.handled) == list(range(1, 21))
    assert (counts.succeeded, counts.lost, counts.failed) == (20, 0, 0)
    assert mail.keys(Status.SUCCEEDED) == list(range(1, 21))


@pytest.mark.needs("network")
def test_rows_of_a_claim_are_found_when_the_read_back_loses_its_answer(queue, database, proxied):
    proxy = proxied(database)
    mail = queue(rows=5, url=proxy.url)
    proxy.swallow_reply(rb"^SELECT.*address.*FROM mail")

    mail.task.drain()

    assert len(proxy.swallowed) == 1
    assert mail.handled == [1, 2, 3, 4, 5]


def test_a_claim_that_the_server_refuses_is_an_error_and_not_an_empty_table(queue):
    mail = queue(rows=3)
    _ = mail.claims
    with mail.engine.begin() as connection:
        connection.execute(text("ALTER TABLE mail RENAME TO elsewhere"))

    with pytest.raises(StatementRefused):
        mail.task.drain()


# ---- forks


def fork(work) -> int:
    """Run something in a forked child, which ends with 0 if it worked."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def test_a_connection_never_crosses_a_fork(queue, database, tmp_path):
    mail = queue(rows=30)
    with mail.claims.linked() as link:
        before = server_session(link, database)

        def in_child():
            (tmp_path / "unlinked").write_text(str(link._connection))
            assert mail.task.drain(limit=10).succeeded == 10
            with mail.claims.linked() as own:
                (tmp_path / "session").write_text(str(server_session(own, database)))

        assert os.waitpid(fork(in_child), 0)[1] == 0

        # The parent's connection still works, and it is still the same one.
        assert server_session(link, database) == before
    assert (tmp_path / "unlinked").read_text() == "None"
    assert (tmp_path / "session").read_text() != str(before) or not database.can("network")
    assert mail.task.drain().succeeded == 20


def server_session(link, database):
    """The server's number for a connection; its file has none."""
    if not database.can("network"):
        return link.ask("SELECT 1")[0][0]
    return link.ask("SELECT CONNECTION_ID()" if database.can("mysql") else "SELECT pg_backend_pid()")[0][0]
