"""Leases: a live owner keeps its rows however long they take, and one that was cut off loses them."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from sqlalchemy import text

from celery_claim import Fail, Skip, Status, signals
from celery_claim.claims import renew
from celery_claim.claims.renew import Held, Renewer, renewer_of
from celery_claim.exceptions import Contention, DatabaseUnavailable
from celery_claim.rows import consume
from tests.conformance.tables import SUCCEEDED


def watch(mail, found, over):
    """What a recoverer on another machine finds while a run goes on."""
    while not over.wait(0.1):
        found.extend(mail.task.recover())


@pytest.mark.slow
@pytest.mark.parametrize("write_back", ["row", "batch"])
def test_a_row_of_three_leases_length_stays_with_its_live_owner(queue, write_back):
    def handler(row):
        mail.handled.append(row.id)
        if row.id == 1:
            time.sleep(6.5)

    mail = queue(handler, rows=3, lease_seconds=2, write_back=write_back)
    found: list[int] = []
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(mail, found, over))
    watcher.start()
    counts = mail.task.drain()
    over.set()
    watcher.join()

    assert found == []
    assert (counts.succeeded, counts.lost) == (3, 0)
    assert mail.handled == [1, 2, 3]


def test_a_result_that_waits_is_written_while_the_next_row_takes_long(queue, eventually):
    in_table: list[object] = []

    def handler(row):
        if row.id == 3:
            in_table.append(eventually(lambda: mail.row(1).status == Status.SUCCEEDED, timeout=5))

    mail = queue(handler, rows=3, write_back="batch")

    assert mail.task.drain().succeeded == 3
    assert in_table == [True]


@pytest.mark.slow
def test_an_owner_whose_renewer_froze_starts_no_row_after_its_lease(queue, monkeypatch):
    """As when the process was stopped, or its thread never got the processor."""
    monkeypatch.setattr(Renewer, "_keep", lambda self, held, link: True)

    def handler(row):
        mail.handled.append(row.id)
        time.sleep(2.5)

    mail = queue(handler, rows=3, lease_seconds=2)
    counts = mail.task.drain(limit=3)

    # The first result arrives late and nobody took the row meanwhile: the table still knows us as its owner.
    assert mail.handled == [1]
    assert (counts.succeeded, counts.released) == (1, 2)
    assert mail.keys(Status.PENDING) == [2, 3]


@pytest.mark.slow
def test_an_owner_whose_renewer_froze_loses_its_rows_to_the_next(queue, monkeypatch, eventually):
    monkeypatch.setattr(Renewer, "_keep", lambda self, held, link: True)

    def handler(row):
        mail.handled.append(row.id)
        if len(mail.handled) == 1:
            assert eventually(mail.task.recover, timeout=8) == [1]
            mail.claim(worker_id="next")

    mail = queue(handler, rows=1, lease_seconds=2)
    counts = mail.task.drain(limit=1)

    assert (counts.succeeded, counts.lost) == (0, 1)
    assert mail.row().worker_id == "next"


@pytest.mark.slow
def test_a_row_that_was_taken_over_is_skipped_by_the_owner_that_still_holds_it(queue, eventually):
    """The renewer notices before the row is started."""
    lost: list[object] = []

    def handler(row):
        mail.handled.append(row.id)
        if row.id == 1:
            mail.age(1000, [2])
            mail.task.recover()
            eventually(lambda: lost, timeout=5)

    mail = queue(handler, rows=3, lease_seconds=3)

    def on_lost(sender, keys, **_):
        lost.extend(keys)

    signals.claim_lost.connect(on_lost)
    try:
        counts = mail.task.drain(limit=3)
    finally:
        signals.claim_lost.disconnect(on_lost)

    assert lost == [2]
    assert mail.handled == [1, 3]
    assert (counts.succeeded, counts.lost, counts.released) == (2, 1, 0)


@pytest.mark.slow
def test_a_row_that_overruns_its_limit_is_let_go_and_the_rows_behind_it_go_back(queue, eventually):
    def handler(row):
        mail.handled.append(row.id)
        if row.id == 2 and mail.handled.count(2) == 1:
            eventually(lambda: mail.row(3).status == Status.PENDING, timeout=5)
            eventually(mail.task.recover, timeout=8)

    mail = queue(handler, rows=4, lease_seconds=2, row_time_limit=0.5, write_back="batch")
    counts = mail.task.drain(limit=4)

    assert mail.handled == [1, 2]
    # What was finished before the limit is written, not given back to be done again.
    assert mail.row(1).status == Status.SUCCEEDED
    assert mail.keys(Status.PENDING) == [2, 3, 4]
    assert (counts.succeeded, counts.lost) == (1, 1)
    assert mail.row(2).reclaim_count == 1


def test_finished_rows_are_not_let_go_with_the_others(queue):
    """Outcomes that wait in the buffer are written before the rows behind the stuck one are released."""
    mail = queue(rows=3)
    claimed = mail.claim()
    held = Held(mail.statements, claimed, lease_seconds=600, row_time_limit=0.001)
    held.start(1)
    held.finish()
    held.buffer.add(1, SUCCEEDED)
    held.start(2)
    time.sleep(0.01)
    with mail.claims.linked() as link:
        held.keep(link)

    assert [mail.row(key).status for key in (1, 2, 3)] == [2, 1, 0]


def test_a_renewal_starts_the_lease_anew_and_is_never_taken_for_a_loss(queue):
    mail = queue(rows=3)
    claimed = mail.claim(lease_seconds=3)
    held = Held(mail.statements, claimed, lease_seconds=3, on_lost=lambda keys: mail.handled.extend(keys))
    mail.age(100)
    with mail.claims.linked() as link:
        for _ in range(3):
            held._renew(link)

    assert mail.handled == []
    assert mail.task.recover() == []


@pytest.mark.needs("row_locks")
def test_a_lock_on_one_row_does_not_keep_the_others_from_being_renewed(queue):
    mail = queue(rows=3)
    claimed = mail.claim(lease_seconds=60)
    held = Held(mail.statements, claimed, lease_seconds=60, on_lost=lambda keys: mail.handled.extend(keys))
    mail.age(100)
    with mail.engine.begin() as side, mail.claims.linked(lock_wait_seconds=1) as link:
        side.execute(text("SELECT id FROM mail WHERE id = 2 FOR UPDATE"))
        held._renew(link)

    assert mail.handled == []
    assert mail.task.recover() == [2]


@pytest.mark.slow
def test_rows_without_a_lease_are_not_renewed(queue):
    def handler(row):
        before = mail.row(row.id).claim_time
        time.sleep(1.2)
        assert mail.row(row.id).claim_time == before

    mail = queue(handler, rows=1, lease_seconds=None)

    assert mail.task.drain().succeeded == 1


@pytest.mark.needs("network")
@pytest.mark.slow
def test_a_renewer_that_loses_its_connection_gets_another_and_keeps_the_rows(queue, database, proxied):
    proxy = proxied(database)

    def handler(row):
        mail.handled.append(row.id)
        for _ in range(5):
            time.sleep(0.9)
            proxy.cut()

    mail = queue(handler, rows=2, url=proxy.url, lease_seconds=2)
    found: list[int] = []
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(queue(model=mail.model, lease_seconds=2), found, over))
    watcher.start()
    counts = mail.task.drain()
    over.set()
    watcher.join()

    assert (counts.succeeded, counts.lost, found) == (2, 0, [])


def test_the_end_of_a_run_leaves_nothing_held(queue):
    mail = queue(lambda row: Fail("no"), rows=5)
    mail.task.drain()

    assert renewer_of(mail.claims.database)._held == set()


def test_a_renewal_that_meets_a_lost_connection_is_tried_again_at_once(queue, monkeypatch):
    mail = queue(rows=1)
    claimed = mail.claim(lease_seconds=600)
    held = Held(mail.statements, dataclasses.replace(claimed, sent_at=claimed.sent_at - 300), lease_seconds=600)
    tries: list[object] = []

    def renewed(*arguments):
        tries.append(arguments)
        if len(tries) == 1:
            raise DatabaseUnavailable("server has gone away")
        return really(*arguments)

    really = renew._renewed
    monkeypatch.setattr(renew, "_renewed", renewed)
    with mail.claims.linked() as link:
        Renewer(mail.claims.database)._keep(held, link)

    assert len(tries) == 2
    assert held.expires_at > time.monotonic() + 500


@pytest.mark.slow
def test_rows_are_not_kept_by_a_run_that_was_interrupted_while_it_gave_them_back(queue, monkeypatch, eventually):
    def handler(row):
        if row.id == 2:
            raise SystemExit

    def strike_again(self, held):
        raise SystemExit

    mail = queue(handler, rows=3, lease_seconds=2, write_back="batch")
    monkeypatch.setattr(consume.Consumer, "_flush", strike_again)
    with pytest.raises(SystemExit):
        mail.task.drain()

    # Row 1 ended and was not written: it is done again, or was written by the renewer.
    assert eventually(mail.task.recover, timeout=8)[-2:] == [2, 3]


def test_rows_go_back_over_a_new_connection_when_the_old_one_is_gone(queue, monkeypatch):
    tries: list[object] = []

    def release(*arguments, **options):
        tries.append(arguments)
        if len(tries) == 1:
            raise DatabaseUnavailable("server has gone away")
        return really(*arguments, **options)

    def handler(row):
        raise Skip

    really = consume.release
    monkeypatch.setattr(consume, "release", release)
    mail = queue(handler, rows=1, lease_seconds=None)
    counts = mail.task.drain(limit=1)

    assert mail.keys(Status.PENDING) == [1]
    assert counts.released == 1


def test_a_row_that_could_not_be_given_back_is_not_counted_as_released(queue, monkeypatch):
    def release(*arguments, **options):
        raise Contention("locked")

    def handler(row):
        raise Skip

    monkeypatch.setattr(consume, "release", release)
    monkeypatch.setattr(consume, "RELEASE_SECONDS", 0)
    mail = queue(handler, rows=1)

    assert mail.task.drain(limit=1).released == 0
    assert mail.keys(Status.PROCESSING) == [1]


def test_rows_that_cannot_be_let_go_just_now_stay_ours(queue, monkeypatch):
    """The database goes away between the look and the release: nobody else gets them, and nobody forgets them."""
    mail = queue(rows=3)
    held = Held(mail.statements, mail.claim(), lease_seconds=600, row_time_limit=0.001)
    held.start(1)
    with monkeypatch.context() as away, mail.claims.linked() as link:

        def refuse(*_):
            raise DatabaseUnavailable("away")

        away.setattr("celery_claim.claims.renew.release", refuse)
        time.sleep(0.01)  # past row_time_limit
        with pytest.raises(DatabaseUnavailable):
            held.keep(link)

    assert held.open == [2, 3]
