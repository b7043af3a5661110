"""Take pending rows so that no two workers get the same one.

MySQL and MariaDB: read candidates, take them by their keys under the status guard, read back what was won. The lock
lives for one UPDATE; a loser wins fewer rows and waits for nobody. PostgreSQL and SQLite: one UPDATE ... RETURNING.

A crash leaves behind:

* after `candidates`: nothing;
* after `claim` was sent: rows in progress under a token whose owner is gone; `recover` gives them back when their
  lease ends;
* a lost answer to `claim`: the same statement with the same token is sent again on a new connection, so that
  whichever of the two was done, the rows are ours under one token, and the read back finds them.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from celery_claim.claims.sql.load import load
from celery_claim.claims.sql.statements import ENDLESS_SECONDS, Statements
from celery_claim.database import Link, persistently
from celery_claim.exceptions import ClaimError, DatabaseUnavailable, ReadOnly

logger = logging.getLogger(__name__)

#: How long to look for rows whose claim got no answer before their lease has to bring them back.
SEARCH_SECONDS = 15.0
#: How long to try to read candidates; nothing is ours yet, so a database that is down ends the run.
RECONNECT_SECONDS = 1.0


@dataclass(frozen=True)
class Claim:
    """The rows of one claim, in key order, under one token."""

    token: str
    #: time.monotonic() from before the UPDATE was sent: the lease runs from here at the latest.
    sent_at: float
    rows: dict[Any, Any] = field(default_factory=dict)
    #: How many pending rows the claim had in view; more than rows when other workers were faster.
    candidates: int = 0


def claim(
    link: Link,
    statements: Statements,
    *,
    limit: int,
    offset: int = 0,
    lease_seconds: int | None,
    worker_id: str,
    skip_locked: bool = False,
) -> Claim:
    """Take up to `limit` pending rows, passing over the first `offset`; none is not an error.

    Raises Contention when the database rolled the claim back (nothing was taken), DatabaseUnavailable when it is away.
    """
    token = uuid.uuid4().hex
    parameters: dict[str, Any] = {
        "token": token,
        "lease": ENDLESS_SECONDS if lease_seconds is None else lease_seconds,
        "worker": worker_id[: statements.of.width("worker_id", 128)],
    }
    attempt = _Attempt(link, statements, parameters)
    try:
        if link.dialect.claims_in_one_statement:
            keys, seen = attempt.in_one_statement(limit)
        elif skip_locked:
            keys, seen = attempt.under_lock(limit)
        else:
            keys, seen = attempt.by_candidates(limit, offset)
        rows = attempt.persistently(lambda: load(link, statements, keys, token)) if keys else {}
    except DatabaseUnavailable:
        raise
    except BaseException:
        # A time limit or a shutdown may strike between any two instructions: what was taken goes back at once.
        attempt.hand_back()
        raise
    return Claim(token, attempt.sent_at, rows, seen)


class _Attempt:
    def __init__(self, link: Link, statements: Statements, parameters: dict[str, Any]) -> None:
        self.link = link
        self.statements = statements
        self.parameters = parameters
        self.sent_at = time.monotonic()
        self.sent = False
        self.keys: Sequence[Any] | None = None

    def by_candidates(self, limit: int, offset: int) -> tuple[Sequence[Any], int]:
        # Tried again at once: after a long handler the server has often closed the idle connection.
        self.keys = persistently(lambda: self._candidates(limit, offset), until=time.monotonic() + RECONNECT_SECONDS)
        if not self.keys:
            return [], 0
        taken = self._send_claim()
        return (self.keys if taken else []), len(self.keys)

    def under_lock(self, limit: int) -> tuple[Sequence[Any], int]:
        try:
            with self.link.transaction():
                self.keys = self.link.execute(self.statements.locked_candidates, {"limit": limit}).scalars().all()
                self._sending()
                if self.keys:
                    self.link.execute(self.statements.claim, {**self.parameters, "keys": self.keys})
        except DatabaseUnavailable as error:
            if not self.keys:
                raise
            # Committed or not, the read back tells: what is ours carries our token.
            logger.info("the answer to a claim was lost, looking for its rows: %s", error)
        return self.keys, len(self.keys)

    def in_one_statement(self, limit: int) -> tuple[Sequence[Any], int]:
        self._sending()
        try:
            self.keys = self._take_pending(limit)
        except ReadOnly:
            raise
        except DatabaseUnavailable as error:
            logger.info("the answer to a claim was lost, looking for its rows: %s", error)
            self.keys = self.persistently(self._keys_of_token)
            if not self.keys:
                # Sent again only when it took nothing, or twice as many rows would be ours. Whichever of the two was
                # done in the end, the rows carry one token.
                persistently(lambda: self._take_pending(limit), until=time.monotonic() + RECONNECT_SECONDS)
                self.keys = self.persistently(self._keys_of_token)
        return self.keys, len(self.keys)

    def persistently(self, operation: Any) -> Any:
        return persistently(operation, until=self.sent_at + SEARCH_SECONDS)

    def hand_back(self) -> None:
        """Release whatever the claim may have taken; what cannot be reached now comes back with its lease."""
        if not self.sent:
            return
        with suppress(ClaimError):
            keys = self.keys if self.keys is not None else self._keys_of_token()
            if keys:
                self.link.execute(self.statements.release, {"keys": keys, "token": self.parameters["token"]})

    def _candidates(self, limit: int, offset: int) -> Sequence[Any]:
        return self.link.send(self.statements.candidates, {"limit": limit, "offset": offset}).scalars().all()

    def _take_pending(self, limit: int) -> Sequence[Any]:
        taken = self.link.send(self.statements.claim_pending, {**self.parameters, "limit": limit})
        return sorted(taken.scalars().all())

    def _send_claim(self) -> int:
        self._sending()
        parameters = {**self.parameters, "keys": self.keys}
        try:
            return self.link.send(self.statements.claim, parameters).rowcount
        except ReadOnly:
            raise
        except DatabaseUnavailable as error:
            logger.info("the answer to a claim was lost, asking again: %s", error)
        self.persistently(lambda: self.link.send(self.statements.claim, parameters))
        # The second UPDATE counts only what the first one had not taken.
        return len(self.keys or ())

    def _sending(self) -> None:
        self.sent_at = time.monotonic()
        self.sent = True

    def _keys_of_token(self) -> Sequence[Any]:
        found = self.link.execute(self.statements.keys_of_token, {"token": self.parameters["token"]})
        return found.scalars().all()
