"""How long to wait before the next try."""

from __future__ import annotations

import random


def exponential(attempt: int, *, base: float, cap: float, jitter: bool = True) -> float:
    """Seconds before try number `attempt` + 1: base, 2 base, 4 base ... up to cap, times 0.5-1.5 with jitter.

    Without the jitter, rows that failed together in an outage would all come back in the same second.
    """
    seconds: float = min(cap, base * 2 ** min(attempt, 62))
    return min(cap, seconds * random.uniform(0.5, 1.5)) if jitter else seconds


def full_jitter(attempt: int, *, base: float = 0.005, cap: float = 0.2) -> float:
    """Seconds before the next try of one statement after a deadlock or a lock wait: anything up to the bound."""
    return random.uniform(base, min(cap, base * 2 ** min(attempt + 1, 16)))
