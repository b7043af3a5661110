"""What celery_claim.bin adds to Celery's own commands."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from celery_claim.bin import ClaimGroup, add_worker_option, claim
from tests.processes import REPOSITORY


def python(code: str) -> str:
    """What a fresh process prints."""
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=REPOSITORY, timeout=60
    )
    return run.stdout.strip()


def test_the_worker_command_takes_a_role() -> None:
    command = click.Command("worker", callback=lambda **options: options)
    add_worker_option(command)

    with command.make_context("worker", ["--claim-role", "main"]) as given:
        assert given.params == {"claim_role": "main"}
    with command.make_context("worker", []) as left_out:
        assert left_out.params == {"claim_role": None}


def test_the_option_is_added_once() -> None:
    command = click.Command("worker")

    add_worker_option(command)
    add_worker_option(command)

    assert [each.name for each in command.params] == ["claim_role"]


def test_celery_itself_shows_the_option_and_our_commands() -> None:
    shown = python("from celery.bin.celery import celery; celery(['worker', '--help'], standalone_mode=False)")

    assert "--claim-role ROLE" in shown


def test_inspect_knows_our_commands_before_any_app_is_bound() -> None:
    known = python(
        "from celery.bin.celery import celery\n"
        "from celery.worker.control import Panel\n"
        "print([name for name in ('claim_windows', 'claim_nodes') if Panel.meta[name].type == 'inspect'])"
    )

    assert known == "['claim_windows', 'claim_nodes']"


def test_a_program_without_the_command_line_is_not_made_to_load_it() -> None:
    loaded = python("import sys, celery_claim.bin; print('celery.bin.worker' in sys.modules)")

    assert loaded == "False"


@pytest.mark.parametrize("name", claim.list_commands(click.Context(claim)))
def test_every_command_has_help_and_json(name: str) -> None:
    assert isinstance(claim, ClaimGroup)
    command = claim.get_command(click.Context(claim), name)

    assert command is not None
    assert command.help and command.short_help
    assert name in ("sql",) or "as_json" in {each.name for each in command.params}
