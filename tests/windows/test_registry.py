"""The register of nodes: one row for each name, held by its latest start."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any
from uuid import uuid4

from celery_claim.nodes import registry
from celery_claim.nodes.identity import Identity
from tests.windows.fleet import Fleet


def beats(fleet: Fleet, node: Identity, **vitals: Any) -> bool:
    """Whether the node's heartbeat finds its name its own."""
    with fleet.link() as link:
        return registry.beat(link, fleet.tables.nodes, node, fleet.vitals(**vitals))


def leave(fleet: Fleet, node: Identity) -> None:
    with fleet.link() as link:
        registry.leave(link, fleet.tables.nodes, node)


def boots(fleet: Fleet) -> dict[str, str]:
    return {row["node"]: row["boot_id"] for row in fleet.first.nodes()}


def test_of_two_starts_of_one_name_the_older_hears_that_it_is_over(fleet: Fleet) -> None:
    older = fleet.node("n1")
    assert beats(fleet, older)

    newer = fleet.node("n1")

    assert not beats(fleet, older)
    assert beats(fleet, newer)
    assert boots(fleet) == {"n1": newer.boot_id}


def test_the_heartbeat_of_an_older_start_changes_nothing(fleet: Fleet) -> None:
    older = fleet.node("n1")
    fleet.node("n1", running=1)

    beats(fleet, older, accepting=False, running=9)

    (row,) = fleet.first.nodes()
    assert row["accepting"]
    assert row["running"] == 1


def test_an_older_start_that_leaves_does_not_take_the_newer_with_it(fleet: Fleet) -> None:
    older = fleet.node("n1")
    newer = fleet.node("n1")

    leave(fleet, older)
    assert boots(fleet) == {"n1": newer.boot_id}

    leave(fleet, newer)
    assert boots(fleet) == {}


def test_a_node_that_was_forgotten_and_lives_enters_again(fleet: Fleet) -> None:
    node = fleet.node("n1")
    leave(fleet, node)

    assert beats(fleet, node)

    assert boots(fleet) == {"n1": node.boot_id}


def test_a_node_lives_while_its_heartbeat_is_young(fleet: Fleet) -> None:
    node = fleet.node("n1")
    assert [row["alive"] for row in fleet.first.nodes()] == [True]

    fleet.pass_time(fleet.first.settings.node_timeout + 1)
    assert [row["alive"] for row in fleet.first.nodes()] == [False]

    assert beats(fleet, node)
    assert [row["alive"] for row in fleet.first.nodes()] == [True]


def test_of_many_starts_of_one_name_at_once_one_stands(fleet: Fleet) -> None:
    starts = [Identity("n1", None, uuid4().hex) for _ in range(8)]
    together = Barrier(len(starts))
    entered: list[str] = []

    def enter(node: Identity) -> None:
        together.wait()
        with fleet.link() as link:
            registry.enter(link, fleet.tables.nodes, node, fleet.vitals())
        entered.append(node.boot_id)

    threads = [Thread(target=enter, args=(node,)) for node in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(entered) == sorted(node.boot_id for node in starts), "every start came in without an error"
    assert [beats(fleet, node) for node in starts].count(True) == 1
    assert len(fleet.first.nodes()) == 1
