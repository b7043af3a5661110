"""A worker does not start on what cannot work: it ends with code 78 and says what mends it, and shows no password."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from celery_claim import Status
from tests.acceptance.stage import Stage
from tests.conftest import Database
from tests.processes import CeleryProcess, CeleryProcesses
from tests.proxy import Proxy
from tests.servers import PASSWORD

EX_CONFIG = 78
#: A table on which nothing can be found wrong, on MySQL and MariaDB.
GOOD = {
    "id": "BIGINT NOT NULL",
    "work": "VARCHAR(100) NOT NULL DEFAULT ''",
    "status": "TINYINT UNSIGNED NOT NULL DEFAULT 0",
    "claim_time": "BIGINT NULL",
    "lease_seconds": "INT NULL",
    "claim_token": "CHAR(32) CHARACTER SET ascii COLLATE ascii_bin NULL",
    "worker_id": "VARCHAR(128) NULL",
    "retry_count": "SMALLINT NOT NULL DEFAULT 0",
    "reclaim_count": "SMALLINT NOT NULL DEFAULT 0",
    "next_retry_time": "BIGINT NULL",
    "error_message": "VARCHAR(500) NULL",
}
INDEX = "INDEX ix_claim (status, id)"
EXISTING = """
import os
from celery import Celery
from celery_claim import ClaimTask

app = Celery("existing", broker=os.environ["PROJ_BROKER"])
app.conf.claim_database_url = os.environ["PROJ_DATABASE"]

@app.task(base=ClaimTask, {options})
def work({arguments}):
    print("worked on", row.id)
