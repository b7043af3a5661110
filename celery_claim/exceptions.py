"""What celery_claim raises.

::

    ClaimError
    ├── ConfigurationError      also celery's ImproperlyConfigured: a setting or option cannot work
    │   └── MappingError        a table cannot be claimed with the given columns and values
    ├── ClaimLost               another worker owns the row now
    ├── DatabaseUnavailable     the database is down or is read-only
    │   ├── AccessDenied        the database refuses our user, password or database name
    │   └── ReadOnly            the server takes no writes: a replica, or a failover
    ├── BrokerUnavailable       the broker cannot be reached, or refuses what was asked
    ├── MessageDead             a message went to the dead letters; its task's result says so
    │   ├── DeliveryLimitExceeded   it was delivered again and again without an end
    │   └── MessageRefused          it was rejected, or cannot be read
    ├── Contention              a deadlock or a lock wait that did not go away
    ├── ValueRefused            the table does not take a value
    ├── BulkFailed              bulk() stopped in the middle; it knows what was sent
    └── StatementRefused        the server does not run a statement: a column or a privilege is missing

A lost race, an empty table, a closed window are answers, not errors: they are returned.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from celery.exceptions import ImproperlyConfigured


class ClaimError(Exception):
    """Base of everything that celery_claim raises."""


class ConfigurationError(ClaimError, ImproperlyConfigured):
    """A setting or a task option that cannot work: names it, what was expected and what to do."""


class MappingError(ConfigurationError):
    """This table cannot be claimed with these columns, values and keys."""


class ClaimLost(ClaimError):
    """Another worker owns this row now. Its result was not written; nothing to undo."""

    def __init__(self, key: object) -> None:
        super().__init__(f"row {key!r} is no longer ours: its lease expired and it was taken over, or it was released")
        self.key = key


class DatabaseUnavailable(ClaimError):
    """The database is down, refuses the connection, or is read-only. No row changed its state because of it."""


class AccessDenied(DatabaseUnavailable):
    """The database refuses our user, password or database name: waiting will not help."""


class ReadOnly(DatabaseUnavailable):
    """The server takes no writes: it is a replica, or in the middle of a failover. The statement was not done."""


class BrokerUnavailable(ClaimError):
    """The broker cannot be reached, refuses user or password, or does not run a command. The text has no password."""


class MessageDead(ClaimError):
    """A message is a dead letter of its queue: `celery claim dead QUEUE` lists it and puts it back."""


class DeliveryLimitExceeded(MessageDead):
    """A message was delivered `delivery_limit` times and its task never came to an end; it is not tried again."""


class MessageRefused(MessageDead):
    """A message was rejected, or no worker can read it; its task was not run."""


class Contention(ClaimError):
    """Other transactions kept the rows locked, or the server chose our statement as a deadlock's victim."""


class ValueRefused(ClaimError):
    """The table does not take a value: too long, out of range, a character it cannot hold, a broken constraint."""


class StatementRefused(ClaimError):
    """The server does not run a statement: a column, a table or a privilege is missing."""


class BulkFailed(ClaimError):
    """`bulk` stopped in the middle, for the reason in ``__cause__``."""

    def __init__(self, sent: list[str], uncertain: list[str]) -> None:
        super().__init__(
            f"{len(sent)} tasks were sent, of {len(uncertain)} more it is not known, the rest were not sent"
        )
        #: Ids of the tasks that were sent: of the first items, in their order.
        self.sent = sent
        #: Ids of the tasks, of the items after those, that may have been sent. Their messages went out together.
        self.uncertain = uncertain


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint such as `` Did you mean 'batch_size'?``, or nothing when no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
