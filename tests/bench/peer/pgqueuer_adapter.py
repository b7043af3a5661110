"""pgqueuer on PostgreSQL: jobs taken and completed by the hundred, asyncpg and uvloop, as its README advises."""

import asyncio
import json
import os
import subprocess
import sys
from urllib.parse import urlparse

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

import sink

URL = os.environ["BENCH_DATABASE_URL"]
PAYLOAD = os.environ["BENCH_PAYLOAD"]


async def reset():
    connection = await asyncpg.connect(URL)
    await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    await connection.close()
    parts = urlparse(URL)
    environment = os.environ | {
        "PGHOST": parts.hostname or "",
        "PGPORT": str(parts.port or 5432),
        "PGUSER": parts.username or "",
        "PGPASSWORD": parts.password or "",
        "PGDATABASE": parts.path.lstrip("/"),
    }
    command = os.path.join(os.path.dirname(sys.executable), "pgq")
    subprocess.run([command, "install"], check=True, env=environment, capture_output=True)


async def fill(jobs):
    queries = Queries(AsyncpgDriver(await asyncpg.connect(URL)))
    for start in range(0, jobs, 1000):
        batch = [json.dumps([number, PAYLOAD]).encode() for number in range(start, min(start + 1000, jobs))]
        await queries.enqueue(["noop"] * len(batch), batch, [0] * len(batch))


async def work():
    queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(URL)))

    @queuer.entrypoint("noop")
    async def noop(job):
        sink.done(json.loads(job.payload)[0])

    await queuer.qm.run(batch_size=100)  # its default is 10


if __name__ == "__main__":
    if sys.argv[1] == "reset":
        asyncio.run(reset())
    elif sys.argv[1] == "fill":
        asyncio.run(fill(int(sys.argv[2])))
    else:
        uvloop.run(work())
