"""`celery inspect claim_windows` and `claim_nodes`: what a worker remembers of its last heartbeat.

They answer from memory: a handler that waits for a database would freeze the worker's event loop, and with it the
answers to `inspect ping`.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

from celery_claim.standing import standing_of


@inspect_command()
def claim_windows(state: Any) -> dict[str, Any]:
    """Windows as of this worker's last heartbeat."""
    standing = standing_of(state.app)
    return {"node": standing.identity.name, "windows": standing.windows}


@inspect_command()
def claim_nodes(state: Any) -> dict[str, Any]:
    """The register of nodes as of this worker's last heartbeat."""
    standing = standing_of(state.app)
    return {"node": standing.identity.name, "accepting": standing.accepting, "nodes": standing.nodes}
