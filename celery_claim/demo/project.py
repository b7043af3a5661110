"""The demo's Celery project, run by real `celery worker` and `celery beat` processes."""

from __future__ import annotations

from functools import cache

from celery import Celery
from sqlalchemy import Engine, insert

from celery_claim import ClaimTask, window
from celery_claim.demo.measure import measure
from celery_claim.demo.plan import TABLE_PREFIX, WINDOW, Plan
from celery_claim.demo.tables import File, Handling, connect

plan = Plan.from_environment()

app = Celery("celery_claim_demo", broker=plan.broker)
app.conf.claim_database_url = plan.database
app.conf.claim_table_prefix = TABLE_PREFIX
app.conf.claim_maintenance_interval = 1.0
# The numbers of the killed worker's consumers are free again while one watches.
app.conf.claim_node_heartbeat = 1.0
app.conf.claim_node_timeout = 4.0
app.conf.task_default_queue = plan.queue
app.conf.broker_transport_options = plan.transport_options
app.conf.broker_connection_retry_on_startup = True
# Nothing asks these workers anything, and a broker without a server has no broadcasts.
app.conf.worker_enable_remote_control = False


@cache
def results() -> Engine:
    """The handler's own engine, one per process: it is first asked for in the process that handles rows."""
    # One INSERT is a transaction of its own. In an open one, SQLite's only write lock would be held while Python works.
    return connect(plan.database).execution_options(isolation_level="AUTOCOMMIT")


@app.task(
    base=ClaimTask,
    model=File,
    batch_size=plan.batch_size,
    lease_seconds=plan.lease_seconds,
)
def hash_file(row: File) -> None:
    """Hash one file, count its lines, store both."""
    sha256, lines = measure(row.path)
    handled = {
        "file_id": row.id,
        "sha256": sha256,
        "lines": lines,
        "worker_id": row.worker_id,
    }
    with results().connect() as connection:
        connection.execute(insert(Handling), handled)


app.conf.beat_schedule = {
    WINDOW: window(
        hash_file,
        frequency=plan.frequency,
        max_run_time=plan.frequency / 2,
        concurrency=plan.consumers,
        # Wherever a worker has a free process: both are to be seen at work.
        run_type="any",
    ),
}
