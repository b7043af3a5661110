"""`celery inspect claim_windows` and `claim_nodes` against a real worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.conftest import stage
from tests.acceptance.stage import Stage
from tests.conftest import Database
from tests.processes import eventually
from tests.proxy import Proxy
from tests.windows.fleet import HOUR

__all__ = ["stage"]

Stages = Callable[..., Stage]


def inspected(show: Stage, command: str) -> Any:
    """What the worker answers."""
    done = show.command("inspect", command, "-j", "-t", "5")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["w1@test"]


def ready(show: Stage) -> Stage:
    """With a window in the table, and one worker that has seen it."""
    show.windows.register(show.declared())
    show.worker("-c", "1", "-n", "w1@test", "--claim-role", "main")

    def seen() -> bool:
        return [each["name"] for each in inspected(show, "claim_windows")["windows"]] == ["work"]

    eventually(seen, 20, "windows")
    return show


@pytest.fixture
def show(mariadb: Database, stage: Stages) -> Stage:
    return ready(stage(mariadb, windows={"work": {"frequency": HOUR, "concurrency": 2}}))


def test_a_worker_answers_what_windows_and_nodes_there_are(show: Stage) -> None:
    (window,) = inspected(show, "claim_windows")["windows"]
    assert (window["name"], window["concurrency"], window["enabled"], window["fire_seq"]) == ("work", 2, True, 0)

    answer = inspected(show, "claim_nodes")

    assert (answer["node"], answer["accepting"]) == ("w1@test", True)
    (node,) = answer["nodes"]
    assert (node["node"], node["role"], node["alive"], node["accepting"]) == ("w1@test", "main", True, True)


def test_what_a_person_changes_is_answered_after_a_heartbeat(show: Stage) -> None:
    show.windows.pause("work")
    show.windows.set_concurrency("work", 3)

    def seen() -> bool:
        (window,) = inspected(show, "claim_windows")["windows"]
        changed = {"enabled": False, "concurrency": 3, "overridden": ["concurrency", "enabled"]}
        return changed.items() <= window.items()

    eventually(seen, 15, "the change")


def test_a_worker_answers_from_memory_while_its_database_does_not(
    mariadb: Database, stage: Stages, proxied: Callable[[Database], Proxy]
) -> None:
    proxy = proxied(mariadb)
    show = ready(stage(mariadb, url=proxy.url, windows={"work": {"frequency": HOUR}}))
    proxy.pause()

    assert [each["name"] for each in inspected(show, "claim_windows")["windows"]] == ["work"]
    assert [each["node"] for each in inspected(show, "claim_nodes")["nodes"]] == ["w1@test"]
