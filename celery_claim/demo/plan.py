"""What one demo run is made of; handed to the worker and beat processes through their environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

#: Every table of the demo begins with this, celery_claim's own ones included, so that all of them can be dropped.
TABLE_PREFIX = "celery_claim_demo_"

#: The key of the window in beat_schedule.
WINDOW = "hash-files"

#: Carries the plan to the processes. The environment is not shown by `ps`, as arguments would be: URLs hold passwords.
VARIABLE = "CELERY_CLAIM_DEMO_PLAN"


@dataclass(frozen=True)
class Plan:
    """The URLs and sizes of one demo run."""

    database: str = field(repr=False)
    broker: str = field(repr=False)
    #: Name of the queue, of this run only, so that a broker in use by others is not disturbed.
    queue: str
    transport_options: dict[str, Any] = field(default_factory=dict)
    consumers: int = 4
    workers: int = 2
    #: Rows per claim. A worker that is killed holds up to this many for each of its processes.
    batch_size: int = 20
    #: Short, so that the rows of the killed worker come back while one watches. Live workers renew theirs.
    lease_seconds: int = 5
    #: Seconds between two windows; rows are started in the first half of each.
    frequency: float = 2.0

    def to_environment(self) -> dict[str, str]:
        """The environment variable that holds this plan."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Plan:
        """The plan that this process was started with. Raises LookupError when it was not started by the demo."""
        if VARIABLE not in os.environ:
            raise LookupError(
                f"{VARIABLE} is not set: celery_claim.demo.project is run by `python -m celery_claim.demo`"
            )
        return cls(**json.loads(os.environ[VARIABLE]))
