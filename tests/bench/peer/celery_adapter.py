"""Celery on the broker of the URL, so also on ours: one worker with threads, acknowledged late."""

import os
import sys

from celery import Celery
from kombu.utils.url import url_to_parts

import sink

URL = os.environ["BENCH_DATABASE_URL"]
app = Celery("celery_adapter", broker=URL)
app.conf.task_acks_late = True
app.conf.task_ignore_result = True
app.conf.worker_prefetch_multiplier = 100


@app.task(name="noop")
def noop(number, payload):
    sink.done(number)


if __name__ == "__main__":
    if sys.argv[1] == "reset":
        import redis

        parts = url_to_parts(URL)
        redis.Redis(parts.hostname, parts.port, password=parts.password).flushdb()
    elif sys.argv[1] == "fill":
        with app.producer_or_acquire() as producer, producer.batch():
            for number in range(int(sys.argv[2])):
                noop.apply_async((number, os.environ["BENCH_PAYLOAD"]), producer=producer)
    else:
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "WARNING"]
        app.worker_main(["worker", "-P", "threads", "-c", os.environ["BENCH_CONCURRENCY"], *quiet])
