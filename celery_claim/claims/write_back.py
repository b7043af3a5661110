"""Write what became of claimed rows, unless somebody else owns them now.

Every UPDATE names the key, `status = PROCESSING` and our token. A crash leaves behind:

* before the UPDATE reached the server: the row in progress; its effect is done again after the lease (at least once);
* after it: nothing, the row has ended;
* a lost answer: the UPDATE is sent again and matches nothing if the first one was done; the row is then found out of
  progress with our token, and that counts as written.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from celery_claim.claims.sql.load import names_of_values
from celery_claim.claims.sql.statements import Statements
from celery_claim.database import Link
from celery_claim.exceptions import ValueRefused
from celery_claim.states import Status

logger = logging.getLogger(__name__)

#: Rows in one statement: enough to save the round trips, few enough to keep its locks short.
GROUP = 100

#: What the table, or the driver before it, says to a value: too long, a character it cannot hold, no type it knows.
REFUSALS = (ValueRefused, TypeError, ValueError, OverflowError, AttributeError)


@dataclass(frozen=True)
class Outcome:
    """What became of a row."""

    status: Status
    #: Why, for people; cut to the column.
    error: str | None = None
    #: Seconds until a row in state RETRYING is due.
    delay: float = 0.0
    #: The row's own columns to write in the same UPDATE.
    values: Mapping[str, Any] = field(default_factory=dict)
    #: The exception behind it, for whoever reports the outcome.
    cause: BaseException | None = field(default=None, compare=False)


@dataclass(frozen=True)
class WriteBack:
    """Keys whose outcome is in the table, and keys that were not ours any more."""

    written: dict[Any, Outcome] = field(default_factory=dict)
    lost: list[Any] = field(default_factory=list)

    def __add__(self, other: WriteBack) -> WriteBack:
        return WriteBack({**self.written, **other.written}, [*self.lost, *other.lost])


def write_back(link: Link, statements: Statements, token: str, outcomes: Mapping[Any, Outcome]) -> WriteBack:
    """Write the outcomes of rows under one token, alike ones in one statement; safe to repeat after a fault."""
    result = WriteBack()
    for alike in _groups(outcomes):
        result += _write(link, statements, token, alike)
    return result


def release(link: Link, statements: Statements, token: str, keys: Sequence[Any], *, counted: bool = False) -> list[Any]:
    """Give rows of ours back; returns the keys that were not ours any more."""
    statement = statements.release_counted if counted else statements.release
    lost: list[Any] = []
    for group in _chunks(sorted(keys), GROUP):
        changed = changed_keys(
            link, statement, {"keys": group, "token": token}, lambda keys: _released(link, statements, keys)
        )
        lost += [key for key in group if key not in changed]
    return lost


def changed_keys(
    link: Link,
    statement: Any,
    parameters: Mapping[str, Any],
    confirm: Callable[[list[Any]], Iterable[Any]],
    *,
    keys: Sequence[Any] | None = None,
    kept: bool = False,
) -> set[Any]:
    """The keys that an UPDATE by keys changed; `confirm` tells for those that it does not account for.

    `keys` where the parameter of that name is a single one; `kept` for a statement object that is sent again.
    """
    keys = parameters["keys"] if keys is None else keys
    result = (link.send if kept else link.execute)(statement, parameters)
    if result.returns_rows:
        changed = set(result.scalars())
    else:
        changed = set(keys) if result.rowcount == len(keys) else set()
    missing = [key for key in keys if key not in changed]
    return changed.union(confirm(missing)) if missing else changed


class Buffer:
    """Outcomes that wait to be written together. The consumer fills it; the renewer may empty it meanwhile."""

    def __init__(self, statements: Statements, token: str) -> None:
        self._statements = statements
        self._token = token
        self._lock = threading.Lock()
        self._outcomes: dict[Any, Outcome] = {}
        self._oldest = math.inf

    def __len__(self) -> int:
        return len(self._outcomes)

    def __contains__(self, key: Any) -> bool:
        return key in self._outcomes

    def add(self, key: Any, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes[key] = outcome
            if len(self._outcomes) == 1:
                self._oldest = time.monotonic()

    @property
    def oldest(self) -> float:
        """time.monotonic() of the first outcome in it; infinite when it is empty."""
        return self._oldest

    def flush(self, link: Link) -> WriteBack:
        """Write what is in it. After an error everything is still in it."""
        with self._lock:
            if not self._outcomes:
                return WriteBack()
            result = write_back(link, self._statements, self._token, self._outcomes)
            self._outcomes, self._oldest = {}, math.inf
            return result

    def give_up(self) -> WriteBack:
        """Empty it without writing: the rows are somebody else's by now."""
        with self._lock:
            lost = list(self._outcomes)
            self._outcomes, self._oldest = {}, math.inf
            return WriteBack(lost=lost)


