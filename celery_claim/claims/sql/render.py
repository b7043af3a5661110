"""Statements as text, for people and for EXPLAIN."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ARRAY, Dialect, bindparam, literal
from sqlalchemy.exc import CompileError
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import BindParameter

from celery_claim.dialects.dialect import NumberList

#: Values that stand in for a claim's own when a plan is asked for.
_SAMPLES = {"limit": 20, "offset": 0, "token": "0" * 32, "lease": 600, "worker": "node-c0", "seconds": 60, "error": ""}


def render(statement: Any, dialect: Dialect) -> str:
    """The statement as the database gets it; parameters stay named, lists of keys are shown as one."""
    make: Any = type(dialect)
    named = make(paramstyle="named")
    compiled = statement.compile(dialect=named, compile_kwargs={"render_postcompile": False})
    text = str(compiled)
    for name, parameter in compiled.binds.items():
        # SQLAlchemy writes status values, and lists of keys, into the text only when it executes it.
        value = f":{name}" if parameter.value is None else repr(parameter.value)
        text = text.replace(f"__[POSTCOMPILE_{name}]", value)
    return " ".join(text.split())


def render_sample(statement: Any, dialect: Dialect, key_type: Any) -> str:
    """The statement with sample values written into it."""

    def sample(element: Any, **_: Any) -> Any:
        if not isinstance(element, BindParameter) or element.value is not None:
            return None
        if element.expanding:
            return bindparam(element.key, [_sample_key(key_type)], type_=element.type, expanding=True)
        if isinstance(element.type, (NumberList, ARRAY)):
            return literal([_sample_key(key_type)], element.type)
        return literal(_SAMPLES.get(element.key, 1), element.type)

    filled = visitors.replacement_traverse(statement, {}, sample)
    try:
        return str(filled.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    except CompileError:  # a key type without a literal form: its plan is not looked at
        return ""


def _sample_key(key_type: Any) -> Any:
    return "0" if key_type.python_type is str else 0
