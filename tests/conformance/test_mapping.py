"""Existing tables: other names, other values, missing columns, several classes in one table."""

from __future__ import annotations

import itertools
from datetime import datetime

import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    ForeignKey,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    func,
    select,
    text,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    deferred,
    mapped_column,
    relationship,
)

from celery_claim import Claimable, Done, Fail, Retry, Skip, Status
from celery_claim.exceptions import MappingError

OTHER_NAMES = {
    "status": "state",
    "claim_time": "taken at",
    "claim_token": "order",
    "lease_seconds": "group",
    "worker_id": "who",
    "retry_count": "tries",
    "reclaim_count": "losses",
    "next_retry_time": "due",
    "error_message": "why",
}
WORDS = {
    "pending": "new",
    "processing": "busy",
    "succeeded": "done",
    "failed": "bad",
    "retrying": "wait",
    "cancelled": "off",
}


def orders(name="order", schema=None):
    """A table of somebody else's: reserved words, blanks, its own names, statuses as words."""
    return Table(
        name,
        MetaData(),
        Column("key", BigInteger, primary_key=True, autoincrement=False),
        Column("rank", Integer),
        Column("state", String(10), nullable=False, server_default="new"),
        Column("taken at", BigInteger),
        Column("order", String(32)),
        Column("group", Integer),
        Column("who", String(20)),
        Column("tries", SmallInteger, nullable=False, server_default="0"),
        Column("losses", SmallInteger, nullable=False, server_default="0"),
        Column("due", BigInteger),
        Column("why", String(40)),
        Column("it's", String(40)),
        schema=schema,
    )


def insert_orders(mail, table, number):
    with mail.engine.begin() as connection:
        connection.execute(table.insert(), [{"key": key, "rank": key * 10} for key in range(1, number + 1)])


def states(mail, table):
    with mail.engine.connect() as connection:
        return dict(connection.execute(select(table.c.key, table.c.state).order_by(table.c.key)).all())


def test_a_table_with_names_and_words_of_its_own_is_consumed(queue):
    table = orders()
    ends = {1: None, 2: ValueError("x" * 100), 3: Retry(countdown=0), 4: Done({"it's": "answered", "rank": 7})}
    seen: list[tuple[int, int]] = []

    def handler(row):
        seen.append((row.key, row.rank))
        end = ends.pop(row.key, None)
        if isinstance(end, ValueError):
            raise end
        return end

    mail = queue(handler, model=table, columns=OTHER_NAMES, values=WORDS)
    insert_orders(mail, table, 4)
    mail.task.drain()
    assert states(mail, table) == {1: "done", 2: "bad", 3: "wait", 4: "done"}
    assert mail.task.promote() == [3]
    mail.task.drain()

    assert seen == [(1, 10), (2, 20), (3, 30), (4, 40), (3, 30)]
    assert states(mail, table) == {1: "done", 2: "bad", 3: "done", 4: "done"}
    with mail.engine.connect() as connection:
        rows = {row.key: row for row in connection.execute(select(table))}
    assert (rows[4].rank, rows[4]._mapping[table.c["it's"]], rows[3].tries) == (7, "answered", 1)
    assert rows[2].why == ("ValueError: " + "x" * 100)[:40]
    assert len(rows[1].who) <= 20


def test_an_operators_verbs_work_on_a_mapped_table(queue):
    table = orders()
    mail = queue(lambda row: None, model=table, columns=OTHER_NAMES, values=WORDS)
    insert_orders(mail, table, 6)
    claimed = mail.claim(limit=2, lease_seconds=60)
    assert mail.task.release([1, 3]) == [1]
    mail.age(62)
    assert mail.task.recover() == [2]
    assert mail.write_back(claimed).lost == [1, 2]
    assert mail.task.cancel([6]) == [6]
    with mail.engine.begin() as connection:
        connection.execute(table.update().where(table.c.key == 5).values(state="bad", why="451"))
    assert mail.task.retry_failed(error_like="451") == [5]
    assert {name: mail.task.status()[name] for name in ("pending", "queued", "cancelled")} == {
        "pending": 5, "queued": 0, "cancelled": 1
    }  # fmt: skip


