"""Flower with a redis-streams:// broker: real Flower and worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tests import processes
from tests.processes import REPOSITORY
from tests.servers import free_port

PROGRAM = """
import time
from celery import Celery

app = Celery("flowerproj", broker={broker!r}, backend={backend!r})
app.conf.worker_send_task_events = True
app.conf.worker_prefetch_multiplier = 1
app.conf.task_acks_late = True
app.conf.broker_transport_options = {options!r}

@app.task
def work(number, seconds=0.0):
    time.sleep(seconds)
    return number
"""

#: What celery-exporter does to get at events and queue lengths.
WATCHER = """
import sys
from celery import Celery

app = Celery(broker=sys.argv[1])
state = app.events.State()
seen = set()

def note(event):
    state.event(event)
    seen.add(event["type"])
    if event["type"] == "task-succeeded":
        raise SystemExit

with app.connection() as connection:
    connection.ensure_connection(max_retries=1)
    print("scheme", connection.info()["transport"], flush=True)
    length = connection.default_channel.queue_declare("celery", passive=True).message_count
    print("length", length, flush=True)
    receiver = app.events.Receiver(connection, handlers={"*": note})
    try:
        receiver.capture(limit=None, timeout=30, wakeup=True)
    finally:
        print("seen", *sorted(seen), flush=True)
