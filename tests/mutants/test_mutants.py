"""Faults put into a copy of the package, one at a time: each must be noticed by the test that is named beside it.

A mutant whose place is gone fails here too: put it where that line went, or take it out with the feature.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import REPOSITORY

SECONDS = 120


class Mutant(NamedTuple):
    """A change of one place in the package, and the test that must not survive it."""

    name: str
    file: str
    old: str
    new: str
    test: str
    database: str = "sqlite"


STATEMENTS = "claims/sql/statements.py"
OWNED = 'return and_(self._is(Status.PROCESSING), token == bindparam("token", type_=token.type))'
WINDOWS = "windows/sql/statements.py"
WRITE_BACK, CLAIM, RECOVER = (f"conformance/test_{name}.py::" for name in ("write_back", "claim", "recover"))
SETTLE, FETCH, RELEASE, BURY = (f"streams/scripts/{name}.lua" for name in ("settle", "fetch", "release", "bury"))
SCRIPTS = "streams/test_scripts.py::"
MODEL = "models/test_streams.py::test_a_queue_keeps_its_promises_in_any_order[redis_server]"

MUTANTS = (
    Mutant(
        "drop the token guard of every write",
        STATEMENTS,
        OWNED,
        'ours = or_(token.is_not(None), token == bindparam("token", type_=token.type))\n'
        "        return and_(self._is(Status.PROCESSING), ours)",
        WRITE_BACK + "test_a_late_worker_cannot_overwrite_the_new_owner",
    ),
    Mutant(
        "drop the status guard of every write",
        STATEMENTS,
        OWNED,
        'return token == bindparam("token", type_=token.type)',
        WRITE_BACK + "test_a_result_whose_answer_was_lost_is_written_once_and_its_effect_done_once",
        "mariadb",
    ),
    Mutant(
        "drop the status guard of the claim",
        STATEMENTS,
        "return self._update(self._ownership(), self._keyed, *self._claimable)",
        "return self._update(self._ownership(), self._keyed)",
        CLAIM + "test_a_row_taken_between_the_look_and_the_claim_is_not_taken_again",
        "mariadb",
    ),
    Mutant(
        "drop the predicate of recover",
        STATEMENTS,
        "return self._update(self._reclaimed(bounded), self._keyed, *self._expired(override))",
        "guard = or_(self._is(Status.PROCESSING), *self._expired(override))\n"
        "        return self._update(self._reclaimed(bounded), self._keyed, guard)",
        RECOVER + "test_a_row_that_ended_between_the_look_and_the_change_keeps_its_end",
    ),
    Mutant(
        "count before the status in recover",
        STATEMENTS,
        'return [("status", status), *assignments, *cleared]',
        'return [*assignments, ("status", status), *cleared]',
        RECOVER + "test_the_sixth_lost_owner_fails_the_row_with_the_reason",
        "mariadb",
    ),
    Mutant(
        "drop the due time of promote",
        STATEMENTS,
        "guard = (self._is(Status.RETRYING), self._is_due)",
        "guard = (self._is(Status.RETRYING),)",
        RECOVER + "test_a_retry_that_was_put_aside_again_between_the_look_and_the_change_is_not_early",
    ),
    Mutant(
        "clear the token in a write back",
        STATEMENTS,
        'assignments: list[Any] = [("status", self._value(Status.SUCCEEDED)), ("error_message", null())]\n'
        "        assignments += [(c,",
        'assignments: list[Any] = [("status", self._value(Status.SUCCEEDED)), ("claim_token", null())]\n'
        "        assignments += [(c,",
        WRITE_BACK + "test_a_result_whose_answer_was_lost_is_written_once_and_its_effect_done_once",
        "mariadb",
    ),
    Mutant(
        "count a hand-back",
        STATEMENTS,
        "return self._update(self._nobody, self._keyed, self._owned)",
        "return self._update([*self._nobody, *self._one_more_retry], self._keyed, self._owned)",
        WRITE_BACK + "test_a_hand_back_counts_nothing",
    ),
    Mutant(
        "drop FORCE INDEX",
        "dialects/mysql.py",
        "if isinstance(statement, Update):",
        "if False:",
        "plans/test_plans.py::test_rows_are_changed_by_primary_key_however_many",
        "mariadb",
    ),
    Mutant(
        "take a write back that matched nothing for written",
        "claims/write_back.py",
        "[key for key in keys if key not in changed]\n    )",
        "[]\n    )",
        WRITE_BACK + "test_a_late_worker_cannot_overwrite_the_new_owner",
    ),
    Mutant(
        "write back before the handler",
        "rows/consume.py",
        "verdict = process(row, self._handler, self._judge)",
        "self._note(held, key, process(row, lambda row: None, self._judge))\n"
        "            self._flush_when_due(held)\n"
        "            verdict = process(row, self._handler, self._judge)",
        "conformance/test_outcomes.py::test_a_row_fails_at_its_first_exception",
    ),
    Mutant(
        "release finished rows when an overrun row is let go",
        "claims/renew.py",
        "self._on_flushed(self.flush(link))\n        with self._lock:\n            if",
        "with self._lock:\n            if",
        "conformance/test_renew.py::test_finished_rows_are_not_let_go_with_the_others",
    ),
    Mutant(
        "do not renew",
        "claims/renew.py",
        "if keys:\n            try:\n                lost = _renewed(",
        "if not keys:\n            try:\n                lost = _renewed(",
        "conformance/test_renew.py::test_a_row_of_three_leases_length_stays_with_its_live_owner",
    ),
    Mutant(
        "do not look for rows of a claim without an answer",
        "claims/claim.py",
        "return found.scalars().all()",
        "return []",
        CLAIM + "test_a_claim_whose_answer_was_lost_still_gives_its_rows_to_one_owner",
        "postgresql",
    ),
    Mutant(
        "commit a transaction whose row was lost",
        "rows/transact.py",
        "if not transaction.succeed(statements, token, key, dict(outcome.values)):",
        "if transaction.succeed(statements, token, key, dict(outcome.values)) is None:",
        "conformance/test_transactional.py::test_an_owner_that_lost_its_row_commits_nothing",
        "mariadb",
    ),
    Mutant(
        "keep the engine in a forked child",
        "database.py",
        "os.register_at_fork(after_in_child=_forget_engines)",
        "",
        CLAIM + "test_a_connection_never_crosses_a_fork",
        "mariadb",
    ),
    Mutant(
        "fire a slot that was fired",
        "windows/fire.py",
        "    if is_fired(window, now):\n        return Outcome.NOT_DUE\n",
        "",
        "windows/test_fire.py::test_of_many_fires_in_one_slot_one_wins",
    ),
    Mutant(
        "give a consumer that is at work a second run",
        "windows/place.py",
        "            if not self.is_busy(window, node, consumer_id)\n",
        "",
        "windows/test_fire.py::test_a_fire_starts_only_consumers_that_are_not_at_work",
    ),
    Mutant(
        "start a run that was started",
        WINDOWS,
        ', self._run.c.state == "pending")',
        ")",
        "windows/test_runs.py::test_a_second_delivery_finds_the_run_started",
    ),
    Mutant(
        "start a run after its time",
        WINDOWS,
        ".where(*self._this_message, self._run.c.start_before >= self._now)",
        ".where(*self._this_message)",
        "windows/test_runs.py::test_a_message_that_comes_too_late_starts_nothing",
    ),
    Mutant(
        "start a run that was moved",
        WINDOWS,
        '            run.attempt == _value("number", Integer),\n        )\n\n    @property\n    def _this_message',
        "        )\n\n    @property\n    def _this_message",
        "windows/test_maintain.py::test_a_run_that_came_back_to_its_first_node_is_not_started_by_its_first_message",
    ),
    Mutant(
        "end a run that was given up",
        WINDOWS,
        ', run.state == "running")',
        ")",
        "windows/test_runs.py::test_a_run_that_was_given_up_stops_and_its_end_is_refused",
    ),
    Mutant(
        "free a window whose runs are at work",
        WINDOWS,
        """                ~exists().where(
                    self._run.c.window == _value("window_name", String),
                    self._run.c.fire_seq == _value("fire"),
                    self.live,
                ),
