"""Pages of the documentation as programs: what their code blocks are, and a folder in which they are run.

A block is run in the order of the page, in one folder per page. Its language says how, and a comment in the line above
it, invisible in the page, may say more:

    python                         a program of its own, run with `python`
    <!-- file: proj.py -->         python, sql or ini: put into that file
    <!-- append: proj.py -->       put at the end of that file
    <!-- fragment -->              python that shows a shape: it only has to compile
    console                        `$ ` lines are commands; what follows a command is what it prints, where "..." stands
                                   for anything and blank space counts once
    <!-- until -->                 console: repeat the command until it prints that
    <!-- background -->            console: start it and go on; `<!-- stop: worker -->` in a line of its own ends it
    <!-- skip: reason -->          not run
    sql                            run on the page's database
    text, ini                      only shown
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from tests.servers import die_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
LANGUAGES = {"python", "console", "sql", "text", "ini"}

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>\w+)(?:: (?P<argument>[^\n]*?))? -->\n)?"
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$"
    r"|^<!-- stop: (?P<stop>\w+) -->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    language: str
    code: str
    mark: str = ""
    argument: str = ""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    def commands(self) -> Iterator[tuple[str, str]]:
        """The commands of a console block, each with what it is to print."""
        for part in re.split(r"^\$ ", self.code, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            while command.endswith("\\"):
                more, _, output = output.partition("\n")
                command = f"{command}\n{more}"
            yield command, output


def pages() -> list[Path]:
    """Everything that is written for readers."""
    built = DOCS / "_build"
    return [REPOSITORY / "README.md", *sorted(page for page in DOCS.rglob("*.md") if built not in page.parents)]


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page in their order; directives are none."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["stop"]:
            found.append(Block(page, line, "", "", "stop", match["stop"]))
        elif not match["language"].startswith("{"):
            code = dedent(match["code"])
            found.append(Block(page, line, match["language"], code, match["mark"] or "", match["argument"] or ""))
    return found


class Folder:
    """Where a page is run. `replacing`: what the page says -> what this machine has instead, such as a URL."""

    def __init__(
        self, path: Path, *, replacing: Mapping[str, str] | None = None, sql: Callable[[str], object] | None = None
    ) -> None:
        self.path = path
        self._replacing = dict(replacing or {})
        self._sql = sql
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CELERY", "PYTEST", "COV_"))}
        programs = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
        search_path = os.pathsep.join([str(path), str(REPOSITORY)])
        self._environment = {
            **kept, "PATH": programs, "PYTHONPATH": search_path, "C_FORCE_ROOT": "1", "PYTHONUNBUFFERED": "1"
        }  # fmt: skip

    def run(self, page: Path) -> None:
        """Run every block of a page; AssertionError names the line of the block that does not do what it says."""
        for block in blocks(page):
            self.run_block(block)

    def run_block(self, block: Block) -> None:
        if block.mark in ("skip", "fragment") or block.language in ("text", "ini"):
            return
        if block.mark == "stop":
            self._stop(self._running.pop(block.argument))
        elif block.mark in ("file", "append"):
            with open(self.path / block.argument, "a" if block.mark == "append" else "w") as file:
                file.write(self._here(block.code))
        elif block.language == "python":
            (self.path / "block.py").write_text(self._here(block.code))
            self._command(block, "python block.py")
        elif block.language == "sql":
            assert self._sql is not None, f"{block.where}: no database to run SQL on"
            self._sql(block.code)
        else:
            self._console(block)

    def close(self) -> None:
        for process in self._running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)

    def _console(self, block: Block) -> None:
        for command, expected in block.commands():
            if block.mark == "background":
                self._start(block, command)
            elif block.mark == "until":
                self._until(block, command, expected)
            else:
                printed = self._command(block, command)
                assert _matches(printed, expected), f"{block.where}: {command}\nexpected:\n{expected}\ngot:\n{printed}"

    def _command(self, block: Block, command: str) -> str:
        done = self._shell(command)
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"{block.where}: {command}\nended with {done.returncode}:\n{said}"
        return done.stdout

    def _shell(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", self._here(command)], cwd=self.path, env=self._environment, timeout=60, text=True,
            capture_output=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def _until(self, block: Block, command: str, expected: str) -> None:
        end = time.monotonic() + 45
        while not _matches(printed := self._shell(command).stdout, expected):
            assert time.monotonic() < end, (
                f"{block.where}: {command}\nnever printed:\n{expected}\nlast:\n{printed}\n{self._logs()}"
            )

    def _start(self, block: Block, command: str) -> None:
        (name,) = re.findall(r"\b(worker|beat)\b", command)[:1]
        if name in self._running:
            # The page says that it was killed, or that Ctrl-C was pressed.
            self._stop(self._running.pop(name))
        log = self.path / f"{name}.log"
        with open(log, "wb") as output:
            self._running[name] = subprocess.Popen(
                die_with_parent(["bash", "-c", f"exec env {self._here(command)}"]), cwd=self.path,
                env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        ready = " ready." if name == "worker" and "INFO" in command else ""
        end = time.monotonic() + 30
        while ready not in log.read_text():
            assert self._running[name].poll() is None, f"{block.where}: {command} ended:\n{log.read_text()}"
            assert time.monotonic() < end, f"{block.where}: {command} is not ready:\n{log.read_text()}"
            time.sleep(0.05)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)

    def _logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.path.glob("*.log"))

    def _here(self, text: str) -> str:
        for said, here in self._replacing.items():
            text = text.replace(said, here)
        return text


def _matches(printed: str, expected: str) -> bool:
    """Blank space and the length of lines drawn do not count, "..." stands for anything; nothing expected is met."""
    if not expected.strip():
        return True
    wanted = re.escape(_squeezed(expected)).replace(re.escape("..."), ".*?")
    return re.search(f"{wanted}$", _squeezed(printed)) is not None


def _squeezed(text: str) -> str:
    return " ".join(re.sub("─+", "─", text).split())
