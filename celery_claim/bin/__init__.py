"""`celery -A proj claim ...`: what a person on call looks at and acts with.

Every `celery` command imports this module: it may cost nothing but click.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

#: Exit codes, as in sysexits.h. 75 (EX_TEMPFAIL): somebody else was faster, or is at it; try later.
FAILED, USAGE, UNAVAILABLE, LOST_RACE = 1, 64, 69, 75

#: Command -> the module of its group, imported when it is run or listed.
_COMMANDS = {
    "cancel": "rows",
    "check": "check",
    "concurrency": "windows",
    "dead": "streams",
    "delayed": "streams",
    "failed": "rows",
    "initdb": "initdb",
    "log": "runs",
    "nodes": "nodes",
    "pause": "windows",
    "prune": "runs",
    "purge": "streams",
    "recover": "rows",
    "release": "rows",
    "resume": "windows",
    "retry": "rows",
    "show": "windows",
    "sql": "sql",
    "status": "status",
    "streams": "streams",
    "trigger": "windows",
    "windows": "windows",
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
            raise WrongUsage(error.format_message(), error.ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from celery_claim.exceptions import did_you_mean

        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise WrongUsage(error.format_message() + did_you_mean(args[0], _COMMANDS), error.ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        from celery_claim.exceptions import BrokerUnavailable, ClaimError, DatabaseUnavailable

        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise WrongUsage(error.format_message(), error.ctx) from None
        except DatabaseUnavailable as error:
            click.echo(f"Error: the database is not available: {error}", err=True)
            ctx.exit(UNAVAILABLE)
        except BrokerUnavailable as error:
            click.echo(f"Error: the broker is not available: {error}", err=True)
            ctx.exit(UNAVAILABLE)
        except ClaimError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(FAILED)


@click.group(cls=ClaimGroup)
def claim() -> None:
    """Look at and act on tables whose rows are the queue, on windows, and on a redis-streams:// broker."""


def add_worker_option(worker: click.Command) -> None:
    """`celery worker --claim-role ROLE`.

    Options that are added when a task is bound to its app come too late: the command line has been read by then.
    """
    if all(each.name != "claim_role" for each in worker.params):
        text = "Role of this node; one of the nodes with the role main is the main node of windows."
        worker.params.append(click.Option(["--claim-role"], metavar="ROLE", help=text))


def _extend_celery() -> None:
    # Celery has imported these when it loads its plugins; other programs that import this module have no use for them.
    if "celery.bin.worker" in sys.modules:
        add_worker_option(sys.modules["celery.bin.worker"].worker)
        autoload = importlib.import_module("celery_claim.autoload")
        autoload.arm_workers()
        autoload.WHEN_TRANSPORT_IS_USED.append(_extend_flower)
    if "celery.worker.control" in sys.modules:
        # `celery inspect` looks up a command's name in its own process, where a lazy app may not be armed yet.
        importlib.import_module("celery_claim.control")


def _extend_flower() -> None:
    # Celery may load our plugin before Flower's; Flower asks for the transport before it asks for the kind of broker.
    if "flower.utils.broker" in sys.modules:
        importlib.import_module("celery_claim.flower").install()


_extend_celery()
