"""What `from celery_claim import ...` gives, and what celery_claim raises."""

from __future__ import annotations

import pytest
from celery.exceptions import ImproperlyConfigured

import celery_claim
from celery_claim import exceptions


def test_every_public_name_is_there_and_listed():
    for name in celery_claim.__all__:
        assert getattr(celery_claim, name) is not None
    assert set(celery_claim.__all__) <= set(dir(celery_claim))
    assert set(celery_claim.__all__) == set(celery_claim._HOMES)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'ClaimTusk'"):
        _ = celery_claim.ClaimTusk


def test_states_have_the_numbers_that_tables_hold():
    assert {status.name: int(status) for status in celery_claim.Status} == {
        "PENDING": 0, "PROCESSING": 1, "SUCCEEDED": 2, "FAILED": 3, "QUEUED": 4, "RETRYING": 5, "CANCELLED": 6
    }  # fmt: skip


def test_everything_raised_is_a_claim_error():
    raised = [each for each in vars(exceptions).values() if isinstance(each, type) and issubclass(each, Exception)]
    ours = [each for each in raised if each.__module__ == exceptions.__name__]

    assert len(ours) >= 9
    assert all(issubclass(each, exceptions.ClaimError) for each in ours)
    assert all(each.__name__ in exceptions.__doc__ and each.__doc__ for each in ours)


def test_a_wrong_configuration_is_celerys_improperly_configured_too():
    assert issubclass(exceptions.MappingError, ImproperlyConfigured)


def test_a_lost_claim_names_its_row():
    error = exceptions.ClaimLost(7)

    assert error.key == 7
    assert "row 7" in str(error)


def test_a_hint_is_given_only_where_something_is_close():
    assert exceptions.did_you_mean("batch_sise", ["batch_size", "model"]) == " Did you mean 'batch_size'?"
    assert exceptions.did_you_mean("zzz", ["batch_size", "model"]) == ""
