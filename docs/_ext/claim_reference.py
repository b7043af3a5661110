"""Tables of the reference that are read off the code: a setting that exists is in them, with its real default.

In a page: ```{claim-reference} settings```; the argument is the name of a function below. Each returns Markdown.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import click
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_claim import Claimable, ClaimTask, Status, signals
from celery_claim.bin import claim
from celery_claim.claims.sql.columns import REQUIRED_ROLES, ROLES
from celery_claim.options import _EXPECTED
from celery_claim.settings import PREFIX, Settings
from celery_claim.states import REQUIRED_STATUSES
from celery_claim.streams.options import CONNECTION_RULES, REPLACED, RULES, StreamOptions
from celery_claim.transport.refuse import NEEDED, WELCOME

#: Options whose values are objects, which options.py checks in its own way.
_OBJECTS = {
    "model": "an ORM class or a `sqlalchemy.Table`",
    "database_url": "a SQLAlchemy URL",
    "engine": "a `sqlalchemy.Engine`",
}


def settings() -> str:
    """Every claim_* setting: default, unit, meaning, what is accepted."""
    rows = [
        (
            f"`{PREFIX}{each.name}`",
            f"`{getattr(Settings(), each.name)!r}`",
            each.metadata["unit"] or "-",
            each.metadata["meaning"],
            each.metadata["expected"],
        )
        for each in fields(Settings)
    ]
    return _table(("setting", "default", "unit", "meaning", "accepted"), rows)


def options(task: type = ClaimTask) -> str:
    """Every option that a task base adds to Celery's own: default, accepted values with their unit, meaning."""
    comments: dict[str, str] = {}
    for base in _bases(task):
        comments |= _comments(base.__module__, base.__name__)
    rows = [
        (f"`{name}`", f"`{getattr(task, name)!r}`", _OBJECTS.get(name) or _EXPECTED[name][1], comments[name])
        for name in option_names(task)
    ]
    return _table(("option", "default", "accepted", "meaning"), rows)


def option_names(task: type = ClaimTask) -> list[str]:
    """In the order of the classes."""
    ours = {*_OBJECTS, *_EXPECTED}
    return list(dict.fromkeys(name for base in _bases(task) for name in vars(base) if name in ours))


def _bases(task: type) -> list[type]:
    """The task base and those of ours it is made from, the first one first."""
    return [base for base in reversed(task.__mro__) if base.__module__.startswith("celery_claim.")]


def columns() -> str:
    """The columns of the mixin as each database gets them."""
    dialects = (mysql.dialect(), postgresql.dialect(), sqlite.dialect())  # type: ignore[no-untyped-call]
    rows = []
    for column in _example_table().columns:
        if column.name not in ROLES:
            continue
        null = "NULL" if column.nullable else f"NOT NULL DEFAULT {column.server_default.arg}"
        types = [f"`{column.type.compile(dialect=dialect)}`" for dialect in dialects]
        rows.append((f"`{column.name}`", *types, f"`{null}`", "yes" if column.name in REQUIRED_ROLES else "no"))
    return _table(("column", "MySQL, MariaDB", "PostgreSQL", "SQLite", "", "required"), rows)


def indexes() -> str:
    """The indexes of the mixin."""
    rows = []
    for index in sorted(_example_table().indexes, key=lambda each: str(each.name)):
        where = index.dialect_options["postgresql"]["where"]
        inside = ", ".join(column.name for column in index.columns)
        condition = f" WHERE {where.compile(compile_kwargs={'literal_binds': True})}" if where is not None else ""
        place = "PostgreSQL, SQLite" if where is not None else "all"
        rows.append((f"`{index.name}`", f"`({inside}){condition}`", place))
    return _table(("index of a table `mail`", "columns", "databases"), rows)


def statuses() -> str:
    """Names and numbers of the states."""
    rows = [(f"`{s.name}`", str(int(s)), "yes" if s in REQUIRED_STATUSES else "no") for s in Status]
    return _table(("status", "value", "required in `values=`"), rows)


def signal_list() -> str:
    """Every signal with its payload, from the comments in signals.py."""
    comments = _comments("celery_claim.signals", "")
    names = [name for name, value in vars(signals).items() if isinstance(value, signals.Signal)]
    return _table(("signal", "sent when; payload"), [(f"`{name}`", comments[name]) for name in names])


def commands() -> str:
    """`celery -A proj claim ...`: every command with its arguments and options."""
    context = click.Context(claim, info_name="celery -A proj claim")
    parts = []
    for name in claim.list_commands(context):
        command = claim.get_command(context, name)
        assert command is not None
        below = click.Context(command, info_name=name, parent=context)
        usage = f"celery -A proj claim {name} {' '.join(command.collect_usage_pieces(below))}"
        parts.append(f"## {name}\n\n```text\n{usage}\n```\n\n{inspect.cleandoc(command.help or '')}\n")
        records = [each.get_help_record(below) for each in command.params if isinstance(each, click.Option)]
        parts.append(_table(("option", ""), [(f"`{record[0]}`", record[1]) for record in records if record]))
    return "\n".join(parts)


def stream_options() -> str:
    """Every transport option of redis-streams:// that is ours: default, what is accepted, meaning."""
    comments = _comments("celery_claim.streams.options", "StreamOptions")
    rows = [
        (f"`{each.name}`", f"`{each.default!r}`", RULES[each.name].expected, comments[each.name])
        for each in fields(StreamOptions)
    ]
    return _table(("option", "default", "accepted", "meaning"), rows)


def connection_options() -> str:
    """Transport options that go to the connection."""
    return _table(("option", "accepted"), [(f"`{name}`", rule.expected) for name, rule in CONNECTION_RULES.items()])


def replaced_options() -> str:
    """Options of kombu's Redis transport that have no effect, and why."""
    return _table(("option", "here"), [(f"`{name}`", reason) for name, reason in REPLACED.items()])


def acl() -> str:
    """The one line that makes a user who may do what the broker needs, and no more."""
    commands = " ".join(f"+{name}" for name in (*NEEDED, *WELCOME))
    return f"```text\nACL SETUSER celery on >secret ~cs1:* {commands}\n```\n"


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "options": options,
    "columns": columns,
    "indexes": indexes,
    "statuses": statuses,
    "signals": signal_list,
    "commands": commands,
    "stream_options": stream_options,
    "connection_options": connection_options,
    "replaced_options": replaced_options,
    "acl": acl,
}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines) + "\n"


def _comments(module: str, owner: str) -> dict[str, str]:
    """The `#:` comments above the names of a class or module."""
    found = ModuleAnalyzer.for_module(module).find_attr_docs()
    return {name: " ".join(lines).strip() for (namespace, name), lines in found.items() if namespace == owner}


def _example_table() -> Any:
    class Base(DeclarativeBase):
        pass

    class Mail(Claimable, Base):
        __tablename__ = "mail"
        id: Mapped[int] = mapped_column(primary_key=True)

    return Mail.__table__


class ClaimReference(Directive):
    """Puts one of the tables into a page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from docutils.statemachine import StringList

        markdown = TABLES[self.arguments[0]]()
        holder = nodes.Element()
        content = StringList(markdown.splitlines(), source=f"claim-reference {self.arguments[0]}")
        self.state.nested_parse(content, self.content_offset, holder, match_titles=True)
        return holder.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("claim-reference", ClaimReference)
    return {"parallel_read_safe": True}