"""


class Flower:
    """A Flower process and what its pages say."""

    def __init__(self, started: processes.CeleryProcesses, module: str, *args: str, **env: str) -> None:
        self.port = free_port()
        self.process = started.start(
            "flower", module, f"--port={self.port}", "--address=127.0.0.1", "--logging=info", *args,
            env={"FLOWER_UNAUTHENTICATED_API": "true", **env}, ready=False,
        )  # fmt: skip

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as answer:
            return str(answer.read().decode())

    def status(self, path: str) -> int:
        try:
            self.get(path)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def lengths(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in json.loads(self.get("/api/queues/length"))["active_queues"]}

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.get("/healthcheck"))
        return False


@pytest.fixture
def program(server: Any, tmp_path: Path) -> Callable[..., tuple[str, Celery]]:
    """program(broker=None, **transport options) -> a module on disk, and an app for the test itself."""

    def write(broker: str | None = None, **options: Any) -> tuple[str, Celery]:
        broker = broker or server.url.replace("redis://", "redis-streams://", 1)
        backend = server.url.rpartition("/")[0] + "/3"
        source = PROGRAM.format(broker=broker, backend=backend, options={"block_timeout": 1, **options})
        module = processes.write_module(tmp_path, source, "flowerproj")
        app = Celery("flowerproj", broker=broker, backend=backend, set_as_current=False)
        app.conf.broker_transport_options = options
        return module, app

    return write


@pytest.fixture
def flower(celery_processes: processes.CeleryProcesses, eventually: Callable[..., Any]) -> Callable[..., Flower]:
    def start(module: str, *args: str, **env: str) -> Flower:
        flower = Flower(celery_processes, module, *args, **env)
        eventually(flower.is_up, timeout=40, what="Flower")
        return flower

    return start


def send(app: Celery, *arguments: Any, **options: Any) -> Any:
    return app.send_task("flowerproj.work", arguments, **options)


@pytest.mark.slow
def test_the_broker_page_knows_our_queues_and_the_other_pages_work(
    program: Any, flower: Any, celery_processes: processes.CeleryProcesses, eventually: Callable[..., Any]
) -> None:
    module, app = program(global_keyprefix="foo-")
    worker = celery_processes.worker(module, "-P", "threads", "-c", "2", "-n", "w@test", "-E")
    page = flower(module)
    eventually(lambda: "w@test" in page.get("/api/workers?refresh=1"), timeout=20)
    with app:
        done = [send(app, number) for number in range(100)]
        assert [result.get(timeout=30) for result in done] == list(range(100))
        # 7 that wait over 3 priorities, 2 that run, 1 for later: case C83.
        for number in range(2):
            send(app, number, 15.0)
        eventually(lambda: page.lengths()["celery"]["messages_unacknowledged"] == 2)
        for priority in (0, 0, 3, 3, 3, 9, 9):
            send(app, priority, priority=priority)
        send(app, 1, countdown=600)

        eventually(lambda: page.lengths()["celery"]["messages_ready"] == 7)
        queue = page.lengths()["celery"]

        assert (queue["messages"], queue["messages_ready"], queue["messages_unacknowledged"]) == (9, 7, 2)
        assert (queue["consumers"], queue["messages_delayed"], queue["idle_since"]) == (1, 1, None)
        shown = page.get("/broker")
        assert "redis-streams://" in shown and ">celery<" in shown.replace(" ", "").replace("\n", "")
        assert "w@test" in page.get("/workers")
        eventually(lambda: _succeeded(page) >= 100, timeout=20)
        assert {page.status(path) for path in ("/tasks", "/worker/w@test", "/metrics", "/broker")} == {200}
    assert worker.running
    assert "Traceback" not in page.process.log()


def _succeeded(page: Flower) -> int:
    tasks = json.loads(page.get("/api/tasks?limit=1000"))
    return sum(task["state"] == "SUCCESS" for task in tasks.values())


@pytest.mark.slow
def test_an_idle_queue_says_since_when(
    program: Any, flower: Any, celery_processes: processes.CeleryProcesses, eventually: Callable[..., Any]
) -> None:
    module, app = program()
    celery_processes.worker(module, "-P", "threads", "-c", "2", "-n", "w@test")
    with app:
        assert send(app, 1).get(timeout=20) == 1
    page = flower(module)

    eventually(lambda: (page.lengths()["celery"]["idle_since"] or "")[:3] == "202")


def test_every_scheme_of_ours_leads_to_our_broker_and_others_to_flowers_own() -> None:
    pytest.importorskip("flower", reason="Flower is the extra [flower]")
    from flower.utils import broker as flowers

    from celery_claim.flower import install
    from celery_claim.flower.broker import StreamsBroker

    assert install() and install()
    for scheme in ("redis-streams", "rediss-streams", "sentinel-streams", "redis-streams+socket"):
        assert isinstance(flowers.Broker(f"{scheme}://h/0", broker_options={}, broker_use_ssl=None), StreamsBroker)
    assert isinstance(flowers.Broker("redis://localhost/0"), flowers.Redis)
    with pytest.raises(NotImplementedError):
        flowers.Broker("nothing://localhost")


@pytest.mark.slow
def test_a_fault_in_the_hook_leaves_flower_running_and_is_logged(program: Any, flower: Any, tmp_path: Path) -> None:
    module, _ = program()
    # A Flower whose factory of brokers is not what we know.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.abc\n"
        "class Break(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'celery_claim.flower.broker':\n"
        "            raise RuntimeError('broken on purpose')\n"
        "sys.meta_path.insert(0, Break())\n"
    )

    page = flower(module, PYTHONPATH=str(tmp_path))

    assert page.status("/workers") == 200
    assert page.status("/broker") == 404
    assert "broken on purpose" in page.process.log()


@pytest.mark.slow
def test_a_broker_that_is_down_shows_an_empty_page_and_no_password(program: Any, flower: Any) -> None:
    module, _ = program(f"redis-streams://:sesame-17@127.0.0.1:{free_port()}/0")

    page = flower(module)

    assert page.status("/broker") == 200
    assert "sesame-17" not in page.get("/broker") + page.process.log()


@pytest.mark.slow
def test_a_program_that_only_has_the_url_watches_events_and_queues(
    program: Any, celery_processes: processes.CeleryProcesses, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    """As celery-exporter does: it never imports the app, and learns of us by CELERY_CONFIG_MODULE."""
    module, app = program()
    (tmp_path / "watch.py").write_text(WATCHER)
    celery_processes.worker(module, "-P", "threads", "-c", "2", "-n", "w@test", "-E")
    with app:
        watcher = _python(tmp_path, "watch.py", str(app.conf.broker_url))
        try:
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == "scheme redis-streams\n"
            assert watcher.stdout.readline() == "length 0\n"
            while watcher.poll() is None:
                send(app, 1).get(timeout=20)
            assert "task-succeeded" in watcher.stdout.read()
        finally:
            watcher.kill()
            watcher.communicate(timeout=10)


def _python(folder: Path, *args: str) -> Any:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CELERY")}
    env = {**clean, "PYTHONPATH": str(REPOSITORY), "CELERY_CONFIG_MODULE": "celery_claim.autoload"}
    return subprocess.Popen([sys.executable, *args], cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
