"""dramatiq on Redis: one process, a thread for each job at a time; acknowledged when done, which is its default."""

import os
import sys

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker

import sink

URL = os.environ["BENCH_DATABASE_URL"]
dramatiq.set_broker(RedisBroker(url=URL))


@dramatiq.actor(queue_name="bench", max_retries=0)
def noop(number, payload):
    sink.done(number)


if __name__ == "__main__":
    if sys.argv[1] == "reset":
        redis.Redis.from_url(URL).flushdb()
    elif sys.argv[1] == "fill":
        for number in range(int(sys.argv[2])):
            noop.send(number, os.environ["BENCH_PAYLOAD"])
    else:
        threads = os.environ["BENCH_CONCURRENCY"]
        # How many it fetches ahead is otherwise twice its threads.
        os.environ["dramatiq_queue_prefetch"] = "100"  # noqa: SIM112
        program = [sys.executable, "-m", "dramatiq", "dramatiq_adapter", "--processes", "1", "--threads", threads]
        os.execv(sys.executable, program)
