"""The fixture `queue`: a claimable table with a task on it."""

from tests.conformance.tables import queue

__all__ = ["queue"]
