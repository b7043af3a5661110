"""Run a handler in the same transaction as the write back of its row: both happen, or neither.

A crash leaves behind:

* before COMMIT reached the server: nothing of the handler's writes, the row in progress; `recover` gives it back;
* after it: nothing, the row has ended;
* a lost answer to COMMIT: a renewal by our token waits for the row lock of the unfinished transaction, if there is
  one. It matches if that transaction was rolled back, and the row goes back; if it matches nothing, the commit was
  done and the row is found out of progress with our token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from celery_claim.claims.claim import SEARCH_SECONDS
from celery_claim.claims.sql.session import OwnTransaction
from celery_claim.claims.sql.statements import Statements
from celery_claim.claims.write_back import Outcome, WriteBack, changed_keys
from celery_claim.database import Database, persistently
from celery_claim.exceptions import Contention, DatabaseUnavailable, StatementRefused, ValueRefused
from celery_claim.rows.process import Judge, Verdict, process
from celery_claim.states import Status

logger = logging.getLogger(__name__)


def transact(
    database: Database,
    statements: Statements,
    token: str,
    key: Any,
    row: Any,
    handler: Callable[[Any, Any], Any],
    judge: Judge,
) -> Verdict | WriteBack:
    """Run the handler with a session and commit its writes together with the row's success.

    Returns what was committed, or the row as lost (and nothing was committed), or the verdict on a row that did not
    succeed, which is still to be written.
    """
    try:
        with OwnTransaction(database) as transaction:
            verdict = process(row, lambda row: _run(handler, row, transaction), judge)
            outcome = verdict.outcome
            if outcome is None or outcome.status is not Status.SUCCEEDED:
                return verdict
            return _commit(database, statements, token, key, row, transaction, outcome, judge)
    except Contention as error:
        logger.info("row %r of %s goes back, the database was busy: %s", key, statements.of.name, error)
        return Verdict(None)


def _run(handler: Callable[[Any, Any], Any], row: Any, transaction: OwnTransaction) -> Any:
    returned = handler(row, transaction.session)
    if not transaction.is_active:
        raise RuntimeError("the handler rolled its session back; to undo its writes, raise, or return Retry or Fail")
    # What the table refuses is the handler's error, with its own traceback, not one of the commit.
    transaction.session.flush()
    return returned


def _commit(
    database: Database,
    statements: Statements,
    token: str,
    key: Any,
    row: Any,
    transaction: OwnTransaction,
    outcome: Outcome,
    judge: Judge,
) -> Verdict | WriteBack:
    try:
        if not transaction.succeed(statements, token, key, dict(outcome.values)):
            return WriteBack(lost=[key])
        transaction.commit()
    except DatabaseUnavailable as error:
        logger.info("the answer to a commit was lost, looking what became of row %r: %s", key, error)
        return _after_lost_commit(database, statements, token, key, outcome)
    except (ValueRefused, StatementRefused, TypeError, ValueError) as error:
        # Also a statement refused: PostgreSQL refuses all that follow an error that the handler caught and hid. Raised,
        # it would end each run at this row, and nothing behind it would ever be reached.
        return judge(error, row)
    return WriteBack({key: outcome})


def _after_lost_commit(
    database: Database, statements: Statements, token: str, key: Any, outcome: Outcome
) -> Verdict | WriteBack:
    parameters = {"keys": [key], "token": token}
    with database.linked() as link:

        def still_ours() -> bool:
            # Waits for the lock of the transaction whose end is not known, if the server has not ended it yet.
            confirm = link.execute(statements.won_keys, parameters).scalars
            return bool(changed_keys(link, statements.renew, parameters, lambda missing: confirm()))

        until = time.monotonic() + SEARCH_SECONDS
        if persistently(still_ours, until=until):
            return Verdict(None)
        written = persistently(lambda: link.execute(statements.written, parameters).scalars().all(), until=until)
    return WriteBack({key: outcome}) if written else WriteBack(lost=[key])
