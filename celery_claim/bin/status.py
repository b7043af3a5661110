"""`celery claim status`"""

from __future__ import annotations

from typing import Any

import click

from celery_claim.bin import FAILED, UNAVAILABLE
from celery_claim.bin.tasks import as_json, print_json, print_table, tasks_of
from celery_claim.claims.count import COUNT_LIMIT
from celery_claim.exceptions import ClaimError, DatabaseUnavailable
from celery_claim.tasks import ClaimTask

_COLUMNS = ("pending", "processing", "queued", "retrying", "succeeded", "failed", "cancelled", "stuck")


@click.command("status", short_help="Rows by state, and whether the table works.")
@click.argument("task", nargs=-1)
@as_json
@click.pass_context
def status_command(ctx: click.Context, task: tuple[str, ...], as_json: bool) -> None:
    """Show how many rows of each task's table are in which state, and whether the table can be worked on.

    Needs only the database. Counting stops at 1,000,000. "stuck" rows are in progress under a lease that never ends.
    Exits 1 when a table cannot be worked on, 69 when a database is not available.
    """
    answers = [_status(each) for each in tasks_of(ctx, task)]
    if as_json:
        print_json(answers)
    else:
        header = ("task", *_COLUMNS, "oldest pending", "state")
        print_table("Rows by state", header, [_line(answer) for answer in answers])
        for answer in answers:
            if answer["error"]:
                click.echo(f"{answer['task']}: {answer['error']}", err=True)
    if any(answer["unavailable"] for answer in answers):
        ctx.exit(UNAVAILABLE)
    if any(answer["error"] for answer in answers):
        ctx.exit(FAILED)


def _status(task: ClaimTask) -> dict[str, Any]:
    answer: dict[str, Any] = {"task": task.name, "error": None, "unavailable": False}
    try:
        answer |= {"table": task.claims.table.name, **task.status(), "stuck": task.stuck()}
        with task.claims.linked() as link:
            task.claims.probe(link)
    except ClaimError as error:
        answer |= {"error": str(error), "unavailable": isinstance(error, DatabaseUnavailable)}
    return answer


def _line(answer: dict[str, Any]) -> list[Any]:
    counts = [_capped(answer.get(column)) for column in _COLUMNS]
    state = "error" if answer["error"] else "ok"
    return [answer["task"], *counts, _age(answer.get("oldest_pending_seconds")), state]


def _capped(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count}+" if count >= COUNT_LIMIT else str(count)


def _age(seconds: int | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
