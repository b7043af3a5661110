"""Which tasks a command is about, and how its answer is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from celery_claim.app import claim_tasks
from celery_claim.exceptions import did_you_mean
from celery_claim.tasks import ClaimTask

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def tasks_of(ctx: click.Context, names: Sequence[str] = ()) -> list[ClaimTask]:
    """The app's ClaimTasks, or those named; the last part of a name is enough where it is unique."""
    app = ctx.obj.app
    app.loader.import_default_modules()
    known = {str(task.name): task for task in claim_tasks(app)}
    if not known:
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
