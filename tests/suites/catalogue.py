"""Which of the upstream tests are run, and in what we differ from redis:// on purpose."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple


class Suite(NamedTuple):
    """Test files of one distribution; globs in its source tree."""

    name: str
    distribution: str
    files: tuple[str, ...]
    #: Whether connections that name the in-memory transport are opened on the broker under test; only tests that did
    #: open one are counted.
    redirect: bool = False
    #: Longest time of a test, in seconds; some of the suites' own limits are longer.
    longest: float = 240.0


SUITES = (
    # kombu's transport-neutral classes, adopted by scheme.py.
    Suite("kombu-scheme", "kombu", ("test_scheme.py",)),
    Suite(
        "kombu-unit",
        "kombu",
        tuple(
            f"t/unit/{name}.py"
            for name in (
                "test_connection", "test_entity", "test_messaging", "test_pidbox", "test_pools", "test_simple",
                "transport/test_base", "transport/test_memory", "transport/virtual/test_base",
            )
        ),
        redirect=True,
        longest=30.0,
    ),
    Suite(
        "celery-unit",
        "celery",
        tuple(
            f"t/unit/{name}.py"
            for name in (
                "app/test_app", "app/test_backends", "app/test_beat", "contrib/test_migrate", "contrib/test_worker",
                "events/test_events", "worker/test_consumer", "worker/test_control", "worker/test_worker",
            )
        ),
        redirect=True,
        longest=30.0,
    ),
    Suite("celery-integration", "celery", ("t/integration/test_*.py",)),
)  # fmt: skip

#: Files that are not run, and why.
LEFT_OUT = {
    "t/integration/test_backend.py": "needs the client library and the service of Azure",
    "t/integration/test_backend_leak_in_fixture_teardown.py": "in-memory broker only, and two minutes long",
}
#: The longest file by far.
CANVAS = "t/integration/test_canvas.py"

_READS_AHEAD = (
    "a test before it left a consumer open, and that one has the message: a consumer is sent what it asked for, as in "
    "AMQP, and does not wait for drain_events()"
)

#: Tests that pass on redis:// and not on ours -> the reason. A pattern that matches no such test is an error.
DIFFERENCES: dict[str, str] = {
    "*::test_retry_on_timeout_keeps_publication_immediate*": (
        "`retry_on_timeout` has no effect on redis-streams://: no publish is repeated by itself, so a batch stays one"
    ),
    "*test_pidbox.py::test_Mailbox::test_abcast": _READS_AHEAD,
    "*test_pidbox.py::test_Mailbox::test_call": _READS_AHEAD,
    "*test_pidbox.py::test_Mailbox::test_cast": _READS_AHEAD,
    "*test_pidbox.py::test_Mailbox::test_multi_call": _READS_AHEAD,
    "*test_MemoryTransport::test_produce_consume": _READS_AHEAD,
    "*test_MemoryTransport::test_drain_events_unregistered_queue": (
        "it exchanges the `cycle` that kombu's list transports read from, and ours does not have"
    ),
    "t/integration/test_inspect.py::test_Inspect::test_scheduled": (
        "it looks for a task with an ETA in the memory of a worker. The broker holds it until it is due: "
        "`celery claim delayed` lists it"
    ),
    "t/integration/test_connection_recovery.py::*": (
        "skipped: they run for the scheme redis:// alone. tests/streams/test_failover.py lets a network fall silent "
        "under our workers"
    ),
    "*test_worker.py::test_Consumer::*": (
        "these tests must end with the threads that they began with. A channel that consumes has a thread that reads, "
        "until its connection is closed, which they never do"
    ),
}

#: Tests whose outcome changes from run to run on redis:// too -> why. They are shown and decide nothing.
UNSTABLE: dict[str, str] = {
    "*test_replaced_task_nesting_level_0": "sends its task before it sets the variable that a signal handler writes",
    "*test_revoked_by_headers_complex_canvas": "sleeps longer than its own time limit",
}


def pattern_for(test: str, table: dict[str, str]) -> str | None:
    """The pattern by which a table lists a test."""
    return next((pattern for pattern in table if fnmatchcase(test, pattern)), None)
