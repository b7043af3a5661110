"""`celery claim check`"""

from __future__ import annotations

from dataclasses import asdict

import click

from celery_claim.bin import FAILED, UNAVAILABLE
from celery_claim.bin.tasks import as_json, print_json, tasks_of
from celery_claim.checking import check_windows
from celery_claim.schedules import window_in


@click.command("check", short_help="What is wrong with tables, server, options and windows.")
@click.argument("task", nargs=-1)
@click.option("--allow-warnings", is_flag=True, help="Exit 0 when there are warnings but no errors.")
@as_json
@click.pass_context
def check_command(ctx: click.Context, task: tuple[str, ...], allow_warnings: bool, as_json: bool) -> None:
    """Say what is wrong with tables, indexes, server, options and windows, and what mends it.

    Exits 0 when nothing is, 69 when a database cannot be asked, else 1. Workers do the same when they start: with an
    error they do not.
    """
    app = ctx.obj.app
    app.loader.import_default_modules()
    windows = any(window_in(entry) for entry in dict(app.conf.beat_schedule or {}).values())
    found = [(each.name, finding) for each in tasks_of(ctx, task, needed=not windows) for finding in each.check()]
    if not task:
        found += [("windows", finding) for finding in check_windows(app, deployed=True)]
    if as_json:
        print_json([{"task": name, **asdict(finding)} for name, finding in found])
    elif not found:
        click.echo("All is well.")
    else:
        for name, finding in found:
            click.secho(f"{finding.level}: ", fg="red" if finding.level == "error" else "yellow", bold=True, nl=False)
            where = finding.table if name == "windows" else f"table {finding.table}"
            click.echo(f"{name}: {where}: {finding.message} [{finding.code}]")
            if finding.remedy:
                click.echo(f"    {finding.remedy}")
    if any(finding.code in ("database-down", "access-denied") for _, finding in found):
        ctx.exit(UNAVAILABLE)
    if any(finding.level == "error" or not allow_warnings for _, finding in found):
        ctx.exit(FAILED)
