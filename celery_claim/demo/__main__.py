"""``python -m celery_claim.demo``: see a table consumed by real workers, one of them killed, and the proof."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console

from celery_claim.demo.play import Options, play
from celery_claim.demo.run import DemoError

#: A run with fewer rows is over before a worker can be hit.
FEWEST_ROWS_FOR_A_KILL = 500
#: The exit code of a program ended by Ctrl-C, as shells have it: 128 + SIGINT.
INTERRUPTED = 130


@click.command()
@click.option(
    "--database",
    metavar="URL",
    help="SQLAlchemy URL; by default a SQLite file that goes away again.",
)
@click.option(
    "--broker",
    metavar="URL",
    help="Celery broker URL; by default a Valkey server of the demo's own.",
)
@click.option(
    "--no-redis",
    is_flag=True,
    help="Use a broker that needs no server: messages are files in a folder.",
)
@click.option("--rows", type=click.IntRange(min=1), help="How many rows; by default one per file.")
@click.option(
    "--kill/--no-kill",
    default=True,
    show_default=True,
    help="Kill a worker with -9 half way.",
)
@click.option(
    "--consumers",
    type=click.IntRange(1, 32),
    default=4,
    show_default=True,
    help="Consumers per window.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 16),
    default=2,
    show_default=True,
    help="Celery workers.",
)
@click.option("--keep", is_flag=True, help="Keep the tables, and the folder with the logs.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the last screen as SVG.",
)
def main(no_redis: bool, **chosen: Any) -> None:
    """Hash every file of Python's standard library, as rows of a table that real Celery workers claim.

    One worker is killed half way. At the end, every row is counted and every hash is compared with the file. The
    exit code is 0 only if each row was handled, and none twice without a cause.
    """
    options = Options(redis=not no_redis, **chosen)
    _check(options)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    console = Console()
    try:
        proof = play(options, console)
    except DemoError as error:
        Console(stderr=True).print(
            f"The demo cannot go on: {error}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("Stopped. Everything that was started has ended.")
        sys.exit(INTERRUPTED)
    sys.exit(1 if proof.broken else 0)


def _check(options: Options) -> None:
    if options.broker and not options.redis:
        raise click.UsageError("--broker and --no-redis exclude each other")
    if options.kill and options.workers < 2:
        raise click.UsageError("with one worker nobody is left after the kill: add --no-kill or --workers 2")
    if options.kill and options.rows is not None and options.rows < FEWEST_ROWS_FOR_A_KILL:
        raise click.UsageError(
            f"fewer than {FEWEST_ROWS_FOR_A_KILL} rows are over before a worker can be killed: add --no-kill"
        )


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main(prog_name="python -m celery_claim.demo")
