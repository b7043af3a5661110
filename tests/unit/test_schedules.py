"""window(): an entry of beat_schedule, or an error that says what cannot work."""

from __future__ import annotations

import json

import pytest
from celery import Celery

from celery_claim import window
from celery_claim.exceptions import ConfigurationError
from celery_claim.schedules import FIRE_QUEUE, FIRE_TASK


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
    assert entry["kwargs"]["window"]["task"] == send_mail.name
