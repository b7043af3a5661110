"""Statements compiled once: a consumer sends the same few all day, and SQLAlchemy's work on each costs 60 us."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, CursorResult, Dialect
from sqlalchemy.types import Integer, NullType

from celery_claim.dialects.dialect import NumberList


class Prepared:
    """A statement's text and parameters as the driver wants them."""

    def __init__(self, statement: Any, dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect)
        self._text = str(compiled)
        self._constants = {name: value for name, value in compiled.params.items() if value is not None}
        self._written: dict[str, tuple[str, Callable[[Any], str]]] = {}
        self._processed: dict[str, Callable[[Any], Any]] = {}
        for parameter, name in compiled.bind_names.items():
            if isinstance(parameter.type, NumberList):
                self._written[name] = (f"__[POSTCOMPILE_{name}]", parameter.type.literal_processor(dialect))
                self._constants.pop(name, None)
                continue
            process = parameter.type.dialect_impl(dialect).bind_processor(dialect)
            if process is not None:
                self._processed[name] = process
        # In order where the driver counts its parameters, by name where it names them.
        self._counted = compiled.positiontup is not None
        names = compiled.positiontup or compiled.bind_names.values()
        self._names = [name for name in names if name not in self._written]

    @staticmethod
    def suits(statement: Any, dialect: Dialect) -> bool:
        """Whether nothing in the statement has to be rendered anew for each execution, nor results be converted."""
        compiled = statement.compile(dialect=dialect)
        rendered = compiled.literal_execute_params | compiled.post_compile_params
        plain = all(isinstance(parameter.type, NumberList) for parameter in rendered)
        returned = getattr(statement, "exported_columns", None) or ()
        # A column of the user's with a Python function as its onupdate gets a new value at each execution.
        if compiled.update_prefetch:
            return False
        return plain and all(isinstance(column.type, (Integer, NullType)) for column in returned)

    def execute(self, connection: Connection, parameters: Mapping[str, Any]) -> CursorResult[Any]:
        """Run it with the values of its parameters by name."""
        text = self._text
        for name, (placeholder, write) in self._written.items():
            text = text.replace(placeholder, write(parameters[name]))
        values = {**self._constants, **parameters}
        for name, process in self._processed.items():
            values[name] = process(values[name])
        if self._counted:
            return connection.exec_driver_sql(text, tuple([values[name] for name in self._names]))
        return connection.exec_driver_sql(text, {name: values[name] for name in self._names})