"""


def table(*, key: str = "PRIMARY KEY (id)", index: str = INDEX, engine: str = "InnoDB", **changed: str | None) -> str:
    """The statement that makes `job`; a column given as None is left out."""
    columns = {**GOOD, **changed}
    parts = [f"{name} {kind}" for name, kind in columns.items() if kind] + [key] + ([index] if index else [])
    return f"CREATE TABLE job ({', '.join(parts)}) ENGINE={engine}"


def started(
    processes: CeleryProcesses, database_url: str, broker: str, *, options: str = "table='job'", arguments: str = "row"
) -> CeleryProcess:
    source = EXISTING.format(options=options, arguments=arguments)
    environment = {"PROJ_DATABASE": database_url, "PROJ_BROKER": broker}
    return processes.worker(source, "-c", "1", "--without-mingle", env=environment, ready=False, name="existing")


REFUSED = {
    "no claim columns": (table(claim_time=None, claim_token=None), "claim_time"),
    "no such table": ("SELECT 1", "there is no table 'job'"),
    "a short token": (table(claim_token="CHAR(16) CHARACTER SET ascii COLLATE ascii_bin"), "holds 16 characters"),
    "a folding token": (table(claim_token="CHAR(32) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"), "upper"),
    "MyISAM": (table(engine="MyISAM"), "ENGINE = InnoDB"),
    "a composite key": (table(key="PRIMARY KEY (id, status)"), "composite key (id, status)"),
    "a key that is none": (table(key="KEY (id)"), "no primary key"),
}


@pytest.mark.parametrize("bad", REFUSED)
def test_a_worker_refuses_a_table_that_cannot_be_claimed(
    mariadb: Database, redis_server: Any, celery_processes: CeleryProcesses, bad: str
) -> None:
    statement, words = REFUSED[bad]
    mariadb.admin(statement)

    worker = started(celery_processes, mariadb.url, redis_server.url)

    assert worker.process.wait(30) == EX_CONFIG, worker.log()
    assert words in worker.log()
    assert "Traceback" not in worker.log()
    assert PASSWORD not in worker.log()


WRONG_OPTIONS = {
    "a lease under 2 s": ("table='job', lease_seconds=1", "row", "lease_seconds=1 does not work"),
    "an unknown option": ("table='job', batchsize=5", "row", "unknown option 'batchsize'. Did you mean 'batch_size'?"),
    "a handler without row": ("table='job'", "", "the handler must take (row), but is work()"),
    "an unknown column": ("table='job', columns={'status': 'sttus'}", "row", "Did you mean 'status'?"),
    "no table": ("batch_size=5", "row", "neither of model= and table= given"),
}  # fmt: skip


@pytest.mark.parametrize("bad", WRONG_OPTIONS)
def test_a_worker_refuses_options_that_cannot_work(
    mariadb: Database, redis_server: Any, celery_processes: CeleryProcesses, bad: str
) -> None:
    options, arguments, words = WRONG_OPTIONS[bad]
    mariadb.admin(table())

    worker = started(celery_processes, mariadb.url, redis_server.url, options=options, arguments=arguments)

    assert worker.process.wait(30) != 0
    assert words in plain(worker.log())
    assert PASSWORD not in worker.log()


def plain(log: str) -> str:
    """A log with its lines joined: Celery frames the errors of a program that cannot be loaded."""
    return re.sub(r"\s+", " ", log)


def test_a_worker_refuses_an_unknown_setting(mariadb: Database, stage: Callable[..., Stage]) -> None:
    show = stage(mariadb, settings={"claim_maintainance_interval": 1})

    worker = show.worker("-c", "1", ready=False)

    assert worker.process.wait(30) == EX_CONFIG, worker.log()
    assert "unknown setting 'claim_maintainance_interval'. Did you mean 'claim_maintenance_interval'?" in worker.log()


def test_a_worker_refuses_a_read_only_server(mariadb: Database, stage: Callable[..., Stage]) -> None:
    show = stage(mariadb)
    mariadb.server.read_only(True)

    worker = show.worker("-c", "1", ready=False)

    assert worker.process.wait(30) == EX_CONFIG, worker.log()
    assert "read-only" in worker.log()


@pytest.mark.needs("network")
def test_a_wrong_password_is_refused_and_never_shown(database: Database, stage: Callable[..., Stage]) -> None:
    wrong = "s3cret-and-wrong"
    show = stage(database, url=database.url.replace(PASSWORD, wrong))

    worker = show.worker("-c", "1", "-l", "DEBUG", ready=False)

    assert worker.process.wait(30) == EX_CONFIG, worker.log()
    assert "correct user, password or name" in worker.log()
    assert wrong not in worker.log()


def test_a_table_without_an_index_is_worked_on_with_a_warning(
    mariadb: Database, redis_server: Any, celery_processes: CeleryProcesses
) -> None:
    mariadb.admin(table(index=""))

    worker = started(celery_processes, mariadb.url, redis_server.url).wait_ready()

    assert "no index on (status, id)" in worker.log()


@pytest.mark.slow
@pytest.mark.needs("network")
def test_a_worker_starts_while_the_database_is_down_and_works_when_it_is_back(
    database: Database, stage: Callable[..., Stage], proxied: Callable[[Database], Proxy]
) -> None:
    proxy = proxied(database)
    show = stage(database, url=proxy.url)
    show.add(range(1, 6))
    proxy.down()

    worker = show.worker("-c", "1", timeout=60)
    show.send()
    worker.wait_for_log("does not work, trying again")
    assert show.states() == {Status.PENDING: 5}

    proxy.up()
    assert show.driven(5) == {Status.SUCCEEDED: 5}
    assert set(show.starts().values()) == {1}
    assert PASSWORD not in worker.log()
    assert "Traceback" not in worker.log()


@pytest.mark.slow
def test_a_server_that_turns_read_only_fails_no_row(mariadb: Database, stage: Callable[..., Stage]) -> None:
    """A failover in the middle of work: nothing changes its state until the server takes writes again."""
    show = stage(mariadb, lease_seconds=30)
    show.add(range(1, 21), work="sleep 0.1")
    worker = show.worker("-c", "1")
    show.send()
    show.started(3)
    mariadb.server.read_only(True)
    worker.wait_for_log("read-only")
    mariadb.server.read_only(False)

    assert show.driven(20) == {Status.SUCCEEDED: 20}
    assert set(show.starts().values()) == {1}
    assert "Traceback" not in worker.log()


@pytest.mark.slow
def test_no_command_shows_the_password(mariadb: Database, stage: Callable[..., Stage]) -> None:
    """inspect conf, report and our own commands; the worker answers `inspect` while it has handlers at work."""
    show = stage(mariadb)
    show.add([1], work="sleep 5")
    worker = show.worker("-c", "1", "-l", "DEBUG")
    show.send()
    show.started(1)

    asked = {
        command: show.command(*command.split(), timeout=60)
        for command in ("inspect ping", "inspect registered", "inspect conf", "report", "claim check", "claim status")
    }

    assert "pong" in asked["inspect ping"].stdout
    assert "proj.work" in asked["inspect registered"].stdout
    assert "celery_claim.fire" in asked["inspect registered"].stdout
    assert "claim_maintenance_interval" in asked["inspect conf"].stdout
    everything = json.dumps([(each.stdout, each.stderr) for each in asked.values()]) + worker.log()
    # The broker's password is the same one, so Celery's own masking is looked at as well.
    assert PASSWORD not in everything
