"""window(): an entry of beat_schedule, or an error that says what cannot work."""

from __future__ import annotations

import json
import math
import pickle
from datetime import datetime, timezone
from unittest import mock

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from celery_claim import window
from celery_claim.exceptions import ConfigurationError
from celery_claim.schedules import FIRE_QUEUE, FIRE_TASK, grid, window_in


def test_a_window_is_a_plain_entry_of_beat():
    entry = window("proj.send_mail", frequency=10, concurrency=4, queue="mail", name="mails")

    assert (entry["task"], entry["options"]) == (FIRE_TASK, {"queue": FIRE_QUEUE})
    assert entry["schedule"].run_every.total_seconds() == 10
    definition = entry["kwargs"]["window"]
    assert (definition["task"], definition["max_run_time"], definition["concurrency"]) == ("proj.send_mail", 5, 4)
    assert json.loads(json.dumps(definition)) == definition


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"frequency": 0}, "frequency=0"),
        ({"frequency": -1}, "frequency=-1"),
        ({"frequency": True}, "frequency=True"),
        ({"frequency": "5"}, "frequency='5'"),
        ({"frequency": float("inf")}, "frequency=inf"),
        ({"frequency": 10, "max_run_time": 0}, "max_run_time=0"),
        ({"frequency": 10, "max_run_time": 5.1}, "more than half of frequency"),
        ({"frequency": 10, "concurrency": 0}, "concurrency=0"),
        ({"frequency": 10, "concurrency": 1.5}, "concurrency=1.5"),
        ({"frequency": 10, "concurrency": 4, "max_concurrency": 3}, "more than max_concurrency"),
        ({"frequency": 10, "run_type": "atuo"}, "Did you mean 'auto'"),
        ({"frequency": 10, "concurrency": 33}, "concurrency=33 is more than claim_max_concurrency=32"),
        ({"frequency": 10, "max_concurrency": 33}, "max_concurrency=33 is more than claim_max_concurrency=32"),
        ({"frequency": 10, "min_interval": 0}, "min_interval=0"),
        ({"frequency": 10, "continuous": 1}, "continuous=1"),
        ({"frequency": 10, "enabled": "no"}, "enabled='no'"),
        ({"frequency": 10, "name": "n" * 191}, "1 to 190 characters"),
        ({"frequency": 0.0001}, "frequency=0.0001"),
    ],
)
def test_a_window_that_cannot_work_is_refused(options, says):
    with pytest.raises(ConfigurationError, match=says):
        window("proj.send_mail", **options)


def test_a_task_that_is_neither_task_nor_name_is_refused():
    with pytest.raises(ConfigurationError, match="neither a task nor the name"):
        window(5, frequency=10)


@pytest.mark.parametrize("name", [None, "mail.send"])
def test_the_name_of_a_lazy_task_is_known_without_making_it(name):
    app = Celery("proj", set_as_current=False)
    options = {"name": name} if name else {}

    @app.task(shared=False, **options)
    def send_mail():
        """A task that is not made yet."""

    entry = window(send_mail, frequency=10)

    assert not app.finalized
    assert not app.configured
    assert entry["kwargs"]["window"]["task"] == send_mail.name


def test_only_a_continuous_window_may_run_longer_than_half_its_frequency():
    definition = window("proj.send_mail", frequency=10, max_run_time=60, continuous=True)["kwargs"]["window"]

    assert (definition["max_run_time"], definition["continuous"]) == (60, True)


def test_the_cap_of_the_app_is_the_one_that_counts():
    app = Celery("proj", set_as_current=False)
    app.conf.claim_max_concurrency = 100

    @app.task(shared=False)
    def send_mail():
        """A task that is not made yet."""

    assert window(send_mail, frequency=10, concurrency=64)["kwargs"]["window"]["concurrency"] == 64


def test_an_entry_is_called_by_its_key_unless_it_has_a_name():
    app = Celery("proj", set_as_current=False)
    app.conf.beat_schedule = {
        "by-key": window("proj.one", frequency=10),
        "other": window("proj.two", frequency=10, name="by-name"),
        "ordinary": {"task": "proj.three", "schedule": 10},
    }

    app.loader.app = app
    app.loader.import_default_modules()

    names = [window_in(entry) and window_in(entry)["name"] for entry in app.conf.beat_schedule.values()]
    assert names == ["by-key", "by-name", None]


# ---- the schedule object that other schedulers store


def test_the_schedule_holds_no_app_and_no_password():
    app = Celery("proj", broker="redis://:secret@localhost", set_as_current=False)
    schedule = grid(2.5, app=app)

    stored = pickle.dumps(schedule)

    assert b"secret" not in stored
    assert pickle.loads(stored) == schedule
    assert len(stored) < 200


def test_schedules_are_equal_by_their_frequency():
    assert grid(10) == grid(10.0)
    assert grid(10) != grid(99)


@given(frequency=st.floats(0.1, 1e6), now=st.floats(1e9, 2e9))
def test_it_is_due_once_in_each_slot(frequency, now):
    schedule = grid(frequency, app=Celery("proj", set_as_current=False))
    start = math.floor(now / frequency) * frequency
    with mock.patch("celery_claim.schedules.time.time", return_value=now):
        before = schedule.is_due(datetime.fromtimestamp(start - frequency / 2, timezone.utc))
        within = schedule.is_due(datetime.fromtimestamp(now, timezone.utc))

    assert before.is_due
    assert not within.is_due
    assert 0 < within.next <= frequency
