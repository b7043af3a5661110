"""The grid of a window's slots: multiples of its frequency since 1970, in milliseconds by the database's clock.

Slots are compared by their start. Their number would fall when the frequency grows, and the window would stand still
until the number had caught up.
"""

from __future__ import annotations

from celery_claim.windows.window import Window


def slot_start(now: int, frequency: int) -> int:
    """When the slot began that `now` is in."""
    return now - now % frequency


def is_fired(window: Window, now: int) -> bool:
    """Whether somebody has fired the slot that `now` is in."""
    return window.last_slot_start >= slot_start(now, window.frequency)


def is_occupied(window: Window, now: int) -> bool:
    """Whether the consumers of an earlier fire still have their time."""
    return window.active_until is not None and window.active_until > now


def next_fire(window: Window, now: int) -> int:
    """When the window can be fired next, as far as is known now; not before `now`."""
    start = slot_start(now, window.frequency)
    due = start + window.frequency if is_fired(window, now) else now
    return max(due, window.active_until or 0)


def start_before(window: Window, fired_at: int) -> int:
    """Until when a consumer may start: later, what is left of its time would run into the next slot."""
    return fired_at + max(window.frequency - window.max_run_time, window.frequency // 2)


def missed_slots(window: Window, now: int) -> list[int]:
    """First and last of the slots before this one that nobody fired though somebody should have; or nothing.

    None are missing before a first fire, nor where an earlier fire occupied the window to the slot's end. (Pausing,
    and changing the frequency, move last_slot_start.)
    """
    if window.last_slot_start == 0:
        return []
    frequency, this = window.frequency, slot_start(now, window.frequency)
    first = slot_start(window.last_slot_start, frequency) + frequency
    if window.active_until is not None:
        # A slot that the earlier fire reached into but not through was free in the end.
        first = max(first, slot_start(window.active_until, frequency))
    last = this - frequency
    return [first, last] if first <= last else []
