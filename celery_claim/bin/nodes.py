"""`celery claim nodes`: the register of workers."""

from __future__ import annotations

from typing import Any

import click

from celery_claim.bin.tasks import as_json, dispatcher_of, instant, print_json, print_table

_COLUMNS = ("node", "state", "role", "pid", "pool", "running", "success", "fail", "started", "heartbeat", "version")


@click.command("nodes", short_help="List workers and whether they take runs.")
@as_json
@click.pass_context
def nodes_command(ctx: click.Context, as_json: bool) -> None:
    """List the workers that windows can send runs to. Needs only the database."""
    dispatcher = dispatcher_of(ctx)
    nodes, main = dispatcher.nodes(), dispatcher.main_node()
    if as_json:
        print_json([{**node, "main": node["node"] == main} for node in nodes])
    else:
        print_table("Nodes", _COLUMNS, [_line(node, main) for node in nodes])


def _line(node: dict[str, Any], main: str | None) -> list[Any]:
    role = node["role"] or ""
    return [
        node["node"],
        "dead" if not node["alive"] else "takes runs" if node["accepting"] else "takes no runs",
        f"{role} (the main node)".strip() if node["node"] == main else role,
        node["pid"],
        node["pool_size"],
        node["running"],
        node["success"],
        node["fail"],
        instant(node["started_at"]),
        f"{node['silent_ms'] / 1000:.1f} s ago",
        node["version"],
    ]
