"""Command line of the upstream suites: `python -m tests.suites [SUITE ...]`."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import click

from tests.servers import Redis

from .catalogue import CANVAS, DIFFERENCES, SUITES, UNSTABLE, Suite, pattern_for
from .run import Outcome, files_of, run_file
from .sources import tests_of

STOCK, OURS = "redis", "redis-streams"
#: Processes at a time: they often wait, and each has a server of its own.
AT_ONCE = 3
#: How often a difference that nobody expects is tried alone before it counts; upstream repeats most of these tests
#: five times.
TRIES = 2

Results = dict[str, dict[str, Outcome]]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, type=click.Choice([suite.name for suite in SUITES]))
@click.option("--without", type=click.Choice(["canvas"]), help="Leave out the longest file, a quarter of an hour.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where every outcome goes.")
def main(names: tuple[str, ...], without: str | None, path: Path | None) -> None:
    """Celery's and kombu's own tests on redis-streams:// and on redis://, and how they differ.

    Without SUITE all of them, about twenty minutes. Exits with 1 when a test that passes on redis:// does not pass on
    redis-streams:// and no reason is listed, or when a listed one passes.
    """
    chosen = [suite for suite in SUITES if not names or suite.name in names]
    with tempfile.TemporaryDirectory(prefix="celery_claim-suites-") as folder:
        runner = Runner(Path(folder))
        results = {suite.name: runner.suite(suite, canvas=without is None) for suite in chosen}
        wrong = [line for suite in chosen for line in runner.compare(suite, results[suite.name])]
    if path:
        path.write_text(json.dumps(results, indent=1))
    whole = not names and without is None
    if whole:
        wrong += [f"listed, and no test differs so: {pattern}" for pattern in DIFFERENCES if pattern not in runner.seen]
    for line in wrong:
        click.echo(line)
    counts = ", ".join(_count(name, by_scheme) for name, by_scheme in results.items())
    click.echo(f"{len(wrong)} unexpected differences; passed on redis-streams:// (on redis://): {counts}")
    sys.exit(bool(wrong))


def _count(name: str, by_scheme: Results) -> str:
    good = {scheme: sum(outcome.is_good for outcome in found.values()) for scheme, found in by_scheme.items()}
    return f"{name} {good[OURS]} ({good[STOCK]}) of {len(by_scheme[STOCK])}"


class Runner:
    """Runs suites, each file on each broker at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: dict[str, Path] = {}
        #: Patterns of DIFFERENCES that were seen.
        self.seen: set[str] = set()
        self._number = 0
        self._lock = threading.Lock()

    def suite(self, suite: Suite, *, canvas: bool) -> Results:
        began = time.monotonic()
        source = self.sources[suite.name] = tests_of(suite, self.folder)
        files = files_of(suite, source, canvas=canvas)
        # The longest first, or everybody waits for it in the end.
        files.sort(key=lambda file: (file != CANVAS, not file.endswith("test_tasks.py")))
        results: Results = {STOCK: {}, OURS: {}}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            running = {
                (scheme, file): pool.submit(self._file, suite, scheme, file)
                for file in files
                for scheme in (OURS, STOCK)
            }
            for (scheme, _), future in running.items():
                results[scheme].update(future.result())
        results[OURS] = {test: results[OURS].get(test, Outcome("not run")) for test in results[STOCK]}
        for scheme, found in results.items():
            counts = Counter(outcome.outcome for outcome in found.values())
            shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            click.echo(f"{suite.name} on {scheme}://: {shown}; {time.monotonic() - began:.0f} s")
        return results

    def compare(self, suite: Suite, results: Results) -> Iterator[str]:
        """Show what differs; yields what is not expected."""
        for test, stock in sorted(results[STOCK].items()):
            ours = results[OURS][test]
            if ours.is_good and not stock.is_good and stock.outcome != "skipped":
                click.echo(f"better: {test}")
            if ours.is_good or not stock.is_good:
                continue
            if (pattern := pattern_for(test, DIFFERENCES)) is not None:
                self.seen.add(pattern)
                click.echo(f"differs: {test}: {DIFFERENCES[pattern]}")
            elif (pattern := pattern_for(test, UNSTABLE)) is not None:
                click.echo(f"unstable: {test}: {UNSTABLE[pattern]}")
            elif self._passes_alone(suite, test):
                click.echo(f"failed once: {test}: {ours.reason}")
                results[OURS][test] = Outcome("passed", f"at a second try; first: {ours.reason}")
            else:
                yield f"unexpected: {test}: {ours.outcome} {ours.reason}"

    def _passes_alone(self, suite: Suite, test: str) -> bool:
        file = test.partition("::")[0]
        return any(self._file(suite, OURS, file, only=test).get(test, Outcome("not run")).is_good for _ in range(TRIES))

    def _file(self, suite: Suite, scheme: str, file: str, only: str | None = None) -> dict[str, Outcome]:
        with self._lock:
            self._number += 1
            log = self.folder / f"{self._number}.log"
        with _server() as port:
            return run_file(
                suite, self.sources[suite.name], file, scheme=scheme, port=port, log=log, only=only,
                # What counts is what tests a broker: redis:// tells.
                opened_only=suite.redirect and scheme == STOCK,
            )  # fmt: skip


@contextmanager
def _server() -> Iterator[int]:
    # These suites know no password.
    server = Redis(requirepass="")
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


if __name__ == "__main__":
    main()
