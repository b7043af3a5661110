"""Trouble that lasts is told at its start, now and then, and at its end; not at every try."""

from __future__ import annotations

import logging

import pytest

from celery_claim.outages import Outage


@pytest.fixture
def outage(caplog):
    caplog.set_level(logging.INFO)
    return Outage("task mail", logging.getLogger("outage"))


def test_trouble_is_told_once_while_it_lasts(outage, caplog):
    for _ in range(50):
        outage.failed("no such table")

    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "task mail does not work, trying again: no such table" in caplog.text


def test_long_trouble_is_told_again_with_how_often(outage, caplog, monkeypatch):
    outage.failed("down")
    outage.failed("down")
    monkeypatch.setattr(Outage, "REPEAT_SECONDS", 0)
    outage.failed("down")

    assert len(caplog.records) == 2
    assert "1 more times since the last line" in caplog.records[1].getMessage()


def test_the_end_of_trouble_is_told_once(outage, caplog):
    outage.worked()
    outage.failed("down")
    assert outage.error == "down"
    outage.worked()
    outage.worked()

    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "works again" in caplog.text
    assert outage.error is None


def test_the_last_error_is_kept_though_it_is_not_told(outage):
    outage.failed("down")
    outage.failed("no privilege")

    assert outage.error == "no privilege"
