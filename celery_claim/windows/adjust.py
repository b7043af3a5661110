"""Change a window: what code declares, and what a person sets at run time.

What code declares goes into the table whenever it differs. What a person sets stands in columns of its own, and a
deploy never touches those.
"""

from __future__ import annotations

from collections.abc import Iterable

from celery_claim.database import Link
from celery_claim.exceptions import ConfigurationError, ValueRefused
from celery_claim.windows.fire import Rules, Run, lock, read_field, run_row, runs_at
from celery_claim.windows.place import Place
from celery_claim.windows.slots import is_occupied, slot_start
from celery_claim.windows.sql.statements import WindowStatements
from celery_claim.windows.window import Definition, Window


def register(link: Link, statements: WindowStatements, definitions: Iterable[Definition], rules: Rules) -> list[str]:
    """Write new and changed definitions into the table; returns their names."""
    rows = link.execute(statements.look).mappings().all()
    known = {row["name"]: row for row in rows}
    changed = []
    for definition in definitions:
        row = known.get(definition.name)
        if row is None:
            try:
                link.execute(statements.add_window, {"name": definition.name, **definition.columns})
            except ValueRefused:  # another process starts at the same time and was faster
                if link.execute(statements.bounds, {"name": definition.name}).first() is None:
                    raise
        elif any(row[column] != value for column, value in definition.columns.items()):
            _redefine(link, statements, definition, rules)
        else:
            continue
        changed.append(definition.name)
    return changed


def _redefine(link: Link, statements: WindowStatements, definition: Definition, rules: Rules) -> None:
    with link.transaction():
        windows, now = lock(link, statements, [definition.name], rules)
        for window in windows:
            values = definition.columns
            frequency = window.frequency if "frequency" in window.overridden else definition.frequency
            enabled = window.enabled if "enabled" in window.overridden else definition.enabled
            if frequency != window.frequency or (enabled and not window.enabled):
                values["last_slot_start"] = _passed(window, frequency, now)
            link.execute(statements.change_window(**values), {"window_name": window.name})


def _passed(window: Window, frequency: int, now: int) -> int:
    """A last_slot_start under which the window fires at its next slot, not at once, and nothing counts as missed.

    Never smaller than it was: on a longer grid this slot may begin before the last one that was fired.
    """
    return max(window.last_slot_start, slot_start(now, frequency))


def pause(link: Link, statements: WindowStatements, name: str, rules: Rules) -> None:
    """Fire no further slot; consumers that are at work end between two rows. Raises LookupError."""
    with link.transaction():
        _locked(link, statements, name, rules)
        link.execute(statements.change_window(enabled_override=False), {"window_name": name})


def resume(link: Link, statements: WindowStatements, name: str, rules: Rules) -> None:
    """Fire again, from the next slot on. Raises LookupError."""
    with link.transaction():
        window, now = _locked(link, statements, name, rules)
        values: dict[str, object] = {"enabled_override": None if window.definition.enabled else True}
        if not window.enabled:
            values["last_slot_start"] = _passed(window, window.frequency, now)
        link.execute(statements.change_window(**values), {"window_name": name})


def set_concurrency(
    link: Link, statements: WindowStatements, name: str, concurrency: int | None, rules: Rules
) -> tuple[Window, list[Run]]:
    """Change how many consumers a window has; None: as declared. Returns the window as it is now, and the runs that
    an open window gets at once.

    Lower, and consumers with a number too high end between two rows. Raises LookupError, and ConfigurationError for a
    number above the cap.
    """
    with link.transaction():
        window, _ = _locked(link, statements, name, rules)
        _check_cap(window, concurrency, rules)
        link.execute(statements.change_window(concurrency_override=concurrency), {"window_name": name})
        changed, _ = _locked(link, statements, name, rules)
        seen = read_field(link, statements, rules)
        runs: list[Run] = []
        if changed.concurrency > window.concurrency and changed.enabled and is_occupied(changed, seen.now):
            runs = _extra_runs(link, statements, window, changed, seen.places(changed, rules.queue_of(changed)))
            if runs:
                link.execute(statements.add_runs, [run_row(run, seen.now, "scheduled") for run in runs])
    return changed, runs


def _extra_runs(
    link: Link,
    statements: WindowStatements,
    before: Window,
    window: Window,
    chosen: tuple[int, list[Place]] | str,
) -> list[Run]:
    """Runs for the consumers that come on top; not for those of this fire that have ended because nothing was left."""
    if isinstance(chosen, str):
        return []
    consumers, free = chosen
    rows = link.execute(statements.attempts, {"window": window.name, "fire_seq": window.fire_seq}).mappings()
    attempts = {(row["node"], row["consumer_id"]): row["attempt"] for row in rows if row["consumer_id"] is not None}
    if window.run_type == "any":
        # Its runs got a node when they started; a waiting one has none.
        highest: dict[tuple[str, int], int] = {}
        for (_, consumer_id), attempt in attempts.items():
            highest["", consumer_id] = max(attempt, highest.get(("", consumer_id), 0))
        attempts = highest
    extra = [place for place in free if place.consumer_id >= before.concurrency]
    return runs_at(window, window.fire_seq, consumers, extra, attempts)


def forget(link: Link, statements: WindowStatements, name: str) -> bool:
    """Take a window that code does not declare any more out of the table; its history stays."""
    return bool(link.execute(statements.forget_window, {"name": name}).rowcount)


def _check_cap(window: Window, concurrency: int | None, rules: Rules) -> None:
    if concurrency is None:
        return
    most = min(rules.cap, window.definition.max_concurrency or rules.cap)
    if not 1 <= concurrency <= most:
        which = "max_concurrency of the window" if most < rules.cap else "claim_max_concurrency"
        raise ConfigurationError(
            f"window {window.name}: concurrency {concurrency} does not work, expected 1 to {most} ({which}); "
            "to stop a window, pause it"
        )


def _locked(link: Link, statements: WindowStatements, name: str, rules: Rules) -> tuple[Window, int]:
    windows, now = lock(link, statements, [name], rules)
    if not windows:
        raise LookupError(f"no window is called {name!r}")
    return windows[0], now
