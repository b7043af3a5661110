"""`celery claim log|prune`: the history of runs."""

from __future__ import annotations

import re
from typing import Any

import click

from celery_claim.bin.tasks import as_json, dispatcher_of, instant, print_json, print_table, window_name
from celery_claim.windows.history import FAILED_STATES

RUN_COLUMNS = ("id", "window", "fire", "kind", "node", "consumer", "state", "began", "ran", "rows", "failed", "error")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Span(click.ParamType):  # type: ignore[type-arg]
    """Seconds, or a number with s, m, h or d."""

    name = "SPAN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value))
        if match is None:
            self.fail(f"{value!r} is no length of time; write for example 90, 15m, 2h or 7d", param, ctx)
        return float(match[1]) * _UNITS[match[2] or "s"]


@click.command("log", short_help="What windows did.")
@click.argument("name", required=False)
@click.option("--failed", is_flag=True, help="Only what went wrong or did not happen: error, skipped, missed, lost.")
@click.option("--since", type=Span(), help="Only the last so many seconds; also 15m, 2h, 7d.")
@click.option("--node", help="Only runs on this node.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many runs.")
@as_json
@click.pass_context
def log_command(
    ctx: click.Context, name: str | None, failed: bool, since: float | None, node: str | None, limit: int, as_json: bool
) -> None:
    """List runs, newest first. Needs only the database."""
    dispatcher = dispatcher_of(ctx)
    runs = dispatcher.history(
        window=None if name is None else window_name(dispatcher, name),
        states=FAILED_STATES if failed else None,
        since_seconds=since,
        node=node,
        limit=limit,
    )
    print_json(runs) if as_json else print_table("Runs", RUN_COLUMNS, [run_line(run) for run in runs])


@click.command("prune", short_help="Delete old runs, or a window that code no longer declares.")
@click.option("--older-than", type=Span(), help="Seconds, 15m, 2h, 7d; claim_history_retention by default.")
@click.option("--window", "name", help="Take this window out of the table instead; its history stays.")
@as_json
@click.pass_context
def prune_command(ctx: click.Context, older_than: float | None, name: str | None, as_json: bool) -> None:
    """Delete old runs from the history, in small batches. Workers do it by themselves; needs only the database."""
    dispatcher = dispatcher_of(ctx)
    if name is not None:
        if name in dispatcher.declared():
            raise click.UsageError(
                f"window {name!r} is declared in beat_schedule: it would come back; pause it instead"
            )
        if not dispatcher.forget(name):
            raise click.UsageError(f"no window {name!r} stands in the table")
        print_json({"window": name, "forgotten": True}) if as_json else click.echo(f"{name}: forgotten")
        return
    deleted = 0
    with dispatcher.database.linked() as link:
        while True:
            batch = dispatcher.prune(link, older_than_seconds=older_than, batches=10)
            deleted += batch
            if not batch:
                break
    print_json({"deleted": deleted}) if as_json else click.echo(f"{deleted} runs deleted")


def run_line(run: dict[str, Any]) -> list[Any]:
    """A run as a line of a listing."""
    began = run["started_at"] or run["created_at"]
    ended = run["finished_at"]
    ran = "" if not (run["started_at"] and ended) else f"{(ended - run['started_at']) / 1000:.2f} s"
    return [
        run["id"],
        run["window"],
        run["fire_seq"],
        run["kind"],
        run["node"],
        run["consumer_id"],
        run["state"],
        instant(began),
        ran,
        run["claimed"],
        run["failed"] or "",
        run["error"],
    ]
