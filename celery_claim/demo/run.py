"""run: the worker and beat processes, and the end of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import celery_claim
from celery_claim.demo.plan import Plan

PROJECT = "celery_claim.demo.project"


class DemoError(Exception):
    """The demo cannot run or cannot go on; the text says why and what to do."""


class Process:
    """A program in a process group of its own, so that Ctrl-C reaches the demo alone and a kill reaches all of it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ):
        self.name = name
        self.log = log
        self.killed = False
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                _die_with_us(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def freeze(self) -> None:
        """Stop it where it stands (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on after a freeze."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9 the program and its children, and wait until they are gone."""
        self.killed = True
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def ask_to_stop(self) -> None:
        """SIGTERM to the program itself: a Celery worker then ends its children in good order."""
        if self.alive:
            self._popen.terminate()

    def stop(self, *, timeout: float) -> None:
        """Ask, wait up to timeout seconds, then kill."""
        self.ask_to_stop()
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def last_lines(self, count: int) -> str:
        """The end of what the program printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._popen.pid, number)
        except ProcessLookupError:
            pass  # it ended by itself, and so did all of its children


class Fleet:
    """The workers and the beat of one run."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self.workers: list[Process] = []
        self.beat: Process | None = None

    def start(self) -> None:
        """Start all of them; they need a second or two until the first window opens."""
        # Room for the consumers that come on top half way.
        processes = -(-2 * self._plan.consumers // self._plan.workers)
        for number in range(1, self._plan.workers + 1):
            # The name is the node part of worker_id, by which the demo finds the rows that a worker holds.
            name = f"demo{number}@local"
            arguments = [
                "worker",
                "-n",
                name,
                "-P",
                "prefork",
                "-c",
                str(processes),
                "-l",
                "INFO",
            ]
            self.workers.append(self._celery(name, [*arguments, "--without-gossip", "--without-mingle"]))
        self.beat = self._celery("beat", ["beat", "-S", "claim", "--pidfile=", "-l", "INFO"])

    def check(self) -> None:
        """Raises DemoError when a process ended that should be running."""
        for process in self._processes():
            if not process.killed and not process.alive:
                raise DemoError(f"{process.name} ended by itself; the end of its log:\n{process.last_lines(15)}")

    def stop(self, *, timeout: float = 10) -> None:
        """End every process, all at the same time; whatever is left after timeout seconds is killed."""
        for process in self._processes():
            process.ask_to_stop()
        deadline = time.monotonic() + timeout
        for process in self._processes():
            process.stop(timeout=max(0.0, deadline - time.monotonic()))

    def _processes(self) -> list[Process]:
        return [*self.workers, *([self.beat] if self.beat else [])]

    def _celery(self, name: str, arguments: Sequence[str]) -> Process:
        package_parent = str(Path(celery_claim.__file__).parent.parent)
        search_path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
        # A killed worker leaves its temporary folders behind: let them lie where this run removes everything.
        temporary = {"TMPDIR": str(self._folder)}
        environment = {**self._plan.to_environment(), **temporary, "PYTHONPATH": search_path}
        command = [sys.executable, "-m", "celery", "-A", PROJECT, *arguments]
        return Process(name, command, self._folder / f"{name}.log", environment)


def _die_with_us(command: Sequence[str]) -> list[str]:
    """The command, killed by the kernel should the demo itself be killed: nobody else would ever stop it."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig=KILL", "--", *command] if setpriv else list(command)
