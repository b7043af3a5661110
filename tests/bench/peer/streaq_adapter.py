"""streaq on Redis Streams: one worker process, coroutines."""

import asyncio
import os
import sys

import redis
from streaq import Worker

import sink

URL = os.environ["BENCH_DATABASE_URL"]
worker = Worker(redis_url=URL, queue_name="bench", concurrency=int(os.environ["BENCH_CONCURRENCY"]))


@worker.task(ttl=0, silent=True)
async def noop(number: int, payload: str) -> None:
    sink.done(number)


async def fill(jobs):
    async with worker:
        for start in range(0, jobs, 1000):
            numbers = range(start, min(start + 1000, jobs))
            await worker.enqueue_many([noop.enqueue(number, os.environ["BENCH_PAYLOAD"]) for number in numbers])


if __name__ == "__main__":
    if sys.argv[1] == "reset":
        redis.Redis.from_url(URL).flushdb()
    elif sys.argv[1] == "fill":
        asyncio.run(fill(int(sys.argv[2])))
    else:
        worker.run_sync()
