"""`celery claim windows|show|trigger|concurrency|pause|resume|log|nodes|prune`, and `celery inspect`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.acceptance.conftest import stage
from tests.acceptance.stage import PROGRAM, Stage
from tests.conftest import Database
from tests.processes import REPOSITORY, eventually
from tests.windows.fleet import HOUR

__all__ = ["stage"]

QUICK = {"claim_node_heartbeat": 0.5, "claim_node_timeout": 3.0}
Stages = Callable[..., Stage]


def claim(show: Stage, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`celery -A proj claim ...`, run to its end."""
    environment = {**os.environ, **show.environment, "PYTHONPATH": str(REPOSITORY), **env}
    command = [sys.executable, "-m", "celery", "-A", PROGRAM, "claim", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def answer(show: Stage, *arguments: str, **env: str) -> Any:
    done = claim(show, *arguments, "--json", **env)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def show(sqlite: Database, stage: Stages) -> Stage:
    """A window of run_type any, so long that its slot never ends."""
    window = {"frequency": HOUR, "run_type": "any", "concurrency": 2, "max_concurrency": 4}
    return stage(sqlite, windows={"work": window})


def test_windows_are_listed_before_anybody_fires_them(show: Stage) -> None:
    (window,) = answer(show, "windows")

    assert (window["name"], window["run_type"], window["concurrency"], window["declared"]) == ("work", "any", 2, True)
    assert window["last_slot_start"] is None
    assert "waiting" in claim(show, "windows").stdout


def test_a_trigger_opens_once_and_the_loser_exits_with_75(show: Stage) -> None:
    first, second = claim(show, "trigger", "work"), claim(show, "trigger", "work")

    assert (first.returncode, second.returncode) == (0, 75), first.stderr + second.stderr
    assert "opened, 2 consumers" in first.stdout
    assert "still have their time" in second.stderr
    runs = answer(show, "log", "work")
    assert {run["kind"] for run in runs} == {"manual"}
    assert all("@" in run["triggered_by"] for run in runs), "who"


def test_of_twenty_processes_that_trigger_one_wins(mariadb: Database, stage: Stages) -> None:
    show = stage(mariadb, windows={"work": {"frequency": HOUR, "run_type": "any"}})
    claim(show, "windows")
    environment = {**os.environ, **show.environment, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "celery", "-A", PROGRAM, "claim", "trigger", "work"]
    racers = [subprocess.Popen(command, env=environment, stdout=-3, stderr=-3) for _ in range(20)]

    codes = sorted(each.wait(120) for each in racers)

    assert codes == [0, *[75] * 19]


def test_a_paused_window_is_not_triggered_and_says_what_to_do(show: Stage) -> None:
    assert claim(show, "pause", "work").returncode == 0
    refused = claim(show, "trigger", "work")
    assert refused.returncode == 1
    assert "celery claim resume" in refused.stderr
    assert answer(show, "windows")[0]["enabled"] is False

    assert claim(show, "resume", "work").returncode == 0
    assert claim(show, "trigger", "work").returncode == 0


def test_concurrency_is_changed_within_its_cap_and_reset(show: Stage) -> None:
    assert answer(show, "concurrency", "work", "4") == {
        "window": "work",
        "concurrency": 4,
        "overridden": ["concurrency"],
    }
    above = claim(show, "concurrency", "work", "5")
    assert above.returncode == 1
    assert "expected 1 to 4 (max_concurrency of the window)" in above.stderr
    assert answer(show, "concurrency", "work", "--reset")["concurrency"] == 2
    assert claim(show, "concurrency", "work", "0").returncode == 64


def test_an_unknown_window_is_refused_with_the_closest(show: Stage) -> None:
    for command in ("show", "trigger", "pause", "resume", "concurrency", "log"):
        done = claim(show, command, "wrk")
        assert done.returncode == 64, command
        assert "no window is called 'wrk'. Did you mean 'work'?" in done.stderr
        assert "Traceback" not in done.stderr


def test_no_node_is_an_answer_and_no_race(sqlite: Database, stage: Stages) -> None:
    show = stage(sqlite, windows={"work": {"frequency": HOUR}})

    done = claim(show, "trigger", "work")

    assert done.returncode == 1
    assert "no live node accepts runs" in done.stderr


def test_all_but_the_sending_works_while_the_broker_is_down(show: Stage) -> None:
    down = {"PROJ_BROKER": "redis://127.0.0.1:1/0"}
    for command in (
        ["windows"],
        ["show", "work"],
        ["log"],
        ["nodes"],
        ["prune"],
        ["pause", "work"],
        ["resume", "work"],
    ):
        done = claim(show, *command, **down)
        assert done.returncode == 0, (command, done.stderr)

    sent_later = claim(show, "trigger", "work", **down)

    assert sent_later.returncode == 69
    assert "a worker sends the runs later" in sent_later.stderr
    assert [run["published_at"] for run in answer(show, "log")] == [None, None]


def test_a_database_that_is_down_exits_with_69(show: Stage, mariadb: Database) -> None:
    url = mariadb.server.url(mariadb.schema, port=1)

    done = claim(show, "windows", PROJ_DATABASE=url)

    assert done.returncode == 69
    assert "the database is not available" in done.stderr
    assert "pa55" not in done.stderr


def test_a_window_that_code_no_longer_declares_is_shown_found_and_taken_out(show: Stage) -> None:
    show.windows.register({"old": next(iter(show.declared().values())).__class__("old", "proj.work", 1000, 500)})

    assert {each["name"]: each["declared"] for each in answer(show, "windows")} == {"old": False, "work": True}
    checked = answer(show, "check")
    assert [each["code"] for each in checked if each["task"] == "windows"] == ["window-not-declared"]
    assert claim(show, "prune", "--window", "work").returncode == 64
    assert claim(show, "prune", "--window", "old").returncode == 0
    assert [each["name"] for each in answer(show, "windows")] == ["work"]


def test_a_concurrency_above_the_cap_is_refused_where_it_is_declared(sqlite: Database, stage: Stages) -> None:
    wide = stage(sqlite, windows={"work": {"frequency": 60, "concurrency": 3}}, settings={"claim_max_concurrency": 2})

    worker = wide.worker(ready=False)

    # The program itself cannot be imported: window() knows the settings that stand before it.
    assert worker.process.wait(30) == 2, worker.log()
    assert "concurrency=3 is more than claim_max_concurrency=2" in worker.log()


def test_two_windows_of_one_name_are_refused(sqlite: Database, stage: Stages) -> None:
    twice = stage(sqlite, windows={"a": {"frequency": 60, "name": "same"}, "b": {"frequency": 60, "name": "same"}})

    done = claim(twice, "check")

    assert done.returncode == 1
    assert "two windows are called 'same'" in done.stdout
    beat = twice.command("beat", "-S", "claim")
    assert beat.returncode == 78
    assert "two windows are called 'same'" in beat.stderr


def test_workers_answer_inspect_from_memory_and_nodes_are_listed(mariadb: Database, stage: Stages) -> None:
    show = stage(mariadb, windows={"work": {"frequency": HOUR}}, settings=QUICK)
    show.worker("-c", "1", "-n", "w1@test", "--claim-role", "main")
    claim(show, "windows")
    eventually(lambda: [node["main"] for node in answer(show, "nodes")] == [True], 15, "the main node")

    def inspected(command: str) -> Any:
        done = show.command("inspect", command, "-j", "-t", "3")
        return json.loads(done.stdout)["w1@test"]

    eventually(lambda: [each["name"] for each in inspected("claim_windows")["windows"]] == ["work"], 15, "windows")
    (node,) = inspected("claim_nodes")["nodes"]
    assert (node["node"], node["role"], node["alive"], node["accepting"]) == ("w1@test", "main", True, True)

    waited = claim(show, "trigger", "work", "--wait", "20")
    assert waited.returncode == 0, waited.stderr
    assert "empty" in waited.stdout
    (counted,) = answer(show, "nodes")
    eventually(lambda: answer(show, "nodes")[0]["success"] >= 1, 10, f"a success (now {counted['success']})")


def test_the_own_tables_are_made_by_initdb_and_not_without(sqlite: Database, stage: Stages) -> None:
    show = stage(sqlite, windows={"work": {"frequency": 60}}, settings={"claim_create_tables": False})

    missing = claim(show, "windows")
    assert missing.returncode == 1
    assert "celery -A proj claim initdb" in missing.stderr
    made = answer(show, "initdb")["made"]
    assert {"celery_claim_window", "celery_claim_run", "celery_claim_node", "celery_claim_lease"} <= set(made)
    assert claim(show, "windows").returncode == 0
