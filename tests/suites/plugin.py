"""A pytest plugin for the upstream suites: notes what happens in a file, and opens `memory://` on another broker.

SUITE_EVENTS     the file; one JSON object per line, so that a process that is killed has told what it did
SUITE_LONGEST    seconds that a test may take, whatever it says itself
SUITE_REDIRECT   a broker URL, for tests that are written for the in-memory transport

A test that times out ends its process: the worker of these suites is a thread, and one that hangs would fail every test
that follows. What has started once is left out when the file is run again.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

_hung = False


def _note(kind: str, test: str, **more: Any) -> None:
    with open(os.environ["SUITE_EVENTS"], "a") as events:
        events.write(json.dumps({"kind": kind, "test": test, **more}) + "\n")


def _started() -> set[str]:
    try:
        with open(os.environ["SUITE_EVENTS"]) as events:
            return {event["test"] for event in map(json.loads, events) if event["kind"] == "started"}
    except FileNotFoundError:
        return set()


def pytest_configure() -> None:
    url = os.environ.get("SUITE_REDIRECT")
    if url:
        _redirect(url)


def _redirect(url: str) -> None:
    from kombu import Connection

    make, establish = Connection.__init__, Connection._establish_connection

    def init(self: Any, hostname: Any = "localhost", *args: Any, **options: Any) -> None:
        by_url = isinstance(hostname, str) and hostname.partition(":")[0] == "memory"
        if by_url or options.get("transport") == "memory":
            options.pop("transport", None)
            hostname = url
        make(self, hostname, *args, **options)
        self.was_redirected = hostname == url

    def note_and_establish(self: Any) -> Any:
        if self.was_redirected:
            _note("opened", os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
        return establish(self)

    Connection.__init__ = init  # type: ignore[method-assign]
    Connection._establish_connection = note_and_establish  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    started = _started()
    done = [item for item in items if item.nodeid in started]
    items[:] = [item for item in items if item.nodeid not in started]
    config.hook.pytest_deselected(items=done)
    longest = float(os.environ["SUITE_LONGEST"])
    for item in items:
        limit = item.get_closest_marker("timeout")
        seconds = limit and (limit.args[0] if limit.args else limit.kwargs.get("timeout"))
        if limit and not (seconds and 0 < float(seconds) <= longest):
            item.add_marker(pytest.mark.timeout(longest), append=False)


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        _note("collected", item.nodeid)


def pytest_runtest_logstart(nodeid: str) -> None:
    _note("started", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _hung
    outcome, reason = report.outcome, _reason(report)
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"  # type: ignore[assignment]
    _hung = _hung or (report.failed and "Timeout" in reason)
    _note("reported", report.nodeid, when=report.when, outcome=outcome, reason=reason)


def _reason(report: pytest.TestReport) -> str:
    """The first line of what went wrong."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr or "").strip().partition("\n")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    result = yield
    if _hung:
        item.session.shouldstop = "a test hung: the others are run by a new process"
    return result
