"""What a worker does besides consuming: it hands unstarted work back, and dead letters fail their tasks."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, chord
from celery.result import AsyncResult

from celery_claim.streams import dead_letters
from celery_claim.streams.look import QueueFacts, look
from celery_claim.streams.wire.keys import Keys
from tests import processes

Eventually = Callable[..., Any]
KEYS, QUEUE, SECRET = Keys(), "celery", "sesame-17"
#: How long a task runs that keeps a stopping worker waiting; whoever waits for it is noticed.
LONG = 8.0
POOLS = {
    "solo": ("-P", "solo"),
    "threads": ("-P", "threads", "-c", "2"),
    "prefork": ("-P", "prefork", "-c", "2"),
    "gevent": ("-P", "gevent", "-c", "2"),
}
PROGRAM = """
import os, signal, time
import redis
from celery import Celery
from celery.exceptions import Reject
from celery_claim.signals import message_dead

app = Celery("stepproj", broker={broker!r}, backend={backend!r})
app.conf.task_acks_late = True
app.conf.worker_prefetch_multiplier = 4
app.conf.broker_transport_options = {{
    "lease_timeout": 60, "block_timeout": 30, "delivery_limit": 3, "requeue_backoff_max": 0.1, **{options!r}
}}
notes = redis.Redis.from_url({notes!r})

@message_dead.connect(weak=False)
def note(sender, death, **_):
    notes.rpush("signal", f"{{sender}}/{{death.task}}/{{death.task_id}}/{{death.reason}}/{{death.deliveries}}")

@app.task
def work(number, seconds=0.0):
    notes.rpush("started", number)
    time.sleep(seconds)
    notes.rpush("done", number)
    return number

@app.task(rate_limit="1/h")
def limited(number):
    notes.rpush("started", number)

@app.task(bind=True)
def refuse(self, secret):
    raise Reject("no", requeue=False)

@app.task(acks_on_failure_or_timeout=False)
def fail(secret):
    raise LookupError("its own error")

@app.task(reject_on_worker_lost=True)
def crash(secret):
    notes.rpush("started", "crash")
    os.kill(os.getpid(), signal.SIGKILL)

@app.task
def xsum(numbers):
    return sum(numbers)

@app.task
def told(*args):
    notes.rpush("told", "errback")
