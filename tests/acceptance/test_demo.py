"""`python -m celery_claim.demo`: the first command of the README does what it says, and cleans up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine, insert, inspect, text, update

from celery_claim import Status
from celery_claim.demo.kill import Killed
from celery_claim.demo.measure import measure
from celery_claim.demo.report import Proof, prove
from celery_claim.demo.tables import Base, File, Handling, connect
from tests.processes import REPOSITORY

#: Enough for a kill half way, and soon done.
#: So many that one worker is sure to be at work when it is to be killed.
ROWS = "2500"


class Demo:
    """One run of the demo with a temporary folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.output_path = folder.parent / f"{folder.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TMPDIR": str(self.folder), "PYTHONPATH": str(REPOSITORY), "COLUMNS": "160"}
        with self.output_path.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "celery_claim.demo", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
            )
        return self._process

    def run(self, *arguments: str, timeout: float = 120) -> int:
        return self.start(*arguments).wait(timeout)

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def left_running(self) -> list[Sequence[str]]:
        """Command lines of the processes that this run has started and not ended."""
        return [process.cmdline() for process in psutil.process_iter() if self._is_ours(process)]

    def close(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return (
                process.environ().get("TMPDIR", "").startswith(str(self.folder))
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    run = Demo(tmp_path / "demo")
    yield run
    run.close()


def assert_proved(demo: Demo, code: int) -> None:
    assert code == 0, demo.output
    assert "Every row was handled, and none twice without a cause." in demo.output
    assert re.search(r"twice, no cause +0 *$", demo.output, re.MULTILINE)
    assert re.search(r"hashes .* 0 differ", demo.output)


def assert_nothing_left(demo: Demo) -> None:
    assert demo.left_running() == []
    assert list(demo.folder.iterdir()) == []


# ---- the whole run --------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_the_default_run_ends_by_itself_in_a_minute_with_a_proof_and_leaves_nothing(demo: Demo) -> None:
    began = time.monotonic()

    code = demo.run()

    assert_proved(demo, code)
    assert time.monotonic() - began < 60
    assert re.search(r"killed +demo\d@local, process \d+, with kill -9", demo.output)
    back, held = re.search(r"came back +(\d+) of (\d+)", demo.output).groups()  # type: ignore[union-attr]
    assert back == held != "0"
    assert_nothing_left(demo)


@pytest.mark.slow
@pytest.mark.alone
def test_without_redis_the_proof_is_the_same(demo: Demo) -> None:
    code = demo.run("--no-redis", "--rows", ROWS)

    assert_proved(demo, code)
    assert "no Redis" in demo.output
    assert not [line for line in demo.left_running() if "valkey" in " ".join(line)]
    assert_nothing_left(demo)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mariadb", "mysql56", "postgresql"])
def test_on_real_servers_it_leaves_no_table_and_no_key(
    name: str, request: pytest.FixtureRequest, redis_server, demo: Demo
) -> None:
    database = request.getfixturevalue(name)

    code = demo.run("--database", database.url, "--broker", redis_server.url, "--rows", ROWS)

    assert_proved(demo, code)
    assert f"{int(ROWS):,}" in demo.output
    assert inspect(database.engine()).get_table_names() == []
    with redis_server.client() as client:
        assert client.keys("*") == []
    assert_nothing_left(demo)


@pytest.mark.slow
def test_what_is_asked_to_be_kept_stays_and_the_next_run_replaces_it(tmp_path: Path, demo: Demo) -> None:
    database = f"sqlite:///{tmp_path / 'kept.sqlite'}"
    picture = tmp_path / "demo.svg"

    kept = demo.run("--database", database, "--rows", "200", "--no-kill", "--keep", "--picture", str(picture))
    kept_tables = set(inspect(connect(database)).get_table_names())
    kept_logs = [path.name for path in demo.folder.rglob("*.log")]
    again = demo.run("--database", database, "--rows", "200", "--no-kill")

    assert kept == 0, demo.output
    assert {File.__tablename__, Handling.__tablename__} <= kept_tables
    assert "beat.log" in kept_logs
    assert picture.read_text().startswith("<svg") and "font-face" not in picture.read_text()
    assert_proved(demo, again)
    assert "of an earlier demo are replaced" in demo.output
    assert inspect(connect(database)).get_table_names() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_takes_everything_with_it(
    number: signal.Signals, demo: Demo, eventually: Callable[..., object]
) -> None:
    process = demo.start("--rows", "20000")
    eventually(lambda: "rows are being claimed" in demo.output, timeout=45)

    process.send_signal(number)

    assert process.wait(30) == 130
    assert "Everything that was started has ended" in demo.output
    assert_nothing_left(demo)


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_behind(demo: Demo, eventually: Callable[..., object]) -> None:
    process = demo.start("--rows", "20000")
    eventually(lambda: "rows are being claimed" in demo.output, timeout=45)

    process.kill()
    process.wait()

    eventually(lambda: not demo.left_running(), timeout=15)


# ---- bad input ------------------------------------------------------------------------------------------------


def test_a_table_that_is_not_the_demos_is_refused_and_not_touched(tmp_path: Path, demo: Demo) -> None:
    database = f"sqlite:///{tmp_path / 'theirs.sqlite'}"
    with connect(database).begin() as connection:
        connection.execute(text(f"CREATE TABLE {File.__tablename__} (id INTEGER PRIMARY KEY, theirs TEXT)"))
        connection.execute(text(f"INSERT INTO {File.__tablename__} VALUES (1, 'precious')"))

    code = demo.run("--database", database)

    assert code == 1
    assert f"table {File.__tablename__} exists and is not the demo's" in demo.output
    with connect(database).begin() as connection:
        assert connection.scalar(text(f"SELECT theirs FROM {File.__tablename__}")) == "precious"


def test_a_demo_that_is_at_work_on_the_same_database_is_not_disturbed(tmp_path: Path, demo: Demo) -> None:
    database = f"sqlite:///{tmp_path / 'busy.sqlite'}"
    with connect(database).begin() as connection:
        Base.metadata.create_all(connection)
        connection.execute(insert(File).values(path="/x", status=int(Status.PROCESSING)))

    code = demo.run("--database", database)

    assert code == 1
    assert "another demo is at work" in demo.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--database", "mysql+pymysql://root:pa55word@127.0.0.1:1/x"], "does not answer"),
        (["--broker", "redis://:pa55word@127.0.0.1:1/0"], "does not answer"),
        (["--broker", "carrier-pigeon://user:pa55word@host/"], "cannot be used"),
        (["--database", "pa55word"], "not a SQLAlchemy URL"),
        (["--database", "sqlite://"], "must be a SQLite file"),
    ],
)
def test_an_address_that_does_not_work_is_named_without_its_password(
    arguments: list[str], message: str, demo: Demo
) -> None:
    code = demo.run(*arguments)

    assert code == 1
    assert message in demo.output
    assert "pa55word" not in demo.output
    assert "Traceback" not in demo.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-redis", "--broker", "redis://localhost"], "exclude each other"),
        (["--workers", "1"], "nobody is left after the kill"),
        (["--rows", "20"], "over before a worker can be killed"),
        (["--consumers", "0"], "--consumers"),
    ],
)
def test_options_that_cannot_work_together_are_refused(arguments: list[str], message: str, demo: Demo) -> None:
    assert demo.run(*arguments) == 2
    assert message in demo.output