def test_a_table_without_a_model_is_found_by_its_name(queue):
    table = orders("order list")
    first = queue(lambda row: None, model=table, columns=OTHER_NAMES, values=WORDS)
    insert_orders(first, table, 3)
    seen: list[int] = []
    by_name = queue(lambda row: seen.append(row.key), model=None, table="order list", columns=OTHER_NAMES, values=WORDS)

    assert by_name.task.drain().succeeded == 3
    assert seen == [1, 2, 3]


@pytest.mark.parametrize(
    "name", ["order lst", "order; DROP TABLE canary", "order` WHERE 1=1 -- ", 'order" --', "n" * 300, "(SELECT 1)"]
)
def test_a_name_that_is_no_table_is_refused_and_never_run(queue, name):
    first = queue(model=orders("order list"), columns=OTHER_NAMES, values=WORDS, handler=lambda row: None)
    with first.engine.begin() as connection:
        connection.execute(text("CREATE TABLE canary (id INTEGER)"))
    by_name = queue(lambda row: None, model=None, table=name, columns=OTHER_NAMES, values=WORDS)

    with pytest.raises(MappingError, match="there is no table"):
        by_name.task.drain()
    with first.engine.connect() as connection:
        connection.execute(text("SELECT id FROM canary"))


@pytest.mark.parametrize("column", ["status=(SELECT 1)", "state; DROP TABLE canary", "c" * 300])
def test_a_name_that_is_no_column_is_refused(queue, column):
    mail = queue(model=orders(), columns={**OTHER_NAMES, "status": column}, handler=lambda row: None)
    with pytest.raises(MappingError, match="has no column"):
        mail.task.drain()


@pytest.mark.needs("network")
def test_a_table_in_another_schema_is_consumed(queue, database):
    schema = f"{database.schema}_select"
    if database.can("mysql"):
        database.admin(f"CREATE DATABASE `{schema}`")
    else:
        database.admin(f'CREATE SCHEMA "{schema}" AUTHORIZATION claim')
    table = orders(schema=schema)
    try:
        mail = queue(lambda row: None, model=table, columns=OTHER_NAMES, values=WORDS)
        insert_orders(mail, table, 2)
        options = {"columns": OTHER_NAMES, "values": WORDS}
        assert queue(lambda row: None, model=None, table="order", schema=schema, **options).task.drain(
            limit=1
        ).succeeded == 1  # fmt: skip
        dotted = queue(lambda row: None, model=None, table=f"{schema}.order", **options)
        assert dotted.task.drain().succeeded == 1
        assert states(mail, table) == {1: "done", 2: "done"}
        with pytest.raises(MappingError, match="there is no schema"):
            queue(lambda row: None, model=None, table="order", schema="nowhere", **options).task.drain()
    finally:
        database.admin(f"DROP DATABASE `{schema}`" if database.can("mysql") else f'DROP SCHEMA "{schema}" CASCADE')


# ---- what degrades


def bare(**more):
    """The least that can be claimed, as the first form of this design had it."""
    columns = [
        Column("id", BigInteger, primary_key=True, autoincrement=False),
        Column("status", SmallInteger, nullable=False, server_default="0"),
        Column("claim_time", BigInteger),
        Column("claim_token", String(32)),
    ]
    return Table("mail", MetaData(), *columns, *(Column(name, kind) for name, kind in more.items()))


def test_three_columns_are_enough(queue):
    def handler(row):
        mail.handled.append(row.id)
        if row.id == 2:
            raise ValueError("not kept anywhere")

    mail = queue(handler, model=bare(), rows=3)

    counts = mail.task.drain()

    assert (counts.succeeded, counts.failed) == (2, 1)
    assert [mail.row(key).status for key in (1, 2, 3)] == [2, 3, 2]


def test_without_a_lease_column_rows_are_judged_by_the_tasks_lease(queue):
    mail = queue(model=bare(), rows=1, lease_seconds=100)
    mail.claim()
    mail.age(90)
    assert mail.task.recover() == []
    mail.age(12)
    assert mail.task.recover() == [1]
    assert mail.row().status == Status.PENDING


