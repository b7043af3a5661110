"""Which tasks or windows a command is about, and how its answer is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import click

from celery_claim.app import claim_tasks, state_of
from celery_claim.dispatch import Dispatcher
from celery_claim.exceptions import did_you_mean
from celery_claim.tasks import ClaimTask

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def tasks_of(ctx: click.Context, names: Sequence[str] = (), *, needed: bool = True) -> list[ClaimTask]:
    """The app's ClaimTasks, or those named; the last part of a name is enough where it is unique.

    `needed`: an app that has none is the wrong one. A program may know its windows by the names of their tasks alone.
    """
    app = ctx.obj.app
    app.loader.import_default_modules()
    known = {str(task.name): task for task in claim_tasks(app)}
    if not known and (needed or names):
        raise click.UsageError(
            "the app has no ClaimTask with a database; is it the right one (celery -A proj claim ...), are its modules "
            "imported, and is claim_database_url set?"
        )
    if not names:
        return list(known.values())
    return [_named(name, known) for name in names]


def _named(name: str, known: Mapping[str, ClaimTask]) -> ClaimTask:
    matching = [task for full, task in known.items() if full == name or full.rpartition(".")[2] == name]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise click.UsageError(f"more than one task is called {name!r}: {', '.join(str(t.name) for t in matching)}")
    raise click.UsageError(f"no ClaimTask is called {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")


def dispatcher_of(ctx: click.Context) -> Dispatcher:
    """The windows of the app."""
    app = ctx.obj.app
    app.loader.import_default_modules()
    app.finalize()
    if state_of(app).settings.database_url is None:
        raise click.UsageError(
            "claim_database_url is not set, and windows are kept there; is it the right app (celery -A proj claim ...)?"
        )
    return Dispatcher.of(app)


def window_name(dispatcher: Dispatcher, name: str) -> str:
    """The name, if a window is called so. Raises UsageError with the closest one that is."""
    known = dispatcher.declared().keys() | dispatcher.look().windows.keys()
    if name not in known:
        listed = f" Known: {', '.join(sorted(known))}" if known else " beat_schedule declares none"
        raise click.UsageError(f"no window is called {name!r}.{did_you_mean(name, known)}{listed}")
    return name


def instant(milliseconds: int | None) -> str:
    """A time by the database's clock, in UTC."""
    if milliseconds is None:
        return ""
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def keys_of(task: ClaimTask, written: Iterable[str]) -> list[Any]:
    """Keys as the table's key column holds them, from what was typed."""
    from celery_claim.claims.sql.catalogue import key_reader

    read: Callable[[str], Any] = key_reader(task.claims.table)
    keys = []
    for text in written:
        try:
            keys.append(read(text))
        except ValueError:
            key = task.claims.table.key
            raise click.UsageError(
                f"{text!r} is no key of {task.claims.table.name}: {key.name} is {key.type}"
            ) from None
    return keys


def print_json(answer: Any) -> None:
    """Numbers are exact however large they are; other keys are shown as text."""
    click.echo(json.dumps(answer, indent=2, default=_shown))


def _shown(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table that fits the terminal; a wide one when the output is no terminal, for grep."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(title, style="bold", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else _shown(cell)) for cell in row))
    console.print(table)