"""


class Stage:
    """One app on one server, its workers, and what its tasks noted."""

    def __init__(self, server: Any, folder: Path, started: processes.CeleryProcesses) -> None:
        self.server, self.folder, self.started = server, folder, started
        base = server.url.rpartition("/")[0]
        self.broker = server.url.replace("redis://", "redis-streams://", 1)
        self.backend, self.notes_url = f"{base}/3", f"{base}/2"
        self.notes = redis.Redis.from_url(self.notes_url)
        self.app = Celery("stepproj", broker=self.broker, backend=self.backend, set_as_current=False)

    def worker(self, name: str, *args: str, options: Any = None) -> processes.CeleryProcess:
        program = PROGRAM.format(broker=self.broker, backend=self.backend, notes=self.notes_url, options=options or {})
        module = processes.write_module(self.folder, program, "stepproj")
        return self.started.worker(module, "-n", f"{name}@test", *args)

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        return self.app.send_task(f"stepproj.{task}", args, **options)

    def noted(self, what: str) -> list[str]:
        return [note.decode() for note in self.notes.lrange(what, 0, -1)]

    def queue(self) -> QueueFacts:
        with self.server.client() as client:
            return look(client, KEYS, "celery", [QUEUE])[0]

    def letters(self) -> list[dead_letters.DeadLetter]:
        with self.server.client() as client:
            return list(dead_letters.letters(client, KEYS, QUEUE))

    def deliveries(self) -> set[int]:
        """Delivery counts of messages that were given back."""
        with self.server.client() as client:
            pending = client.xpending_range(KEYS.stream(QUEUE, 0), "celery", "-", "+", 100, consumername="@free")
        return {each["times_delivered"] for each in pending}


@pytest.fixture
def stage(redis_server: Any, tmp_path: Path, celery_processes: processes.CeleryProcesses) -> Any:
    stage = Stage(redis_server, tmp_path, celery_processes)
    yield stage
    stage.app.close()
    stage.notes.close()


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_a_warm_shutdown_gives_unstarted_messages_back_before_running_tasks_end(
    stage: Stage, pool: str, eventually: Eventually
) -> None:
    running = 1 if pool == "solo" else 2
    worker = stage.worker("first", *POOLS[pool])
    for number in range(6):
        stage.send("work", number, LONG)
    eventually(lambda: len(stage.noted("started")) == running and stage.queue().pending >= running)

    asked = time.monotonic()
    worker.process.terminate()
    eventually(lambda: stage.queue().pending == running, timeout=LONG - 4)
    given_back = time.monotonic() - asked

    assert given_back < LONG / 2
    assert worker.running
    assert stage.queue().ready == 6 - running
    assert stage.deliveries() <= {0}
    # Another worker gets them in their order, while the first still works.
    stage.worker("second", "-P", "solo", options={"block_timeout": 1})
    eventually(lambda: len(stage.noted("started")) > running, timeout=LONG)
    assert sorted(stage.noted("started")[:running]) == [str(number) for number in range(running)]
    assert stage.noted("started")[running] == str(running)
    assert worker.process.wait(30) == 0
    assert sorted(stage.noted("done"))[:running] == [str(number) for number in range(running)]
    assert len(stage.noted("started")) == len(set(stage.noted("started")))


@pytest.mark.slow
def test_messages_that_wait_in_the_workers_timer_or_for_their_rate_go_back_too(
    stage: Stage, eventually: Eventually
) -> None:
    # Who publishes decides that the broker does not hold a message until it is due.
    stage.app.conf.broker_transport_options = {"delayed_delivery": False}
    worker = stage.worker("first", *POOLS["threads"])
    stage.send("work", 0, LONG)
    stage.send("work", 1, countdown=600)
    stage.send("limited", 2)
    stage.send("limited", 3)
    eventually(lambda: set(stage.noted("started")) == {"0", "2"} and stage.queue().pending == 3)

    worker.process.terminate()

    eventually(lambda: stage.queue().pending == 1, timeout=LONG / 2)
    assert stage.queue().ready == 2
    worker.process.wait(30)
    assert sorted(stage.noted("started")) == ["0", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_workers_that_stop_one_after_another_run_each_task_once(
    stage: Stage, pool: str, eventually: Eventually
) -> None:
    for number in range(150):
        stage.send("work", number, 0.03)
    for turn in range(3):
        worker = stage.worker(f"w{turn}", *POOLS[pool])
        eventually(lambda turn=turn: len(stage.noted("started")) > 12 * (turn + 1))
        assert worker.terminate() == 0
    stage.worker("last", *POOLS[pool])

    eventually(lambda: len(stage.noted("done")) >= 150, timeout=40)
    assert sorted(map(int, stage.noted("started"))) == list(range(150))
    assert stage.queue().dead == 0


@pytest.mark.slow
def test_a_task_that_kills_its_process_fails_after_the_delivery_limit(stage: Stage, eventually: Eventually) -> None:
    worker = stage.worker("w", *POOLS["prefork"], options={"block_timeout": 0.5})
    poison = stage.send("crash", SECRET, link_error=stage.app.signature("stepproj.told"))
    good = [stage.send("work", number) for number in range(20)]

    with pytest.raises(Exception, match="delivered 3 times") as failed:
        poison.get(timeout=40)

    assert type(failed.value).__name__ == "DeliveryLimitExceeded"
    assert stage.noted("started").count("crash") == 3
    assert [result.get(timeout=20) for result in good] == list(range(20))
    (letter,) = stage.letters()
    assert (letter.reason, letter.deliveries, letter.task_id) == ("delivery limit", 3, poison.id)
    assert stage.noted("signal") == [f"celery/stepproj.crash/{poison.id}/delivery limit/3"]
    eventually(lambda: stage.noted("told") == ["errback"])
    assert SECRET not in worker.log()


@pytest.mark.slow
def test_rejected_messages_are_dead_letters_and_keep_the_error_of_their_task(
    stage: Stage, eventually: Eventually
) -> None:
    worker = stage.worker("w", *POOLS["threads"])
    refused, failed = stage.send("refuse", SECRET), stage.send("fail", SECRET)

    # Celery writes the first result itself from 5.7 on; older ones leave it to us.
    with pytest.raises(Exception, match=r"rejected|'no'"):
        refused.get(timeout=20)
    with pytest.raises(LookupError, match="its own error"):
        failed.get(timeout=20)
    eventually(lambda: {each.reason for each in stage.letters()} == {"rejected"} and len(stage.letters()) == 2)
    worker.terminate()
    assert isinstance(failed.result, LookupError)


@pytest.mark.slow
def test_a_dead_part_of_a_chord_fails_the_chord(stage: Stage) -> None:
    stage.worker("w", *POOLS["threads"])
    parts = [stage.app.signature("stepproj.work", (1,)), stage.app.signature("stepproj.refuse", (SECRET,))]

    result = chord(parts, app=stage.app)(stage.app.signature("stepproj.xsum"))

    with pytest.raises(Exception, match=r"rejected|'no'"):
        result.get(timeout=20)


@pytest.mark.slow
def test_an_unknown_task_is_a_dead_letter_and_its_result_says_not_registered(stage: Stage) -> None:
    worker = stage.worker("w", *POOLS["threads"])
    unknown = stage.send("no_such_task", SECRET)

    with pytest.raises(Exception, match="no_such_task") as told:
        unknown.get(timeout=20)

    assert type(told.value).__name__ == "NotRegistered"
    (letter,) = stage.letters()
    assert letter.reason == "unknown task 'stepproj.no_such_task'"
    assert worker.running
    assert SECRET not in worker.log()


class Exploit:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


def forged(folder: Path) -> dict[str, dict[str, Any]]:
    """Messages that no honest producer writes: what each is, and its fields."""
    evil = pickle.dumps(Exploit(str(folder / "pwned")))
    head = {"id": "forged", "task": "stepproj.work"}

    def message(body: Any, content_type: str = "application/json", encoding: str = "utf-8", **headers: Any) -> Any:
        fields = {"body": body, "content-type": content_type, "content-encoding": encoding}
        return {**fields, "headers": json.dumps({**head, **headers})}

    good = json.dumps([[1], {}, {}])
    return {
        "a pickle": message(evil, "application/x-python-serialize", "binary"),
        "a pickle without headers": {"body": evil, "content-type": "application/x-python-serialize"},
        "a pickle that claims to be JSON": message(evil),
        "yaml": message("!!python/object/apply:os.system ['true']", "application/x-yaml"),
        "no body": {"something": "else"},
        "random bytes": {"body": os.urandom(64), "headers": os.urandom(64)},
        "a large field": {"padding": SECRET * 1_000_000},
        "deeply nested JSON": message("[" * 100_000 + "]" * 100_000),
        "deeply nested headers": {"body": good, "headers": "[" * 100_000 + "]" * 100_000},
        "a value of an unknown type": message('[[{"__type__": "own", "__value__": 1}], {}, {}]'),
        "the same, in other letters": message('[[{"__ty\\u0070e__": "own", "__value__": 1}], {}, {}]'),
        "a number": message("5"),
        "a short list": message("[[1], {}]"),
        "arguments that are no list": message('["a", {}, {}]'),
        "keyword arguments that are no object": message('[[], "a", {}]'),
        "embed that is no object": message('[[], {}, "a"]'),
        "no id": {**message(good), "headers": json.dumps({"task": "stepproj.work"})},
        "an id that is no text": message(good, id={"a": 1}),
        "a task that is no text": message(good, task=["stepproj.work"]),
        "a time limit that is no pair": message(good, timelimit="soon"),
        "retries that are no number": message(good, retries="many"),
        "an ETA that is no time": message(good, eta="never"),
        "an expiry that is no time": message(good, expires={"a": 1}),
        "headers that are a list": {"body": good, "headers": "[]"},
        "properties that are a list": {"body": good, "headers": json.dumps(head), "properties": "[]"},
        "the first protocol without a task": {"body": "{}", "content-type": "application/json"},
        "the first protocol with a wrong task": {"body": '{"task": 5, "id": "x"}', "content-type": "application/json"},
        "kombu's form, cut off": {"m": '{"body": "W10='},
        "not base64": {"m": json.dumps({"body": "\x00", "properties": {"body_encoding": "base64"}})},
    }


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_forged_messages_are_dead_letters_and_the_worker_goes_on(
    stage: Stage, pool: str, tmp_path: Path, eventually: Eventually
) -> None:
    worker = stage.worker("w", *POOLS[pool])
    everything = forged(tmp_path)
    with stage.server.client() as client:
        for fields in everything.values():
            client.xadd(KEYS.stream(QUEUE, 0), fields)
    good = [stage.send("work", number) for number in range(10)]

    assert [result.get(timeout=15) for result in good] == list(range(10))
    eventually(lambda: stage.queue().pending == 0)

    with stage.server.client() as client:
        entries = [dict(list(fields.items())[4:]) for _, fields in client.xrange(KEYS.dead(QUEUE))]
    sent = {
        name: {k.encode(): v if isinstance(v, bytes) else v.encode() for k, v in each.items()}
        for name, each in everything.items()
    }
    assert [name for name, fields in sent.items() if fields not in entries] == []
    assert len(entries) == len(everything)
    assert type(AsyncResult("forged", app=stage.app).result).__name__ == "MessageRefused"
    assert all(each.reason.startswith(("undecodable", "invalid")) for each in stage.letters())
    assert not (tmp_path / "pwned").exists()
    assert worker.running and "Traceback" not in worker.log()
    assert SECRET not in worker.log() and "[[[[" not in worker.log()
    assert max(map(len, worker.log().splitlines())) < 500


@pytest.mark.slow
def test_an_app_that_never_heard_of_us_gets_the_step(stage: Stage) -> None:
    worker = stage.worker("w", *POOLS["threads"], "-l", "DEBUG")

    assert "claim-streams" in worker.log()
