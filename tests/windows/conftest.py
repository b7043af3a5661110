"""The fixture `fleet`: windows on each database, with as many dispatchers and nodes as a test wants."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Database
from tests.windows.fleet import Fleet


@pytest.fixture
def fleet(database: Database) -> Fleet:
    """Windows on a fresh database of each kind."""
    return Fleet(database)


@pytest.fixture
def fleet_with(database: Database) -> Callable[..., Fleet]:
    """fleet_with(claim_log_empty_runs=False, ...) -> a fleet with settings of its own."""

    def make(**settings: object) -> Fleet:
        return Fleet(database, **settings)

    return make