def test_without_a_due_column_a_retry_goes_back_when_the_run_ends(queue):
    def handler(row):
        mail.handled.append(row.id)
        return Retry(countdown=1000) if len(mail.handled) == 1 else None

    mail = queue(handler, model=bare(retry_count=Integer), rows=2)
    mail.change(retry_count=0)

    first = mail.task.drain()

    assert (first.succeeded, first.released) == (1, 1)
    assert mail.handled == [1, 2]
    assert (mail.row(1).status, mail.row(1).retry_count) == (0, 1)
    assert mail.task.drain().succeeded == 1


SEED = {status: int(status) for status in (Status.PENDING, Status.PROCESSING, Status.SUCCEEDED, Status.FAILED)}


def test_without_a_value_for_retrying_a_retry_waits_as_pending(queue):
    def handler(row):
        mail.handled.append(row.id)
        if len(mail.handled) == 1:
            raise Retry(countdown=100)

    model = bare(next_retry_time=BigInteger, retry_count=Integer)
    mail = queue(handler, model=model, values=SEED, rows=3)
    mail.change(retry_count=0)

    mail.task.drain()
    assert mail.handled == [1, 2, 3]
    assert (mail.row(1).status, mail.row(1).retry_count) == (0, 1)
    assert mail.task.drain().claimed == 0
    assert mail.task.promote() == []
    mail.age(102)

    assert mail.task.drain().succeeded == 1
    assert mail.handled == [1, 2, 3, 1]


def test_a_status_that_the_table_does_not_know_is_never_written(queue):
    mail = queue(model=bare(), values=SEED, rows=1)

    with pytest.raises(ValueError, match="no CANCELLED"):
        mail.task.cancel([1])
    assert mail.task.status()["cancelled"] == 0


# ---- models


def test_a_task_on_a_subclass_claims_only_its_rows(queue):
    class Base(DeclarativeBase):
        pass

    class Mail(Claimable, Base):
        __tablename__ = "mail"
        id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
        kind: Mapped[str] = mapped_column(String(20))
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "mail"}  # noqa: RUF012

    class Letter(Mail):
        __mapper_args__ = {"polymorphic_identity": "letter"}  # noqa: RUF012

    class Airmail(Letter):
        __mapper_args__ = {"polymorphic_identity": "airmail"}  # noqa: RUF012

    letters = queue(model=Letter)
    for key, kind in enumerate(["mail", "letter", "airmail", "mail"], start=1):
        letters.insert([key], kind=kind)

    assert letters.task.drain().succeeded == 2
    assert letters.handled == [2, 3]
    assert letters.task.status()["pending"] == 0
    letters.change([1], status=1, claim_time=1, lease_seconds=1)
    assert letters.task.recover() == []
    everything = queue(model=Mail)
    assert everything.task.recover() == [1]
    assert everything.task.drain().succeeded == 2


def test_an_object_comes_detached_with_all_its_columns(queue):
    class Base(DeclarativeBase):
        pass

    class Mail(Claimable, Base):
        __tablename__ = "mail"
        id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
        body: Mapped[str | None] = deferred(mapped_column("long_text", Text))
        about: Mapped[str | None] = mapped_column(String(20))

    seen: list[object] = []
    mail = queue(lambda row: seen.append((row.id, row.body, row.about, row.worker_id is not None)), model=Mail)
    mail.insert([1], long_text="hello", about="it")
    mail.task.drain()

    assert seen == [(1, "hello", "it", True)]


def test_a_model_with_eager_relations_gets_each_row_once(queue):
    class Base(DeclarativeBase):
        pass

    class Mail(Claimable, Base):
        __tablename__ = "mail"
        id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
        parts: Mapped[list[Part]] = relationship(lambda: Part, lazy="joined", order_by=lambda: Part.id)

    class Part(Base):
        __tablename__ = "part"
        id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
        mail: Mapped[int] = mapped_column(ForeignKey("mail.id"))

    seen: list[object] = []
    mail = queue(lambda row: seen.append([part.id for part in row.parts]), model=Mail, rows=2)
    with mail.engine.begin() as connection:
        connection.execute(Part.__table__.insert(), [{"id": n, "mail": 1} for n in (1, 2, 3)])

    assert mail.task.drain().succeeded == 2
    assert seen == [[1, 2, 3], []]


