"""`celery claim initdb`"""

from __future__ import annotations

import click

from celery_claim.bin.tasks import as_json, print_json, tasks_of
from celery_claim.exceptions import ClaimError, DatabaseUnavailable


@click.command("initdb", short_help="Make celery_claim's own tables.")
@click.option(
    "--models", is_flag=True, help="Also make the tables of your models that do not exist, with their indexes."
)
@as_json
@click.pass_context
def initdb_command(ctx: click.Context, models: bool, as_json: bool) -> None:
    """Make celery_claim's own tables; harmless when they exist. No existing table is ever changed."""
    from celery_claim.app import state_of
    from celery_claim.claims.sql.create import create_missing
    from celery_claim.dispatch import Dispatcher

    made: list[str] = []
    own = state_of(ctx.obj.app).settings.database_url is not None
    tasks = tasks_of(ctx, needed=not own)
    if own:
        made += Dispatcher.of(ctx.obj.app).create_tables()
    missing = []
    for task in tasks:
        try:
            claims = task.claims
        except DatabaseUnavailable:
            raise
        except ClaimError as error:
            missing.append(str(error))
            continue
        made += create_missing(claims) if models else []
        missing += [f"{task.name}: table {f.table} does not exist" for f in task.check() if f.code == "no-table"]
    if as_json:
        print_json({"made": made, "missing": missing})
        return
    click.echo(f"made: {', '.join(made)}" if made else "nothing to make")
    for each in missing:
        click.echo(f"missing: {each} (initdb --models makes the tables of models)")
