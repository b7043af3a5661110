"""taskiq on Redis Streams: one worker process, coroutines."""

import asyncio
import os
import sys

import redis
from taskiq_redis import RedisStreamBroker

import sink

URL = os.environ["BENCH_DATABASE_URL"]
# With consumer_id 0 it also reads what was queued before it made its group.
broker = RedisStreamBroker(URL, queue_name="bench", consumer_id="0")


@broker.task(task_name="noop")
async def noop(number: int, payload: str) -> None:
    sink.done(number)


async def fill(jobs):
    await broker.startup()
    for start in range(0, jobs, 64):
        numbers = range(start, min(start + 64, jobs))
        await asyncio.gather(*(noop.kiq(number, os.environ["BENCH_PAYLOAD"]) for number in numbers))
    await broker.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "reset":
        redis.Redis.from_url(URL).flushdb()
    elif sys.argv[1] == "fill":
        asyncio.run(fill(int(sys.argv[2])))
    else:
        program = os.path.join(os.path.dirname(sys.executable), "taskiq")
        most = os.environ["BENCH_CONCURRENCY"]
        os.execv(program, [program, "worker", "taskiq_adapter:broker", "--workers", "1", "--max-async-tasks", most])