def test_a_dataclass_model_takes_no_claim_columns_as_arguments(queue):
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Mail(Claimable.dataclass, Base):
        __tablename__ = "mail"
        id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)

    assert Mail(id=5).status == 0
    mail = queue(model=Mail, rows=2)

    assert mail.task.drain().succeeded == 2


def test_attributes_may_have_other_names_than_their_columns(queue):
    class Base(DeclarativeBase):
        pass

    class Mail(Base):
        __tablename__ = "mail"
        number: Mapped[int] = mapped_column("id", BigInteger, primary_key=True, autoincrement=False)
        state: Mapped[int] = mapped_column("status", SmallInteger, server_default="0")
        since: Mapped[int | None] = mapped_column("claim_time", BigInteger)
        token: Mapped[str | None] = mapped_column("claim_token", String(32))
        reply: Mapped[str | None] = mapped_column("answer", String(20))

    names = {"status": "state", "claim_time": "since", "claim_token": "token"}
    mail = queue(lambda row: Done({"reply": f"no {row.number}"}), model=Mail, columns=names, rows=2)

    assert mail.task.drain().succeeded == 2
    assert mail.row(2).answer == "no 2"


def test_the_mixin_adds_its_indexes_whatever_the_table_arguments_say(queue):
    class Base(DeclarativeBase):
        pass

    class Mail(Claimable, Base):
        __tablename__ = "mail"
        __table_args__ = ({"comment": "none of them"},)
        id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)

    mail = queue(model=Mail)

    assert {index.name for index in Mail.__table__.indexes} == {"ix_mail_claim", "ix_mail_retry", "ix_mail_pending"}
    assert [finding for finding in mail.task.check() if "index" in finding.code] == []


def test_a_column_with_an_onupdate_function_gets_its_value_at_each_change(queue):
    class Base(DeclarativeBase):
        pass

    changes = itertools.count(1)

    class Mail(Claimable, Base):
        __tablename__ = "mail"
        id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
        version: Mapped[int | None] = mapped_column(onupdate=lambda: next(changes))

    mail = queue(model=Mail, rows=2)

    assert mail.task.drain().succeeded == 2
    assert mail.row(2).version > 1


@pytest.mark.parametrize("name", ["keys", "token", "error", "lease", "worker", "seconds", "like", "max_reclaims"])
def test_a_column_may_be_called_like_a_parameter_of_a_statement(queue, name):
    class Base(DeclarativeBase):
        pass

    class Mail(Claimable, Base):
        __tablename__ = "mail"
        id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
        theirs: Mapped[str | None] = mapped_column(name, String(20))

    def handler(row):
        if row.id < 4:
            raise (Fail("no"), Fail("no"), Retry(0, "later"), Skip())[row.id]

    mail = queue(handler, model=Mail, write_back="batch")
    mail.insert([0, 1, 2, 3, 4])
    with mail.engine.begin() as connection:
        connection.execute(mail.table.update().values({mail.table.c[name]: "mine"}))
    counts = mail.task.drain(limit=5)
    mail.claim(lease_seconds=2)
    mail.age(10)

    assert (counts.succeeded, counts.failed, counts.retried, counts.released) == (1, 2, 1, 1)
    assert mail.task.promote() == [2]
    assert mail.task.recover() == [3]
    assert mail.task.retry_failed(error_like="no") == [0, 1]
    assert mail.task.cancel([0]) == [0]
    assert {mail.row(key)._mapping[name] for key in range(5)} == {"mine"}


def test_a_created_time_that_is_no_number_of_seconds_tells_no_age(queue):
    class Base(DeclarativeBase):
        pass

    class Mail(Claimable, Base):
        __tablename__ = "mail"
        id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
        created_time: Mapped[datetime | None] = mapped_column(DateTime, server_default=func.now())

    mail = queue(model=Mail, rows=1)

    assert mail.task.status()["oldest_pending_seconds"] is None
    with pytest.raises(MappingError, match="created_time counts seconds"):
        _ = queue(model=Mail, columns={"created_time": "created_time"}).task.claims
