"""`celery -A proj claim ...`: what a person on call looks at and acts with.

Every `celery` command imports this module: it may cost nothing but click.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

#: Exit codes, as in sysexits.h.
FAILED, USAGE, UNAVAILABLE = 1, 64, 69

#: Command -> the module of its group, imported when it is run or listed.
_COMMANDS = {
    "cancel": "rows",
    "check": "check",
    "failed": "rows",
    "initdb": "initdb",
    "recover": "rows",
    "release": "rows",
    "retry": "rows",
    "sql": "sql",
    "status": "status",
}


class WrongUsage(click.UsageError):
    """The command line does not make sense."""

    exit_code = USAGE


class ClaimGroup(click.Group):
    """The commands, each loaded when it is needed, with exit codes that a script can tell apart."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"{__name__}.{_COMMANDS[name]}"), f"{name}_command")
        return command if isinstance(command, click.Command) else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise WrongUsage(error.message, error.ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from celery_claim.exceptions import did_you_mean

        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise WrongUsage(error.message + did_you_mean(args[0], _COMMANDS), error.ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        from celery_claim.exceptions import ClaimError, DatabaseUnavailable

        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise WrongUsage(error.message, error.ctx) from None
        except DatabaseUnavailable as error:
            click.echo(f"Error: the database is not available: {error}", err=True)
            ctx.exit(UNAVAILABLE)
        except ClaimError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(FAILED)


@click.group(cls=ClaimGroup)
def claim() -> None:
    """Look at and act on tables whose rows are the queue."""