""",
        "",
        "windows/test_runs.py::test_the_last_run_to_end_frees_the_window",
    ),
    Mutant(
        "fire without the lock of the window",
        WINDOWS,
        "return statement.order_by(self._window.c.name).with_for_update()",
        "return statement.order_by(self._window.c.name)",
        "windows/test_fire.py::test_of_eight_beats_at_every_slot_one_fires",
        "mariadb",
    ),
    Mutant(
        "fire a window that is paused",
        "windows/fire.py",
        "    if not window.enabled:\n        return Outcome.PAUSED\n    if is_fired",
        "    if is_fired",
        "windows/test_fire.py::test_a_paused_window_is_not_fired_and_resumes_at_its_next_slot",
    ),
    Mutant(
        "fire a window that is open",
        "windows/fire.py",
        "return Outcome.OCCUPIED if is_occupied(window, now) else Outcome.FIRED",
        "return Outcome.FIRED",
        "windows/test_fire.py::test_a_window_whose_consumers_have_time_left_is_occupied",
    ),
    Mutant(
        "trigger a window that is open",
        "windows/fire.py",
        "    if is_occupied(window, now):\n        return Outcome.OCCUPIED\n    interval",
        "    interval",
        "windows/test_fire.py::test_of_many_triggers_one_wins",
    ),
    Mutant(
        "renew a lease that is over",
        WINDOWS,
        '_value("timeout")).where(*self._ours, self._leased)',
        '_value("timeout")).where(*self._ours)',
        "windows/test_runs.py::test_a_consumer_that_was_replaced_does_not_come_back",
    ),
    Mutant(
        "follow a run whose number is another's",
        "windows/runs.py",
        "if successors and read_field(",
        "if not successors and read_field(",
        "windows/test_runs.py::test_a_consumer_that_was_replaced_has_no_successor",
    ),
    Mutant(
        "keep a name that a later start has taken",
        "nodes/sql/statements.py",
        "heartbeat_at=self._now, **columns).where(*self._ours)",
        'heartbeat_at=self._now, **columns).where(self._node.c.node == _value("node_name", String))',
        "windows/test_registry.py::test_of_two_starts_of_one_name_the_older_hears_that_it_is_over",
    ),
    Mutant(
        "leave with a later start's row",
        "nodes/sql/statements.py",
        "return delete(self._node).where(*self._ours)",
        'return delete(self._node).where(self._node.c.node == _value("node_name", String))',
        "windows/test_registry.py::test_an_older_start_that_leaves_does_not_take_the_newer_with_it",
    ),
    Mutant(
        "take a lease that another holds",
        "nodes/sql/statements.py",
        '.where(lease.name == _value("lease_name", String), (lease.owner == owner) | (lease.expires_at <= self._now))',
        '.where(lease.name == _value("lease_name", String))',
        "windows/test_leases.py::test_a_holder_keeps_its_lease_under_one_epoch_and_another_gets_the_next",
    ),
    Mutant(
        "send an entry that another beat has sent",
        "windows/sql/entries.py",
        'entry.last_run_at == _value("seen"), ours)',
        "ours)",
        "windows/test_leases.py::test_an_entry_is_sent_by_the_holder_and_once",
    ),
    Mutant(
        "send an entry under a lease that is over",
        "windows/sql/entries.py",
        'entry.last_run_at == _value("seen"), ours)',
        'entry.last_run_at == _value("seen"))',
        "windows/test_leases.py::test_an_entry_is_sent_by_the_holder_and_once",
    ),
    Mutant(
        "take back another beat's sending of the same time",
        "windows/sql/entries.py",
        '                entry.total_run_count == _value("counted"),\n',
        "",
        "windows/test_entries.py::test_only_the_very_sending_is_taken_back",
    ),
    Mutant(
        "get the lease back without taking back what was not sent",
        "beat/entries.py",
        "            self._take_back(link)\n            self._unsent.clear()\n",
        "            self._unsent.clear()\n",
        "windows/test_entries.py::test_a_sending_that_the_broker_refused_while_the_database_was_away_is_made_up_for",
        "mariadb",
    ),
    Mutant("leave settled messages in their stream", SETTLE, "  redis.pcall('XDEL'", "  tostring('XDEL'", MODEL),
    Mutant("take over from live workers", FETCH, "each_pending(stream, lease,", "each_pending(stream, 0,", MODEL),
    Mutant(
        "take over what is its own",
        FETCH,
        "and pending[2] ~= me then",
        "then",
        SCRIPTS + "test_fetch_takes_over_what_was_not_renewed_and_nothing_of_its_own",
    ),
    Mutant("deliver once more than the limit", FETCH, "count >= limit", "count > limit", MODEL),
    Mutant(
        "write no dead letter",
        FETCH,
        "redis.pcall('XADD', dead_stream,",
        "tostring(dead_stream,",
        SCRIPTS + "test_a_message_of_the_limit_is_a_dead_letter_with_all_its_fields",
    ),
    Mutant("remove a due message", FETCH, "redis.pcall('XADD', KEYS[q * per", "tostring(KEYS[q * per", MODEL),
    Mutant("move a due message and keep it", FETCH, "      redis.call('ZREM', due, tag)\n", "", MODEL),
    Mutant(
        "give back what another has",
        RELEASE,
        "id, id, 1, ARGV[2])",
        "id, id, 1)",
        SCRIPTS + "test_release_gives_back_what_is_still_ours_and_wakes_as_many_as_may_take_it",
    ),
    Mutant(
        "count what was given back unstarted",
        RELEASE,
        "math.max(0, count - 1)",
        "count",
        SCRIPTS + "test_release_gives_back_what_is_still_ours_and_wakes_as_many_as_may_take_it",
    ),
    Mutant(
        "bury what another has",
        BURY,
        "ARGV[3], 1, ARGV[2])",
        "ARGV[3], 1)",
        SCRIPTS + "test_bury_moves_what_is_ours_or_nothing",
    ),
    Mutant("leave a buried message", BURY, "redis.call('XDEL', KEYS[1], ARGV[3])\n", "", MODEL),
    Mutant(
        "take back by a late renewal",
        "streams/scripts/renew.lua",
        "last, count, me)",
        "last, count)",
        SCRIPTS + "test_renew_takes_nothing_back",
    ),
    Mutant(
        "purge what workers hold",
        "streams/scripts/purge.lua",
        "facts['pending'] + 1, '@free')",
        "facts['pending'] + 1)",
        SCRIPTS + "test_purge_leaves_what_is_worked_on",
    ),
    Mutant(
        "lose what a leaving consumer holds",
        "streams/scripts/leave.lua",
        "and #pending == 0 then",
        "then",
        SCRIPTS + "test_a_consumer_with_messages_is_not_removed",
    ),
    Mutant(
        "forget acknowledgements",
        "streams/lease.py",
        "settle(self.client, self.options.group, batch.values())",
        "pass",
        MODEL,
    ),
    Mutant(
        "forget what a pool process was sent",
        "bootsteps/flush.py",
        "job._accepted = True",
        "pass",
        "streams/test_workers.py::"
        "test_a_task_on_its_way_to_a_pool_process_is_not_run_by_another_worker_when_the_connection_breaks",
    ),
)


@pytest.fixture
def copy(tmp_path):
    """The package and its tests, where they may be broken."""
    ignore = shutil.ignore_patterns("__pycache__", "bench", "acceptance", "docs")
    for folder in ("celery_claim", "tests"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=ignore)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    return tmp_path


def run(copy: Path, test: str, database: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_"))}
    program = [sys.executable, "-m", "pytest", f"tests/{test}", f"--databases={database}", "-x", "-q", "--tb=line"]
    return subprocess.run(
        [*program, "-p", "no:cacheprovider", f"-otimeout={SECONDS // 2}"],
        cwd=copy, env={**clean, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_fault_in_the_package_is_noticed_by_the_test_that_guards_against_it(mutant, copy):
    path = copy / "celery_claim" / mutant.file
    source = path.read_text()
    assert mutant.old in source, f"{mutant.file} has no such place any more: {mutant.old!r}"
    path.write_text(source.replace(mutant.old, mutant.new))

    ran = run(copy, mutant.test, mutant.database)

    assert ran.returncode == 1, ran.stdout[-3000:] + ran.stderr[-2000:]
    # The promise was broken, not the test: no error of a fixture, no error in the mutant's own text.
    assert re.search(r"^FAILED ", ran.stdout, re.MULTILINE), ran.stdout[-3000:]
    assert not re.search(r"(NameError|SyntaxError|ImportError|CompileError)", ran.stdout), ran.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.servers
def test_the_copy_works_before_it_is_broken(copy):
    """Or every mutant would be noticed, whatever it does."""
    ran = run(copy, "conformance/test_claim.py::test_a_claim_takes_the_first_pending_rows_in_key_order", "sqlite")

    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