# ---- the proof ------------------------------------------------------------------------------------------------


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Engine]:
    """Three files, handled once each as they should be."""
    engine = connect(f"sqlite:///{tmp_path / 'proof.sqlite'}")
    Base.metadata.create_all(engine)
    path = tmp_path / "two lines"
    path.write_text("one\ntwo\n")
    with engine.begin() as connection:
        for _ in range(3):
            connection.execute(insert(File).values(path=str(path), status=int(Status.SUCCEEDED)))
        for file_id in (1, 2, 3):
            handle(connection, file_id, *measure(str(path)))
    yield engine
    engine.dispose()


def handle(connection, file_id: int, sha256: str, lines: int) -> None:
    values = {"file_id": file_id, "sha256": sha256, "lines": lines, "worker_id": "demo1@local-c0"}
    connection.execute(insert(Handling).values(values))


def judge(engine: Engine, *, killed: Killed | None = None, kill_wanted: bool = False) -> Proof:
    return prove(engine, killed=killed, kill_wanted=kill_wanted)


def test_the_proof_holds_when_every_row_was_handled_once(tables: Engine) -> None:
    proof = judge(tables)

    assert (proof.rows, proof.once, proof.compared, proof.broken) == (3, 3, 3, [])


def test_a_row_handled_twice_breaks_the_proof_unless_its_lease_ran_out(tables: Engine, tmp_path: Path) -> None:
    with tables.begin() as connection:
        handle(connection, 2, *measure(str(tmp_path / "two lines")))

    assert judge(tables).again_without_cause == (2,)
    assert judge(tables).broken == ["1 rows were handled twice without a cause: id 2"]

    with tables.begin() as connection:
        connection.execute(update(File).where(File.id == 2).values(reclaim_count=1))

    assert judge(tables).again == (2,)
    assert judge(tables).broken == []


def test_a_row_that_no_handler_stored_breaks_the_proof(tables: Engine) -> None:
    with tables.begin() as connection:
        connection.execute(text(f"DELETE FROM {Handling.__tablename__} WHERE file_id = 3"))

    assert judge(tables).broken == ["1 rows were never handled: id 3"]


@pytest.mark.parametrize("wrong", [{"sha256": "0" * 64}, {"lines": 3}])
def test_a_result_that_differs_from_the_file_breaks_the_proof(tables: Engine, wrong: dict[str, object]) -> None:
    with tables.begin() as connection:
        connection.execute(update(Handling).where(Handling.file_id == 1).values(wrong))

    assert judge(tables).broken == ["1 results differ from the files"]


def test_a_row_of_the_killed_worker_that_was_not_given_back_breaks_the_proof(tables: Engine) -> None:
    killed = Killed("demo1@local", 1, 5.0, 1, frozenset({1, 2}))
    with tables.begin() as connection:
        connection.execute(update(File).where(File.id == 1).values(reclaim_count=1))

    assert judge(tables, killed=killed).broken == ["1 rows of the killed worker did not come back: id 2"]


def test_a_kill_that_hit_nobody_breaks_the_proof(tables: Engine) -> None:
    assert "no worker was killed" in judge(tables, kill_wanted=True).broken[0]
