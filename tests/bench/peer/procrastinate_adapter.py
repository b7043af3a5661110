"""procrastinate on PostgreSQL: SKIP LOCKED and LISTEN/NOTIFY, finished jobs deleted."""

import asyncio
import os
import sys

import procrastinate
import psycopg

import sink

URL = os.environ["BENCH_DATABASE_URL"]
CONCURRENCY = int(os.environ.get("BENCH_CONCURRENCY", "1"))
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL, min_size=4, max_size=10))


@app.task(queue="bench", name="noop")
async def noop(number, payload):
    sink.done(number)


def reset():
    with psycopg.connect(URL, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    plain = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=URL))
    with plain.open():
        plain.schema_manager.apply_schema()


async def fill(jobs):
    async with app.open_async():
        for start in range(0, jobs, 1000):
            batch = range(start, min(start + 1000, jobs))
            await noop.batch_defer_async(*[{"number": number, "payload": PAYLOAD} for number in batch])


async def work():
    async with app.open_async():
        await app.run_worker_async(queues=["bench"], concurrency=CONCURRENCY, delete_jobs="successful")


PAYLOAD = os.environ["BENCH_PAYLOAD"]

if __name__ == "__main__":
    if sys.argv[1] == "reset":
        reset()
    elif sys.argv[1] == "fill":
        asyncio.run(fill(int(sys.argv[2])))
    else:
        asyncio.run(work())
