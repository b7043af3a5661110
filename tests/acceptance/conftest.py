"""The stage of the acceptance tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.stage import Stage
from tests.conftest import Database
from tests.processes import CeleryProcesses


@pytest.fixture
def stage(redis_server: Any, celery_processes: CeleryProcesses, tmp_path: Path) -> Callable[..., Stage]:
    """stage(database, lease_seconds=5, ...) -> a Stage whose processes end with the test."""

    def set_up(database: Database, **options: Any) -> Stage:
        return Stage(database, redis_server.url, celery_processes, tmp_path, **options)

    return set_up
