"""The fixtures `queue`, a claimable table with a task on it, and `fleet`, windows on a database."""

from tests.conformance.tables import queue
from tests.windows.conftest import fleet

__all__ = ["fleet", "queue"]
