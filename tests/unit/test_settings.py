"""Settings: every value is checked, whoever wrote it and wherever."""

from __future__ import annotations

from dataclasses import fields

import pytest
from celery import Celery
from sqlalchemy.pool import NullPool

from celery_claim.app import state_of
from celery_claim.database import Database
from celery_claim.exceptions import ConfigurationError
from celery_claim.settings import Settings, known, misread, resolve


def settings_of(**conf):
    app = Celery("proj", set_as_current=False)
    app.conf.update(conf)
    return resolve(app.conf)


def test_every_setting_has_a_default_that_works():
    defaults = Settings()

    assert settings_of() == defaults
    for each in fields(Settings):
        assert each.metadata["check"](getattr(defaults, each.name)), each.name
        assert each.metadata["meaning"]


def test_settings_are_read_from_the_apps_configuration():
    found = settings_of(claim_database_url="sqlite:///x.db", claim_max_concurrency=7, claim_node_name="a")

    assert (found.database_url, found.max_concurrency, found.node_name) == ("sqlite:///x.db", 7, "a")


def test_a_namespace_is_understood():
    class Django:
        CELERY_CLAIM_MAX_CONCURRENCY = 3
        CELERY_CLAIM_DATABASE_URL = "sqlite:///x.db"

    app = Celery("proj", set_as_current=False)
    app.config_from_object(Django, namespace="CELERY")

    found = state_of(app).settings
    assert (found.max_concurrency, found.database_url) == (3, "sqlite:///x.db")


def test_an_unknown_setting_is_refused_with_the_closest_known_one():
    with pytest.raises(ConfigurationError, match=r"'claim_databse_url'.*Did you mean 'claim_database_url'"):
        settings_of(claim_databse_url="sqlite:///x.db")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("claim_database_url", 5),
        ("claim_database_engine_options", [1]),
        ("claim_create_tables", "yes"),
        ("claim_table_prefix", "drop table;"),
        ("claim_table_prefix", "x" * 41),
        ("claim_table_schema", 5),
        ("claim_max_concurrency", 0),
        ("claim_max_concurrency", True),
        ("claim_max_concurrency", 1.5),
        ("claim_maintenance_interval", 0),
        ("claim_maintenance_interval", float("inf")),
        ("claim_maintenance_interval", float("nan")),
        ("claim_max_clock_skew", -1),
        ("claim_node_name", 1),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(ConfigurationError, match=f"^{name}: .* does not work, expected"):
        settings_of(**{name: value})


def test_a_refused_database_url_is_not_shown():
    with pytest.raises(ConfigurationError) as raised:
        settings_of(claim_database_url=["mysql://root:s3cret@host/x"])

    assert "s3cret" not in str(raised.value)


def test_names_in_upper_case_that_celery_does_not_read_are_found():
    app = Celery("proj", set_as_current=False)
    app.conf.update({"CLAIM_DATABASE_URL": "sqlite:///x.db"})

    assert misread(app.conf) == ["CLAIM_DATABASE_URL"]


def test_all_names_begin_with_the_prefix():
    assert all(name.startswith("claim_") for name in known())


def test_the_engine_may_have_any_kind_of_pool(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/mail.db", engine_options={"poolclass": NullPool})

    assert isinstance(database.engine.pool, NullPool)
