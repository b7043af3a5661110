"""Leases in the database, and the ordinary entries that are sent under one."""

from __future__ import annotations

import threading

from celery_claim.nodes import leases
from celery_claim.windows import entries
from celery_claim.windows.sql.entries import EntryStatements
from tests.windows.fleet import Fleet

TTL = 15_000


def test_one_of_many_gets_a_lease(fleet: Fleet) -> None:
    got: list[str] = []

    def take(owner: str) -> None:
        with fleet.dispatcher().database.linked() as link:
            if leases.acquire(link, fleet.tables.nodes, "beat", owner, ttl_ms=TTL) is not None:
                got.append(owner)

    threads = [threading.Thread(target=take, args=(f"b{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(got) == 1


def test_a_holder_keeps_its_lease_under_one_epoch_and_another_gets_the_next(fleet: Fleet) -> None:
    with fleet.link() as link:

        def acquire(owner: str) -> leases.Lease | None:
            return leases.acquire(link, fleet.tables.nodes, "beat", owner, ttl_ms=TTL)

        first, again = acquire("a"), acquire("a")
        assert acquire("b") is None
        fleet.pass_time(TTL / 1000)
        taken = acquire("b")
        assert acquire("a") is None

    assert first is not None
    assert again is not None
    assert taken is not None
    assert (first.epoch, again.epoch, taken.epoch) == (1, 1, 2)


def test_a_lease_that_was_given_up_is_free_at_once(fleet: Fleet) -> None:
    with fleet.link() as link:
        leases.acquire(link, fleet.tables.nodes, "beat", "a", ttl_ms=TTL)
        leases.release(link, fleet.tables.nodes, "beat", "somebody else")
        assert leases.acquire(link, fleet.tables.nodes, "beat", "b", ttl_ms=TTL) is None
        leases.release(link, fleet.tables.nodes, "beat", "a")

        assert leases.acquire(link, fleet.tables.nodes, "beat", "b", ttl_ms=TTL) is not None


def test_an_entry_is_sent_by_the_holder_and_once(fleet: Fleet) -> None:
    statements = EntryStatements(fleet.tables)
    with fleet.link() as link:
        lease = leases.acquire(link, fleet.tables.nodes, "beat", "a", ttl_ms=TTL)
        assert lease is not None
        new = entries.load(link, statements, {"e": "every"}, 1000)["e"]
        assert new == entries.Sent(1000, 0)
        first = entries.Sending("e", new, at=2000)

        assert entries.claim(link, statements, lease, first)
        assert not entries.claim(link, statements, lease, entries.Sending("e", new, at=2001)), "sent since it looked"
        assert entries.undo(link, statements, first)
        assert entries.claim(link, statements, lease, first), "the broker did not take it"

        fleet.pass_time(TTL / 1000)
        leases.acquire(link, fleet.tables.nodes, "beat", "b", ttl_ms=TTL)
        assert not entries.claim(link, statements, lease, entries.Sending("e", first.after, at=3000)), "deposed"

        assert entries.load(link, statements, {"e": "every"}, 9000)["e"] == entries.Sent(2000, 1)


def test_an_entry_with_another_schedule_begins_anew(fleet: Fleet) -> None:
    statements = EntryStatements(fleet.tables)
    with fleet.link() as link:
        entries.load(link, statements, {"e": "every 10 s", "kept": "daily"}, 1000)

        loaded = entries.load(link, statements, {"e": "every 60 s", "kept": "daily"}, 5000)

    assert (loaded["e"].last_run_at, loaded["kept"].last_run_at) == (5000, 1000)
