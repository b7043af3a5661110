"""`celery claim sql`"""

from __future__ import annotations

import click

from celery_claim.bin.tasks import as_json, print_json, tasks_of
from celery_claim.dialects.dialect import Plan
from celery_claim.tasks import ClaimTask


@click.command("sql", short_help="The statements of a task, and their plans.")
@click.argument("task")
@as_json
@click.pass_context
def sql_command(ctx: click.Context, task: str, as_json: bool) -> None:
    """Print the statements that claims of a task are made of, and how the live server would run them."""
    (chosen,) = tasks_of(ctx, [task])
    plans = _plans(chosen)
    statements = {name: {"sql": text, "plan": plans.get(name)} for name, text in chosen.claims.rendered().items()}
    if as_json:
        print_json(statements)
        return
    for name, statement in statements.items():
        click.secho(f"-- {name}", bold=True)
        click.echo(f"{statement['sql']};")
        click.echo(f"-- plan: {statement['plan'] or 'not told by the server'}\n")


def _plans(task: ClaimTask) -> dict[str, str]:
    claims = task.claims
    plans = {}
    with claims.linked() as link:
        for name, statement in claims.explainable().items():
            plan = claims.database.dialect.plan(link.ask, statement)
            if plan is not None:
                plans[name] = _in_words(plan)
    return plans


def _in_words(plan: Plan) -> str:
    walk = f"index {plan.index}" if plan.index else "whole table"
    return f"{walk}, sorts" if plan.sorts else walk
