"""Options of a task: unknown names and values that cannot work are refused when the app starts, with the place."""

from __future__ import annotations

import pytest
from celery import Celery
from sqlalchemy import BigInteger, Column, MetaData, SmallInteger, String, Table

from celery_claim import ClaimTask
from celery_claim.exceptions import ConfigurationError

TABLE = Table(
    "mail",
    MetaData(),
    Column("id", BigInteger, primary_key=True),
    Column("status", SmallInteger),
    Column("claim_time", BigInteger),
    Column("claim_token", String(32)),
)


def make(handler=None, base=ClaimTask, **options):
    app = Celery("proj", broker="memory://", set_as_current=False)
    options.setdefault("model", TABLE)

    def handle(row):
        """The default handler."""

    task = app.task(base=base, name="work", shared=False, **options)(handler or handle)
    _ = task.name  # Celery makes the task when it is first used
    return task


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("batchsize", "batch_size"),
        ("lease_second", "lease_seconds"),
        ("retrybackoff", "retry_backoff"),
        ("que", "queue"),
    ],
)
def test_an_unknown_option_is_refused_with_a_hint_and_the_place(wrong, meant):
    with pytest.raises(ConfigurationError, match=rf"test_options.py:\d+.*{wrong}.*Did you mean '{meant}'"):
        make(**{wrong: 1})


@pytest.mark.parametrize(
    "option",
    ["expires", "time_limit", "soft_time_limit", "rate_limit", "acks_late", "max_retries"],
)
def test_celerys_own_options_are_taken(option):
    make(**{option: 1})


def test_a_class_declares_options_of_its_own():
    class Ours(ClaimTask):
        abstract = True
        tenant = None

    assert make(base=Ours, tenant="a").tenant == "a"
    with pytest.raises(ConfigurationError, match=r"'tenent'.*Did you mean 'tenant'"):
        make(base=Ours, tenent="a")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 1001),
        ("batch_size", "20"),
        ("batch_size", True),
        ("lease_seconds", 1),
        ("lease_seconds", 2.5),
        ("lease_seconds", 2**31),
        ("row_time_limit", 0),
        ("row_time_limit", -1),
        ("max_retries", -1),
        ("max_retries", 1.5),
        ("max_reclaims", -1),
        ("max_reclaims", 40000),
        ("retry_backoff", -1),
        ("retry_backoff", float("nan")),
        ("retry_backoff_max", float("inf")),
        ("retry_jitter", 1),
        ("no_retry_for", ValueError),
        ("no_retry_for", ("ValueError",)),
        ("write_back", "both"),
        ("transactional", 1),
        ("skip_locked", "yes"),
        ("failure_breaker", 50),
        ("failure_breaker", (0, 0.5)),
        ("failure_breaker", (50, 0)),
        ("failure_breaker", (50, 1.1)),
        ("columns", ["status"]),
        ("values", ["new"]),
        ("schema", ""),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name_and_place(option, value):
    with pytest.raises(ConfigurationError, match=rf"test_options.py:\d+\): {option}=.* does not work, expected"):
        make(**{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batch_size", 1000),
        ("lease_seconds", 2),
        ("lease_seconds", None),
        ("row_time_limit", None),
        ("max_retries", None),
        ("max_reclaims", None),
        ("failure_breaker", None),
        ("failure_breaker", (1, 1)),
        ("no_retry_for", [ValueError]),
    ],
)
def test_values_at_the_edge_are_taken(option, value):
    assert getattr(make(**{option: value}), option) == value


@pytest.mark.parametrize("option", ["autoretry_for", "dont_autoretry_for", "retry_kwargs"])
def test_autoretry_is_refused_because_it_would_run_the_window_again(option):
    with pytest.raises(ConfigurationError, match=f"{option} would run the whole window again because of one row"):
        make(**{option: (ValueError,)})


def test_an_inherited_autoretry_is_refused_too():
    class Ours(ClaimTask):
        abstract = True
        autoretry_for = (ValueError,)

    with pytest.raises(ConfigurationError, match="autoretry_for would run"):
        make(base=Ours)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": None}, "neither of model= and table= given"),
        ({"table": "mail"}, "both of model= and table= given"),
        ({"database_url": "sqlite:///x.db", "engine": object()}, "two answers to one question"),
        ({"transactional": True, "write_back": "batch"}, "cannot be used with it"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, says):
    with pytest.raises(ConfigurationError, match=says):
        make(two_arguments if "transactional" in options else None, **options)


def two_arguments(row, session):
    """A transactional handler."""


def no_arguments():
    """A handler that takes no row."""


@pytest.mark.parametrize(
    ("handler", "options", "expected"),
    [
        (no_arguments, {}, r"must take \(row\)|must take \(self, row\)"),
        (two_arguments, {}, r"must take"),
        (no_arguments, {"transactional": True}, r"must take \((self, )?row, session\)"),
    ],
)
def test_a_handler_that_cannot_take_what_it_gets_is_refused(handler, options, expected):
    with pytest.raises(ConfigurationError, match=expected):
        make(handler, **options)


def test_a_class_without_a_handler_is_refused():
    app = Celery("proj", set_as_current=False)
    empty = type("Empty", (ClaimTask,), {"name": "empty", "model": TABLE})

    with pytest.raises(ConfigurationError, match="no handler; define process"):
        app.register_task(empty())


def test_a_batch_handler_cannot_be_transactional():
    app = Celery("proj", set_as_current=False)
    members = {"name": "both", "model": TABLE, "transactional": True, "process_batch": lambda self, rows: None}

    with pytest.raises(ConfigurationError, match="it cannot be used with process_batch"):
        app.register_task(type("Both", (ClaimTask,), members)())


def test_task_annotations_are_checked_like_options():
    app = Celery("proj", set_as_current=False)
    app.conf.task_annotations = {"work": {"batch_size": 0}}

    def handle(row):
        """A handler."""

    with pytest.raises(ConfigurationError, match="batch_size=0 does not work"):
        _ = app.task(base=ClaimTask, name="work", shared=False, model=TABLE)(handle).name
