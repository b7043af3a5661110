"""Command line of the benchmarks: `python -m tests.bench rows`, `streams`, `chaos`, `report FILE`."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from . import broker
from . import report as reports
from .measurement import read

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "benchmarks.md"
BROKER_PAGE = PAGE.with_name("benchmarks-broker.md")
PARTS = ("loop", "peers", "depth")
DATABASES = ("mariadb", "postgresql")
PEERS = ("procrastinate", "pgqueuer", "django-tasks-db", "django-q2")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure celery_claim against bare statements and other job queues."""


@bench.command()
@click.option("--quick", is_flag=True, help="Few rows, one round, no peers unless named: does it run?")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this part; may be repeated.")
@click.option("--database", "databases", multiple=True, type=click.Choice(DATABASES), help="Only this database.")
@click.option("--peer", "only_peers", multiple=True, type=click.Choice(PEERS), help="Only this peer.")
@click.option("--rounds", type=click.IntRange(1), help="How often every case is measured.  [default: 3; quick: 1]")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where the figures go, one JSON line each.")
@click.option(
    "--page", type=click.Path(path_type=Path), help=f"Write this page.  [default: {PAGE.name}, if all is run]"
)
def rows(
    quick: bool,
    parts: tuple[str, ...],
    databases: tuple[str, ...],
    only_peers: tuple[str, ...],
    rounds: int | None,
    path: Path | None,
    page: Path | None,
) -> None:
    """The claim loop of mode A: about half an hour; needs MariaDB and PostgreSQL (./dev test installs them)."""
    from . import rows as benchmark

    whole = not (quick or parts or databases or only_peers)
    if quick and not only_peers:
        parts = tuple(part for part in parts or PARTS if part != "peers")
    plan = benchmark.Plan(
        parts=list(parts or PARTS),
        databases=list(databases or DATABASES),
        quick=quick,
        only_peers=list(only_peers or PEERS),
    )
    path = path or _new_file("bench", "jsonl")
    benchmark.run(plan, rounds=rounds or (1 if quick else 3), path=path, tell=click.echo)
    click.echo(f"figures: {path}")
    if page or whole:
        _write_page([path], page or PAGE)
    _show([path])


@bench.command()
@click.option("--quick", is_flag=True, help="Few tasks, one round: does it run?")
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(broker.PARTS), help="Only this part; may be repeated."
)
@click.option("--rounds", type=click.IntRange(1), help="How often every case is measured.  [default: 3; quick: 1]")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where the figures go, one JSON line each.")
@click.option(
    "--page", type=click.Path(path_type=Path), help=f"Write this page.  [default: {BROKER_PAGE.name}, if all is run]"
)
def streams(quick: bool, parts: tuple[str, ...], rounds: int | None, path: Path | None, page: Path | None) -> None:
    """The broker redis-streams:// beside redis://: about ten minutes."""
    path = path or _new_file("bench", "jsonl")
    chosen = list(parts or broker.PARTS)
    broker.run(parts=chosen, quick=quick, rounds=rounds or (1 if quick else 3), path=path, tell=click.echo)
    conditions, measurements = read(path)
    figures = reports.Figures.of(measurements)
    click.echo(f"figures: {path}")
    if page or not (quick or parts):
        (page or BROKER_PAGE).write_text(broker.page(conditions, figures))
        click.echo(f"page: {page or BROKER_PAGE}")
    for promise, value, limit in broker.limits(figures):
        click.echo(f"{'met    ' if value <= limit else 'NOT MET'}  <= {limit:<5g} {value:<22.3g}  {promise}")
    _show_bars(broker.bars(figures))


@bench.command()
@click.option("--rounds", type=click.IntRange(1), default=50, show_default=True, help="How many faults.")
@click.option(
    "--tasks", type=click.IntRange(1), default=5000, show_default=True, help="How many tasks are sent meanwhile."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Chooses the faults.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where the report goes.")
def chaos(rounds: int, tasks: int, seed: int, path: Path | None) -> None:
    """Random kills of workers, connections and the server of redis-streams://; about two minutes.

    Exits with 1 when a task was lost, or run again without a cause that the broker documents.
    """
    from . import chaos as storm

    path = path or _new_file("chaos", "json")
    found = storm.run(tasks=tasks, rounds=rounds, seed=seed, path=path, tell=click.echo)
    click.echo(found)
    click.echo(f"report: {path}")
    sys.exit(not found.passed)


@bench.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--page", type=click.Path(path_type=Path), help="The page to write.")
def report(paths: tuple[Path, ...], page: Path | None) -> None:
    """Medians and ratios of runs that were kept with --json: one file, or one for each part."""
    if page:
        _write_page(paths, page)
    _show(paths)


def _new_file(kind: str, suffix: str) -> Path:
    """Where figures go that nobody named a file for."""
    return Path(tempfile.gettempdir()) / f"celery_claim-{kind}-{time.strftime('%Y%m%d-%H%M%S')}.{suffix}"


def _write_page(paths: Sequence[Path], page: Path) -> None:
    conditions, measurements = read(*paths)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(reports.page(conditions, reports.Figures.of(measurements)))
    click.echo(f"page: {page}")


def _show(paths: Sequence[Path]) -> None:
    _show_bars(reports.bars(reports.Figures.of(read(*paths)[1])))


def _show_bars(found: Sequence[reports.Bar]) -> None:
    for bar in found:
        sign = ">=" if bar.at_least else "<="
        click.echo(f"{'met    ' if bar.met else 'NOT MET'}  {sign} {bar.limit:<5g} {bar.ratio!s:<22}  {bar.promise}")
    click.echo(f"{sum(bar.met for bar in found)} of {len(found)} promises met")


if __name__ == "__main__":
    # As an exception, so that servers, consumers and peers are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    bench(prog_name="python -m tests.bench")
