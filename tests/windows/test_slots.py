"""The grid of slots, for any frequency and time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from celery_claim.schedules import window
from celery_claim.windows.slots import is_fired, missed_slots, next_fire, slot_start, start_before
from celery_claim.windows.window import Definition, Window

MILLISECONDS = st.integers(10**12, 4 * 10**12)
FREQUENCIES = st.integers(1, 10**8)


def a_window(frequency: int, *, last: int = 0, active_until: int | None = None) -> Window:
    entry = window("proj.work", frequency=10, name="w")
    definition = Definition.from_entry("w", entry["kwargs"]["window"])
    return Window(
        definition=replace(definition, frequency=frequency, max_run_time=frequency // 2),
        frequency=frequency,
        max_run_time=frequency // 2,
        concurrency=1,
        enabled=True,
        overridden=frozenset(),
        last_slot_start=last,
        active_until=active_until,
        fire_seq=0,
        triggered_by=None,
        triggered_at=None,
    )


@given(MILLISECONDS, FREQUENCIES)
def test_every_instant_is_in_one_slot(now: int, frequency: int) -> None:
    start = slot_start(now, frequency)

    assert start <= now < start + frequency
    assert start % frequency == 0


@given(MILLISECONDS, FREQUENCIES)
def test_a_fired_slot_is_due_again_when_the_next_begins(now: int, frequency: int) -> None:
    fired = a_window(frequency, last=slot_start(now, frequency))

    assert is_fired(fired, now)
    assert next_fire(fired, now) == slot_start(now, frequency) + frequency
    assert not is_fired(fired, next_fire(fired, now))


@given(MILLISECONDS, FREQUENCIES, FREQUENCIES)
def test_a_change_of_frequency_never_stops_a_window(now: int, before: int, after: int) -> None:
    """Whatever slot was fired last, the window is due again within two of the new ones and one of the old."""
    changed = a_window(after, last=slot_start(now, before))

    assert not is_fired(changed, now + before + 2 * after)


@given(MILLISECONDS, FREQUENCIES, st.integers(1, 100))
def test_missed_slots_are_those_between_two_fires(now: int, frequency: int, behind: int) -> None:
    this = slot_start(now, frequency)
    seen = missed_slots(a_window(frequency, last=this - behind * frequency), now)

    expected = [this - (behind - 1) * frequency, this - frequency] if behind > 1 else []
    assert seen == expected


@given(MILLISECONDS, FREQUENCIES)
def test_slots_that_an_earlier_fire_occupied_are_not_missed(now: int, frequency: int) -> None:
    this = slot_start(now, frequency)

    assert missed_slots(a_window(frequency, last=this - 9 * frequency, active_until=this), now) == []


@given(MILLISECONDS, FREQUENCIES)
def test_a_run_may_start_for_at_least_half_a_slot(now: int, frequency: int) -> None:
    assert start_before(a_window(frequency), now) - now >= frequency // 2
