"""Benchmarks: `./dev bench rows`, or `python -m tests.bench rows`.

    plan (rows.py) -> crew of processes (crew.py) -> raw loop (raw.py) | ClaimTask (claim_task.py) | peer (peers.py)
        -> one JSON line a measurement -> medians of ratios (report.py) -> docs/explanation/benchmarks.md

A rate alone says more about the machine than about the code, so every figure that is judged is a ratio to
something else measured in the same round: the bare loop of statements, or another job queue. The rounds
go through all cases in turn, every second one backwards, so that a slow minute hits all of them.
"""