def _groups(outcomes: Mapping[Any, Outcome]) -> Iterator[dict[Any, Outcome]]:
    """Outcomes that one statement can write, in key order: other orders make deadlocks of two such statements."""
    alike: dict[Any, list[Any]] = {}
    for key in sorted(outcomes):
        outcome = outcomes[key]
        values = tuple(sorted(outcome.values)) if outcome.values else ()
        alike.setdefault((outcome.status, outcome.error, outcome.delay, values), []).append(key)
    for keys in alike.values():
        for chunk in _chunks(keys, GROUP):
            yield {key: outcomes[key] for key in chunk}


def _chunks(keys: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(keys)
    while chunk := list(islice(rest, size)):
        yield chunk


def _write(link: Link, statements: Statements, token: str, alike: dict[Any, Outcome]) -> WriteBack:
    try:
        return _write_alike(link, statements, token, alike)
    except REFUSALS as refused:
        if len(alike) == 1:
            ((key, outcome),) = alike.items()
            return _write_what_fits(link, statements, token, key, outcome, refused)
    result = WriteBack()
    for key, outcome in alike.items():
        result += _write(link, statements, token, {key: outcome})
    return result


def _write_what_fits(
    link: Link, statements: Statements, token: str, key: Any, outcome: Outcome, refused: Exception
) -> WriteBack:
    """Write an outcome whose texts or values the table refuses as nearly as it takes them.

    The effect is done: whatever happens here, the row must not be run again because of it.
    """
    reason = f"the handler succeeded, but the table refuses its values: {refused}"
    logger.error("row %r of %s: %s", key, statements.of.name, refused)
    nearly = [replace(outcome, error=_plain(outcome.error), values={n: _plain(v) for n, v in outcome.values.items()})]
    if outcome.values:
        nearly.append(Outcome(Status.FAILED, error=_plain(reason)))
        nearly.append(Outcome(Status.FAILED))
    else:
        nearly.append(replace(outcome, error=None))
    for attempt in nearly[:-1]:
        try:
            return _write_alike(link, statements, token, {key: attempt})
        except REFUSALS:
            continue
    return _write_alike(link, statements, token, {key: nearly[-1]})


def _plain(value: Any) -> Any:
    """A text with NULs, lone surrogates and characters beyond the basic plane (4 bytes in UTF-8) written as escapes."""
    if not isinstance(value, str):
        return value
    # A lone surrogate is how Python shows a byte of a file's name that is no text: errors quote such names.
    plain = (
        c if "\0" < c < "\ud800" or "\udfff" < c <= "\uffff" else c.encode("unicode_escape").decode() for c in value
    )
    return "".join(plain)


def _write_alike(link: Link, statements: Statements, token: str, alike: dict[Any, Outcome]) -> WriteBack:
    keys = list(alike)
    one = len(keys) == 1
    chosen = statements.for_one if one else statements
    statement, parameters = _statement(chosen, alike)

    def confirm(missing: list[Any]) -> Iterable[Any]:
        return link.execute(statements.written, {"keys": missing, "token": token}).scalars()

    parameters |= {"keys": keys[0] if one else keys, "token": token}
    changed = changed_keys(link, statement, parameters, confirm, keys=keys, kept=chosen.keeps(statement))
    if len(changed) == len(keys):
        return WriteBack(alike)
    return WriteBack(
        {key: outcome for key, outcome in alike.items() if key in changed}, [key for key in keys if key not in changed]
    )


def _statement(statements: Statements, alike: dict[Any, Outcome]) -> tuple[Any, dict[str, Any]]:
    """The one statement for outcomes that are alike, and its parameters."""
    first = next(iter(alike.values()))
    if first.status is Status.SUCCEEDED:
        if not first.values:
            return statements.succeed, {}
        names = names_of_values(statements, first.values)
        if len(alike) == 1:
            return statements.succeed_with(names), {f"value_{i}": first.values[name] for i, name in enumerate(names)}
        return statements.succeed_each(names, len(alike)), dict(_numbered(statements, names, alike))
    width = statements.of.width("error_message", 500)
    error = None if first.error is None else first.error.replace("\0", "\\x00")[:width]
    if first.status is Status.FAILED:
        return statements.fail, {"error": error}
    # One second more than asked: the clock is cut to whole seconds, and a retry must not come early.
    seconds = math.ceil(first.delay) + 1 if first.delay > 0 else 0
    return statements.retry, {"error": error, "seconds": seconds}


def _numbered(statements: Statements, names: Sequence[str], alike: dict[Any, Outcome]) -> Iterator[tuple[str, Any]]:
    for number, (key, outcome) in enumerate(alike.items()):
        yield f"key_{number}", key
        for i, name in enumerate(names):
            yield f"value_{i}_{number}", outcome.values[name]


def _released(link: Link, statements: Statements, keys: list[Any]) -> Iterable[Any]:
    return link.execute(statements.in_state(Status.PENDING), {"keys": keys}).scalars()
