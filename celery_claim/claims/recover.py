"""Give rows back whose owner is gone, make due retries claimable, and do what an operator asks for.

Each changes rows by key, in key order, and repeats the condition under which it chose them: an owner that finished,
renewed or was recovered by somebody else between the two statements keeps what it has. A crash between them leaves
nothing behind; several workers may do this at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from celery_claim.claims.sql.statements import ENDLESS_SECONDS, Statements
from celery_claim.claims.write_back import changed_keys
from celery_claim.database import Link
from celery_claim.exceptions import Contention
from celery_claim.states import Status

logger = logging.getLogger(__name__)

PAGE = 100


def recover(
    link: Link,
    statements: Statements,
    *,
    lease_seconds: int | None,
    override: bool = False,
    max_reclaims: int | None = None,
    limit: int | None = None,
) -> list[Any]:
    """Give back rows whose lease has expired, in key order; a row that lost more than `max_reclaims` owners fails.

    Each row is judged by the lease its owner was promised; `lease_seconds` counts for rows without one, or for all
    with `override`. Rows in progress without a claim time get one first, and are judged when their lease is over.
    Returns the keys that were given back or failed.
    """
    _date(link, statements)
    bounded = bool(_bound(statements, max_reclaims))
    update = statements.recover(override=override, bounded=bounded)
    parameters: dict[str, Any] = {"lease": ENDLESS_SECONDS if lease_seconds is None else lease_seconds}
    changing = parameters | _bound(statements, max_reclaims)

    def page(behind: bool) -> Any:
        return statements.expired(override=override, behind=behind)

    return _change_pages(link, statements, page, parameters, update, changing, _ended(link, statements), limit)


def blame(
    link: Link, statements: Statements, token: str, keys: Sequence[Any], *, max_reclaims: int | None
) -> list[Any]:
    """Give back rows of ours whose handler ended its run; counted like a lost owner, and bounded like one.

    A row that overruns its time limit each time would else be claimed first for ever. Returns the keys changed.
    """
    bound = _bound(statements, max_reclaims)
    parameters = {**bound, "keys": sorted(keys), "token": token}
    return _change(link, statements.release_blamed(bounded=bool(bound)), parameters, _ended(link, statements))


def _bound(statements: Statements, max_reclaims: int | None) -> dict[str, Any]:
    """The parameters of statements that fail a row with too many lost owners; empty where nothing counts them."""
    if max_reclaims is None or not statements.of.has("reclaim_count"):
        return {}
    bound: dict[str, Any] = {"max_reclaims": max_reclaims}
    if statements.of.has("error_message"):
        error = f"lost {max_reclaims + 1} owners in a row: each died, was cut off or ran out of time on this row"
        bound["error"] = error[: statements.of.width("error_message", 500)]
    return bound


def promote(link: Link, statements: Statements, *, limit: int = 1000) -> list[Any]:
    """Make retries that are due claimable, the longest due first, at most about `limit`; returns their keys."""
    if not statements.of.delays or statements.of.waits_as_pending:
        return []
    promoted: list[Any] = []
    while len(promoted) < limit:
        keys = sorted(link.execute(statements.due, {"limit": PAGE}).scalars())
        changed = _change(link, statements.promote, {"keys": keys}, _in(link, statements, Status.PENDING))
        promoted += changed
        if len(keys) < PAGE or not changed:
            break
    return promoted


def retry_failed(
    link: Link, statements: Statements, *, keys: Sequence[Any] | None = None, like: str | None = None
) -> list[Any]:
    """Make failed rows claimable again with fresh counters: those given, or all, or those whose error is LIKE that."""
    update = statements.retry_failed(like=like is not None)
    parameters = {} if like is None else {"like": like}
    confirm = _in(link, statements, Status.PENDING)
    if keys is not None:
        return _change_all(link, update, parameters, keys, _in(link, statements, Status.FAILED), confirm)

    def page(behind: bool) -> Any:
        return statements.failed(like=like is not None, behind=behind)

    return _change_pages(link, statements, page, parameters, update, parameters, confirm, None)


def release_any(link: Link, statements: Statements, keys: Sequence[Any]) -> list[Any]:
    """Give rows in progress back whoever owns them; their owners' results will be refused. Counts nothing."""
    before, after = _in(link, statements, Status.PROCESSING), _in(link, statements, Status.PENDING)
    return _change_all(link, statements.release_any, {}, keys, before, after)


def cancel(link: Link, statements: Statements, keys: Sequence[Any]) -> list[Any]:
    """Take rows out of the queue that nobody works on; returns the keys of those that were waiting."""
    before = _in(link, statements, Status.PENDING, Status.QUEUED, Status.RETRYING)
    return _change_all(link, statements.cancel, {}, keys, before, _in(link, statements, Status.CANCELLED))


Confirm = Callable[[list[Any]], Iterable[Any]]


def _in(link: Link, statements: Statements, *states: Status) -> Confirm:
    """Which of some keys are in one of the states now."""
    return lambda keys: link.execute(statements.in_state(*states), {"keys": keys}).scalars()


def _ended(link: Link, statements: Statements) -> Confirm:
    """Which of some expired keys are out of progress now.

    Only asked where an UPDATE tells how many rows it changed but not which, and only when somebody else changed some
    of the page at the same instant.
    """
    return _in(link, statements, Status.PENDING, Status.FAILED)


def _change_pages(
    link: Link,
    statements: Statements,
    page: Callable[[bool], Any],
    reading: dict[str, Any],
    update: Any,
    changing: dict[str, Any],
    confirm: Confirm,
    limit: int | None,
) -> list[Any]:
    changed: list[Any] = []
    after: Sequence[Any] = []
    while limit is None or len(changed) < limit:
        position = {"after": after[-1]} if after else {}
        keys = link.execute(page(bool(after)), {**reading, **position, "limit": PAGE}).scalars().all()
        if not keys:
            break
        changed += _change(link, update, {**changing, "keys": keys}, confirm)
        after = keys
    return changed


def _change_all(
    link: Link, update: Any, parameters: dict[str, Any], keys: Sequence[Any], before: Confirm, after: Confirm
) -> list[Any]:
    """Change the rows among `keys` that are in the right state."""
    changed: list[Any] = []
    for start in range(0, len(keys), PAGE):
        present = sorted(before(list(keys[start : start + PAGE])))
        changed += _change(link, update, {**parameters, "keys": present}, after)
    return changed


def _change(link: Link, update: Any, parameters: dict[str, Any], confirm: Confirm) -> list[Any]:
    """Change a page of rows; one by one when somebody holds a lock on some of them, passing over those."""
    keys = parameters["keys"]
    if not keys:
        return []
    try:
        return sorted(changed_keys(link, update, parameters, confirm))
    except Contention:
        if len(keys) == 1:
            logger.info("row %r is locked by another transaction, left for the next time", keys[0])
            return []
    return [changed for key in keys for changed in _change(link, update, {**parameters, "keys": [key]}, confirm)]


def _date(link: Link, statements: Statements) -> None:
    for keys in _pages(link, statements):
        _change(link, statements.date, {"keys": keys}, lambda missing: [])


def _pages(link: Link, statements: Statements) -> Iterator[list[Any]]:
    keys = link.execute(statements.dateless(), {"limit": PAGE}).scalars().all()
    while keys:
        yield list(keys)
        following = {"limit": PAGE, "after": keys[-1]}
        keys = link.execute(statements.dateless(behind=True), following).scalars().all()
