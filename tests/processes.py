"""Real Celery processes for tests: a program from a string, a worker or beat in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, TypeVar

import psutil

from tests.servers import die_with_parent, find_program

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parent.parent
#: What a process of that kind logs once it works.
READY = {"worker": " ready.", "beat": "beat: Starting..."}


def eventually(predicate: Callable[[], T], timeout: float = 10, what: str = "") -> T:
    """The first true value of predicate(); AssertionError with its last value or error after `timeout` seconds."""
    end, last = time.monotonic() + timeout, None
    while True:
        try:
            value = predicate()
            if value:
                return value
            last = value
        except Exception as error:
            last = error
        if time.monotonic() > end:
            raise AssertionError(f"{what or 'the condition'} did not come true in {timeout} s; last: {last!r}")
        time.sleep(0.02)


def shifted_clock(shift: str) -> dict[str, str]:
    """Environment of a Python process whose wall clock is wrong, as in shifted_clock("+10m"); durations stay right."""
    # The command knows where its library lies; the name of that folder differs between machines.
    faketime = find_program("faketime", remedy="apt-get install faketime")
    shown = subprocess.run([faketime, "-m", "-f", shift, "env"], check=True, capture_output=True, text=True).stdout
    preload = dict(line.split("=", 1) for line in shown.splitlines() if line.startswith("LD_PRELOAD="))
    # The second name is that of libfaketime before 0.9.9.
    durations = {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
    return {**preload, **durations, "FAKETIME": shift, "PYTHONPATH": str(REPOSITORY / "tests" / "faketime")}


def is_gone(pid: int) -> bool:
    """True if the process has ended, also while nobody has collected its exit code."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def write_module(folder: Path, source: str, name: str = "proj") -> str:
    """Write a program into the folder; its module name."""
    (folder / f"{name}.py").write_text(dedent(source))
    return name


class CeleryProcess:
    """`python -m celery -A module <command> ...` with a log file, in a process group of its own."""

    def __init__(self, folder: Path, module: str, command: str, *args: str, env: Mapping[str, str] | None = None):
        folder.mkdir(exist_ok=True)
        self.command = command
        self.log_path = folder / f"{command}-{time.monotonic_ns()}.log"
        program = [sys.executable, "-m", "celery", "-A", module, command, *args]
        if not any(arg.startswith(("-l", "--loglevel")) for arg in args):
            program += ["-l", "INFO"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("CELERY", "PYTEST", "COV_"))}
        env = dict(env or {})
        path = os.pathsep.join([str(folder), str(REPOSITORY), env.pop("PYTHONPATH", "")]).rstrip(os.pathsep)
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                die_with_parent(program), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
                env={**clean, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "C_FORCE_ROOT": "1", **env},
                start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def children(self) -> list[int]:
        """The pids of the pool's processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        return []

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, text: str, timeout: float = 30) -> None:
        """Return once the log contains the text; AssertionError with the log's end if it never does."""

        def found() -> bool:
            return text in self.log()

        end = time.monotonic() + timeout
        while not found():
            if not self.running and not found():
                raise AssertionError(f"celery {self.command} ended ({self.process.returncode}):\n{self.log()[-4000:]}")
            if time.monotonic() > end:
                raise AssertionError(f"no {text!r} in {timeout} s:\n{self.log()[-4000:]}")
            time.sleep(0.02)

    def wait_ready(self, timeout: float = 30) -> CeleryProcess:
        self.wait_for_log(READY[self.command], timeout)
        return self

    def kill9(self, *, whole_group: bool = True) -> None:
        """SIGKILL for the process and its pool, or for the main process alone."""
        self.stop_signal(signal.SIGKILL, whole_group=whole_group)
        self.process.wait(10)

    def terminate(self, timeout: float = 30) -> int:
        """SIGTERM (a warm shutdown of a worker); its exit code."""
        self.process.terminate()
        return self.process.wait(timeout)

    def stop_signal(self, number: int, *, whole_group: bool = True) -> None:
        """Send any signal (SIGSTOP, SIGCONT, ...) to the process and its pool, or to the main process alone."""
        with contextlib.suppress(ProcessLookupError):
            if whole_group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def close(self) -> None:
        """End whatever is left of it; harmless when nothing is."""
        self.stop_signal(signal.SIGKILL)
        self.process.wait(10)


class CeleryProcesses:
    """Starts Celery processes for one test and ends all of them with it.

    processes.worker(SOURCE, "-c", "2", env={"URL": database.url})
    processes.beat("proj", "-S", "claim")        # a module that was written before
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[CeleryProcess] = []

    def start(
        self, command: str, app_module: str, *args: str, env: Mapping[str, str] | None = None,
        name: str = "proj", ready: bool = True, timeout: float = 30,
    ) -> CeleryProcess:  # fmt: skip
        """Start one; `app_module` is a module's name, or (with a line break) its source, written as `name`."""
        module = write_module(self.folder, app_module, name) if "\n" in app_module else app_module
        process = CeleryProcess(self.folder, module, command, *args, env=env)
        self._started.append(process)
        return process.wait_ready(timeout) if ready else process

    def worker(self, app_module: str, *args: str, **options: Any) -> CeleryProcess:
        return self.start("worker", app_module, *args, **options)

    def beat(self, app_module: str, *args: str, **options: Any) -> CeleryProcess:
        return self.start("beat", app_module, *args, **options)

    def close(self) -> None:
        for process in self._started:
            process.close()
