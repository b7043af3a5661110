"""`celery claim recover|retry|release|cancel|failed`: act on rows by hand."""

from __future__ import annotations

from typing import Any

import click

from celery_claim.bin.tasks import as_json, keys_of, print_json, print_table, tasks_of
from celery_claim.tasks import ClaimTask

_ids = click.option("--id", "ids", multiple=True, metavar="KEY", help="Key of a row; may be given more than once.")


@click.command("recover", short_help="Give back rows whose owner is gone.")
@click.argument("task", nargs=-1)
@click.option(
    "--lease", type=click.IntRange(min=0), help="Judge all rows by this many seconds, not by their own lease."
)
@as_json
@click.pass_context
def recover_command(ctx: click.Context, task: tuple[str, ...], lease: int | None, as_json: bool) -> None:
    """Give rows back whose owner is gone. Every worker does this by itself all the time."""
    _show(as_json, "given back", [(each, each.recover(lease_seconds=lease)) for each in tasks_of(ctx, task)])


@click.command("retry", short_help="Make failed rows claimable again.")
@click.argument("task")
@_ids
@click.option("--all", "everything", is_flag=True, help="All failed rows.")
@click.option("--error", "error_like", metavar="LIKE", help="Failed rows whose error is LIKE this, e.g. '%timeout%'.")
@as_json
@click.pass_context
def retry_command(
    ctx: click.Context, task: str, ids: tuple[str, ...], everything: bool, error_like: str | None, as_json: bool
) -> None:
    """Make failed rows claimable again, with fresh counters."""
    (chosen,) = tasks_of(ctx, [task])
    if sum((bool(ids), everything, error_like is not None)) != 1:
        raise click.UsageError("say which rows: --id KEY ..., --all or --error LIKE (one of them)")
    keys: Any = keys_of(chosen, ids) if ids else "all" if everything else None
    try:
        changed = chosen.retry_failed(keys=keys, error_like=error_like)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _show(as_json, "to be tried again", [(chosen, changed)])


@click.command("release", short_help="Take rows in progress away from their holder.")
@click.argument("task")
@_ids
@as_json
@click.pass_context
def release_command(ctx: click.Context, task: str, ids: tuple[str, ...], as_json: bool) -> None:
    """Take rows in progress away from whoever holds them; the holder's result will be refused."""
    (chosen,) = tasks_of(ctx, [task])
    _show(as_json, "released", [(chosen, chosen.release(_required_keys(chosen, ids)))])


@click.command("cancel", short_help="Take rows out of the queue.")
@click.argument("task")
@_ids
@as_json
@click.pass_context
def cancel_command(ctx: click.Context, task: str, ids: tuple[str, ...], as_json: bool) -> None:
    """Take rows out of the queue that nobody has started."""
    (chosen,) = tasks_of(ctx, [task])
    try:
        changed = chosen.cancel(_required_keys(chosen, ids))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _show(as_json, "cancelled", [(chosen, changed)])


@click.command("failed", short_help="List failed rows with their errors.")
@click.argument("task")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many rows.")
@as_json
@click.pass_context
def failed_command(ctx: click.Context, task: str, limit: int, as_json: bool) -> None:
    """List failed rows with their errors, by key."""
    (chosen,) = tasks_of(ctx, [task])
    failures = chosen.failures(limit)
    if as_json:
        print_json([{"key": key, "error": error} for key, error in failures])
    else:
        print_table(f"Failed rows of {chosen.name}", ("key", "error"), failures)


def _required_keys(task: ClaimTask, ids: tuple[str, ...]) -> list[Any]:
    if not ids:
        raise click.UsageError("say which rows: --id KEY ...")
    return keys_of(task, ids)


def _show(as_json: bool, what: str, changed: list[tuple[ClaimTask, list[Any]]]) -> None:
    if as_json:
        print_json([{"task": task.name, "keys": keys} for task, keys in changed])
        return
    for task, keys in changed:
        some = ", ".join(map(str, keys[:20])) + (" ..." if len(keys) > 20 else "")
        click.echo(f"{task.name}: {len(keys)} rows {what}" + (f": {some}" if keys else ""))
