"""watch: the live view, or plain lines where the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from celery_claim import Status
from celery_claim.demo.look import Snapshot
from celery_claim.demo.run import Process

#: Seconds between two progress lines where the output is a file or a pipe.
PLAIN_INTERVAL = 2.0
SHOWN = (
    Status.PENDING,
    Status.PROCESSING,
    Status.SUCCEEDED,
    Status.RETRYING,
    Status.FAILED,
)


class Watch:
    """Shows snapshots as they come, and keeps what happened."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._began = time.monotonic()
        self._events: list[tuple[float, str]] = []
        self._workers: Sequence[Process] = ()
        self._snapshot = Snapshot()
        self._last_plain = 0.0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Watch:
        if self._live:
            self._live.start()
        else:
            self._console.print(Text(self._title), soft_wrap=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.update(self.screen(), refresh=True)
            self._live.stop()

    @property
    def seconds(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._began

    def follow(self, workers: Sequence[Process]) -> None:
        """Show these workers from now on."""
        self._workers = workers

    def say(self, text: str) -> None:
        """Something happened."""
        self._events.append((self.seconds, text))
        if self._live:
            self._live.update(self.screen(), refresh=True)
        else:
            self._console.print(_event(self.seconds, text), highlight=False, soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        """The tables look like this now."""
        changed = snapshot != self._snapshot
        self._snapshot = snapshot
        if self._live:
            self._live.update(self.screen(), refresh=True)
        elif changed and self.seconds - self._last_plain >= PLAIN_INTERVAL:
            self._last_plain = self.seconds
            text = f"{snapshot.ended:,} of {snapshot.total:,} rows ended, {snapshot.states[Status.PROCESSING]} held"
            self._console.print(_event(self.seconds, text), highlight=False, soft_wrap=True)

    def screen(self) -> RenderableType:
        """Everything there is to see."""
        parts: list[RenderableType] = [
            Text(self._title, style="bold"),
            Text(),
            self._progress(),
        ]
        parts += [self._states(), Text(), self._worker_table(), Text()]
        parts += [_event(seconds, text) for seconds, text in self._events]
        return Padding(Group(*parts), (1, 2, 0, 2), expand=False)

    def _progress(self) -> RenderableType:
        bar = ProgressBar(total=max(1, self._snapshot.total), completed=self._snapshot.ended, width=50)
        line = Table.grid(padding=(0, 2))
        line.add_row(bar, Text(f"{self._snapshot.ended:,} of {self._snapshot.total:,} rows"))
        return line

    def _states(self) -> RenderableType:
        line = Text()
        for status in SHOWN:
            count = self._snapshot.states[status]
            line.append(f"{status.name.lower()} ", style="dim")
            line.append(f"{count:<7,}", style="red" if status is Status.FAILED and count else "")
        return line

    def _worker_table(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        table.add_column("worker")
        table.add_column("pid")
        table.add_column("")
        table.add_column("holds", justify="right")
        table.add_column("handled", justify="right")
        for worker in self._workers:
            state = _state(worker)
            held, handled = (
                self._snapshot.held[worker.name],
                self._snapshot.handled[worker.name],
            )
            table.add_row(worker.name, str(worker.pid), state, f"{held:,}", f"{handled:,}")
        return table


def _state(worker: Process) -> Text:
    if worker.killed:
        return Text("killed", style="bold red")
    return Text("at work", style="green") if worker.alive else Text("stopped", style="dim")


def _event(seconds: float, text: str) -> Text:
    return Text.assemble((f"{seconds:5.1f} s  ", "dim"), text)
