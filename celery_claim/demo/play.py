"""The whole story: serve -> load -> run -> watch (kill half way) -> prove."""

from __future__ import annotations

import io
import re
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from sqlalchemy import Engine, make_url
from sqlalchemy.exc import ArgumentError

from celery_claim.demo import load
from celery_claim.demo.kill import Killed, kill_holder
from celery_claim.demo.look import Snapshot, look, open_rows
from celery_claim.demo.plan import TABLE_PREFIX, Plan
from celery_claim.demo.report import Pace, Proof, prove, report
from celery_claim.demo.run import DemoError, Fleet
from celery_claim.demo.serve import (
    check_broker,
    clean_broker,
    file_broker,
    private_keys,
    private_valkey,
)
from celery_claim.demo.steer import Steering
from celery_claim.demo.tables import File, connect
from celery_claim.demo.watch import Watch

#: Seconds between two looks at the tables; never more than a tenth of the time is spent looking.
INTERVAL = 0.1
#: Without any change in the tables for so many seconds, something is wrong and the demo says so.
STALL = 45.0


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    database: str | None = None
    broker: str | None = None
    redis: bool = True
    rows: int | None = None
    kill: bool = True
    consumers: int = 4
    workers: int = 2
    keep: bool = False
    picture: Path | None = None


def play(options: Options, console: Console) -> Proof:
    """Run the demo and return its proof, leaving nothing behind unless asked to keep it."""
    with ExitStack() as stack:
        try:
            return _play(options, console, stack)
        except KeyboardInterrupt:
            # A second Ctrl-C would leave workers, tables and a server behind; ending them takes a few seconds at most.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            console.print("Stopping workers, beat and servers ...")
            raise


def _play(options: Options, console: Console, stack: ExitStack) -> Proof:
    folder = stack.enter_context(_folder(options, console))
    plan, servers = _serve(options, folder, stack)
    engine = connect(plan.database)
    stack.callback(engine.dispose)
    load.check_database(engine)
    check_broker(plan.broker)
    if options.broker:
        stack.callback(clean_broker, plan.broker, plan.queue)

    with Watch(console, f"celery_claim demo: {servers}") as watch:
        stack.enter_context(_tables(engine, options, watch))
        rows = load.insert_rows(engine, limit=options.rows)
        watch.say(f"{rows:,} rows are waiting, files of the standard library of {load.python()}")
        fleet = Fleet(plan, folder)
        stack.callback(fleet.stop)
        fleet.start()
        watch.follow(fleet.workers)
        watch.say(f"{plan.workers} workers and a beat are starting, {plan.consumers} consumers per window")
        killed, pace = _work(engine, plan, fleet, watch, kill=options.kill)
        fleet.stop()
        watch.say("workers and beat have stopped")
    proof = prove(engine, killed=killed, kill_wanted=options.kill)
    console.print(report(proof, pace), highlight=False)
    if options.picture:
        _draw(Group(watch.screen(), report(proof, pace)), options.picture)
    return proof


@contextmanager
def _folder(options: Options, console: Console) -> Iterator[Path]:
    """A folder for the logs and servers of this run; it stays when asked for, or when the run broke."""
    folder = Path(tempfile.mkdtemp(prefix="celery_claim_demo_"))
    stays = True
    try:
        yield folder
        stays = options.keep
    except KeyboardInterrupt:
        stays = options.keep
        raise
    finally:
        if stays:
            console.print(f"Logs are in {folder}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _serve(options: Options, folder: Path, stack: ExitStack) -> tuple[Plan, str]:
    """The plan of the run, with its private broker started, and what to call its servers."""
    queue = f"celery_claim_demo.{uuid.uuid4().hex[:8]}"
    database = options.database or f"sqlite:///{folder / 'demo.sqlite'}"
    transport_options: dict[str, Any] = {}
    if options.broker:
        broker, name = options.broker, "your broker"
        transport_options = private_keys(broker, queue)
    elif options.redis:
        broker, name = stack.enter_context(private_valkey(folder)), "a private Valkey"
    else:
        broker, name = file_broker(folder), "messages in an SQLite file, no Redis"
    plan = Plan(
        database=database,
        broker=broker,
        queue=queue,
        transport_options=transport_options,
        consumers=options.consumers,
        workers=options.workers,
        # A broker without a server is looked at once a second, and a slot must be long enough for that.
        frequency=2.0 if options.broker or options.redis else 4.0,
    )
    return plan, f"{_shown(database, own=options.database is None)} and {name}"


def _shown(database: str, *, own: bool) -> str:
    try:
        url = make_url(database)
    except ArgumentError:
        raise DemoError("--database is not a SQLAlchemy URL such as mysql+mysqldb://user@host/name") from None
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise DemoError("--database must be a SQLite file: several processes cannot share a database in memory")
    return "a SQLite file" if own else url.render_as_string(hide_password=True)


@contextmanager
def _tables(engine: Engine, options: Options, watch: Watch) -> Iterator[None]:
    others = load.existing_tables(engine)
    load.check_tables(engine, others)
    if File.__tablename__ in others:
        # With the demo's own table there, the rest of that prefix is what celery_claim made for that demo.
        watch.say(f"the tables {TABLE_PREFIX}* of an earlier demo are replaced")
        others = set()
    try:
        load.create(engine, others=others)
        yield
    finally:
        if not options.keep:
            load.drop(engine, others=others)


def _work(engine: Engine, plan: Plan, fleet: Fleet, watch: Watch, *, kill: bool) -> tuple[Killed | None, Pace]:
    """Watch until every row has ended; half way, kill a worker that holds rows."""
    killed: Killed | None = None
    back_after: float | None = None
    began: float | None = None
    snapshot, changed = Snapshot(), time.monotonic()
    steering = Steering(plan, watch.say)
    while True:
        looked = time.monotonic()
        latest = look(engine)
        if latest != snapshot:
            snapshot, changed = latest, looked
        if began is None and snapshot.handled:
            began = looked
        watch.show(snapshot)
        if kill and killed is None and snapshot.ended * 2 >= snapshot.total:
            # A worker with a full batch shows more; towards the end any worker with a row will do.
            least = plan.batch_size if snapshot.ended < 0.7 * snapshot.total else 1
            killed = kill_holder(engine, fleet.workers, snapshot, least=least, seconds=watch.seconds)
            if killed:
                watch.say(f"kill -9 {killed.worker}, which holds {len(killed.rows)} claimed rows")
        steering.act(snapshot)
        if killed and back_after is None and not open_rows(engine, killed.rows):
            back_after = watch.seconds - killed.seconds
            watch.say(f"its {len(killed.rows)} rows are back and done, {back_after:.1f} s after the kill")
        if snapshot.ended == snapshot.total:
            break
        fleet.check()
        if looked - changed > STALL:
            raise DemoError(f"nothing has changed for {STALL:.0f} s; the workers' last words:\n{_last_words(fleet)}")
        time.sleep(max(INTERVAL, 9 * (time.monotonic() - looked)))
    ended = time.monotonic()
    watch.say(f"every row has ended, after {steering.fires()} fires of the window")
    return killed, Pace(snapshot.total, ended - (began or ended), back_after)


def _last_words(fleet: Fleet) -> str:
    return "\n".join(worker.last_lines(8) for worker in fleet.workers if not worker.killed)


def _draw(screen: RenderableType, picture: Path) -> None:
    console = Console(
        record=True,
        file=io.StringIO(),
        width=112,
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(screen, highlight=False)
    svg = console.export_svg(title="./dev demo")
    # A picture in a README must not ask other servers for fonts.
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL))
