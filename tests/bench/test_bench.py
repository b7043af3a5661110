"""The benchmarks run, and their arithmetic is right; the figures themselves are judged by people."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.chaos import Report, Run, Storm
from tests.bench.measurement import CORE, RAW, RAW_OFFSETS, Case, Ledger, Measurement, read
from tests.bench.report import Figures, bars, page

TOP = Path(__file__).resolve().parents[2]

ONE = Case("loop", "mariadb", RAW, 20, "row")
CONDITIONS = {
    "date": "2026-01-01",
    "python": "3.11",
    "system": "Linux",
    "servers": {"mariadb": "10.11"},
    "packages": {},
    "peers": {},
}


def measured(case: Case, *rates: float) -> list[Measurement]:
    return [Measurement(case, round_, {"rows_per_second": rate, "cpu_us": 1.0}) for round_, rate in enumerate(rates)]


def bench(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments], cwd=TOP, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_ratio_compares_figures_of_the_same_round_only() -> None:
    figures = Figures.of([*measured(ONE, 100, 1000, 10), *measured(ONE.like(CORE), 90, 800, 9.5)])

    ratio = figures.ratio(ONE.like(CORE), ONE)

    assert ratio is not None
    assert (ratio.least, ratio.median, ratio.most) == (0.8, 0.9, 0.95)


def test_a_promise_is_judged_by_the_median_round() -> None:
    slow = Figures.of([*measured(ONE, 100, 100, 100), *measured(ONE.like(CORE), 84, 84, 200)])
    fast = Figures.of([*measured(ONE, 100, 100, 100), *measured(ONE.like(CORE), 86, 86, 10)])

    assert [bar.met for bar in bars(slow)] == [False]
    assert [bar.met for bar in bars(fast)] == [True]


def test_several_consumers_are_compared_with_the_bare_loop_that_uses_offsets() -> None:
    eight = Case("loop", "mariadb", RAW, 20, "row", 8)
    found = [
        *measured(eight, 10),
        *measured(eight.like(RAW_OFFSETS), 100),
        *measured(eight.like(CORE), 91),
    ]

    (bar,) = bars(Figures.of(found))

    assert (bar.ratio.median, bar.limit, bar.met) == (0.91, 0.9, True)


def test_what_a_run_has_kept_is_read_back_for_the_page(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "figures.jsonl", CONDITIONS)
    for one in measured(ONE, 12_345):
        ledger.add(one)

    conditions, found = read(ledger.path)

    assert conditions == CONDITIONS
    assert found == measured(ONE, 12_345)
    assert "| 20 | row | 1 | raw loop | 12,345 (12,345 – 12,345) |" in page(conditions, Figures.of(found))


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_quick_run_measures_every_kind_of_case_and_writes_the_page(tmp_path: Path) -> None:
    out = bench("rows", "--quick", "--json", str(tmp_path / "figures.jsonl"), "--page", str(tmp_path / "page.md"))

    written = (tmp_path / "page.md").read_text()
    assert "promises met" in out
    for heading in ("What is promised", "Claim loop on MariaDB", "Claim loop on PostgreSQL", "Depth"):
        assert f"## {heading}" in written


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_peer_in_an_environment_of_its_own_drains_what_it_was_given(tmp_path: Path) -> None:
    bench("rows", "--quick", "--part", "peers", "--peer", "procrastinate", "--json", str(tmp_path / "figures.jsonl"))

    _, found = read(tmp_path / "figures.jsonl")
    handled = {one.case.consumers: one.facts["handled"] for one in found if one.case.what == "procrastinate"}
    assert handled == {1: 400, 2: 400}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.servers
def test_the_quick_run_of_the_broker_compares_it_with_redis_and_writes_the_page(tmp_path: Path) -> None:
    said = bench(
        "streams", "--quick", "--part", "drain", "--part", "publish", "--json", f"{tmp_path}/figures",
        "--page", f"{tmp_path}/page.md",
    )  # fmt: skip

    assert "drain, solo" in said
    assert "| publish, bulk | " in (tmp_path / "page.md").read_text()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.servers
def test_chaos_loses_nothing_and_explains_what_it_repeats(tmp_path: Path) -> None:
    said = bench("chaos", "--rounds", "5", "--tasks", "300", "--json", f"{tmp_path}/report")

    assert "lost: 0" in said
    assert json.loads((tmp_path / "report").read_text())["passed"]


def test_a_repetition_without_a_cause_fails_the_report(tmp_path: Path) -> None:
    storm = Storm(tmp_path, Report(tasks=1, rounds=1, seed=1))
    storm.killed = {"killed": 10.0}
    storm.cuts = [5.0]
    again = Run("other", 12.0, 12.1)

    assert storm._cause(1, Run("killed", 9.0, None), again, False) == "it ran when its worker was killed"
    assert "acknowledgement was not sent yet" in str(storm._cause(1, Run("killed", 9.0, 9.9), again, False))
    assert "while its worker reconnected" in str(storm._cause(1, Run("killed", 5.1, 5.2), again, False))
    assert storm._cause(1, Run("killed", 1.0, 1.1), again, False) is None
    assert storm._cause(1, Run("alive", 9.0, 9.1), again, False) is None
    assert storm._cause(1, Run("killed", 11.0, 11.1), again, False) is None
