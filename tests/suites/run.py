"""One upstream test file on one broker, in processes of its own and on a server of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.processes import REPOSITORY

from .catalogue import CANVAS, LEFT_OUT, Suite

#: Longest time of a file, in seconds; of the longest of them twice as long.
FILE_SECONDS = 900.0
GOOD = frozenset({"passed", "xfailed", "xpassed"})


class Outcome(NamedTuple):
    """What became of a test, and the first line of why."""

    outcome: str
    reason: str = ""

    @property
    def is_good(self) -> bool:
        return self.outcome in GOOD


def files_of(suite: Suite, folder: Path, *, canvas: bool) -> list[str]:
    """The suite's files, relative to its folder."""
    found = sorted({str(path.relative_to(folder)) for pattern in suite.files for path in folder.glob(pattern)})
    return [name for name in found if name not in LEFT_OUT and (canvas or name != CANVAS)]


def run_file(
    suite: Suite, folder: Path, file: str, *, scheme: str, port: int, log: Path, only: str | None = None,
    opened_only: bool = False,
) -> dict[str, Outcome]:  # fmt: skip
    """Test -> outcome, of all or of those that opened a connection.

    A test that hangs ends its process, and the rest goes on in a new one.
    """
    events = log.with_suffix(".jsonl")
    environment = _environment(suite, f"{scheme}://127.0.0.1:{port}", port, folder, events)
    end = time.monotonic() + FILE_SECONDS * (2 if file == CANVAS else 1)
    known = -1
    while True:
        _pytest(suite, folder, only or file, environment, log, end - time.monotonic())
        found = _outcomes(events, opened_only=opened_only)
        reported = sum(outcome.outcome != "not run" for outcome in found.values())
        if reported == len(found) or reported == known or time.monotonic() >= end:
            return found or ({} if opened_only else {file: Outcome("error", f"no test ran, see {log}")})
        known = reported


def _environment(suite: Suite, broker: str, port: int, folder: Path, events: Path) -> dict[str, str]:
    prefixes = ("PYTHON", "PYTEST", "CELERY", "KOMBU", "REDIS_", "DJANGO", "TEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return {
        **kept,
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",
        # Celery's suite reads these, and so does kombu's.
        "TEST_BROKER": broker,
        "TEST_BACKEND": f"redis://127.0.0.1:{port}",
        "REDIS_HOST": "127.0.0.1",
        "REDIS_PORT": str(port),
        "REDIS_6379_TCP": str(port),
        "WORKER_LOGLEVEL": "INFO",
        # The plugin's own.
        "SUITE_BROKER": broker,
        "SUITE_EVENTS": str(events),
        "SUITE_LONGEST": str(suite.longest),
        "SUITE_REDIRECT": broker if suite.redirect else "",
    }


def _pytest(suite: Suite, folder: Path, target: str, environment: Mapping[str, str], log: Path, seconds: float) -> None:
    command = [
        sys.executable, "-m", "pytest", "-p", "tests.suites.plugin", "-p", "no:cacheprovider", "-p", "no:xdist",
        "--timeout", f"{suite.longest:g}", "-q", "--tb=short", "-o", "python_classes=test_*",
        "-W", "ignore::pytest.PytestUnknownMarkWarning",
        *(["-p", "celery.contrib.pytest"] if suite.distribution == "celery" else []), target,
    ]  # fmt: skip
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_session(process.pid)
            process.wait()


def _end_session(leader: int) -> None:
    """End what the process started and did not end: workers' pools, beat, command lines."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == leader:
                process.send_signal(signal.SIGKILL)


def _outcomes(events: Path, *, opened_only: bool) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    opened: set[str] = set()
    if not events.exists():
        return found
    for line in events.read_text().splitlines():
        event = json.loads(line)
        test = event["test"]
        if event["kind"] == "collected":
            found.setdefault(test, Outcome("not run"))
        elif event["kind"] == "started":
            found[test] = Outcome("error", "its process ended")
        elif event["kind"] == "opened":
            opened.add(test)
        elif event["when"] == "call" or event["outcome"] == "skipped":
            found[test] = Outcome(event["outcome"], event["reason"])
        elif event["outcome"] == "failed":
            found[test] = Outcome("error", event["reason"])
    return {test: outcome for test, outcome in found.items() if test in opened} if opened_only else found
