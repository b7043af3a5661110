"""`celery claim windows|show|trigger|concurrency|pause|resume`: look at windows and act on them."""

from __future__ import annotations

import time
from typing import Any

import click

from celery_claim.bin import FAILED, LOST_RACE, UNAVAILABLE
from celery_claim.bin.runs import RUN_COLUMNS, run_line
from celery_claim.bin.tasks import as_json, dispatcher_of, instant, print_json, print_table, window_name
from celery_claim.dispatch import Dispatcher
from celery_claim.windows.fire import Outcome
from celery_claim.windows.window import Window

_ANSWERS = {
    Outcome.OCCUPIED: "its consumers of an earlier fire still have their time",
    Outcome.BUSY: "every consumer is still at a row of an earlier fire",
    Outcome.TOO_SOON: "it was triggered less than min_interval ago",
    Outcome.PAUSED: "it is paused: celery claim resume NAME",
    Outcome.NO_NODE: "no node takes its runs",
}


@click.command("windows", short_help="List windows.")
@as_json
@click.pass_context
def windows_command(ctx: click.Context, as_json: bool) -> None:
    """List windows: those that code declares, and those that only the table knows.

    Needs only the database.
    """
    facts = _facts(dispatcher_of(ctx))
    if as_json:
        print_json(facts)
        return
    header = ("window", "task", "type", "every", "for", "consumers", "state", "last slot", "next slot", "fires")
    print_table("Windows", header, [_line(each) for each in facts])


@click.command("show", short_help="One window with its last runs.")
@click.argument("name")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many runs.")
@as_json
@click.pass_context
def show_command(ctx: click.Context, name: str, limit: int, as_json: bool) -> None:
    """Show one window with its last runs. Needs only the database."""
    dispatcher = dispatcher_of(ctx)
    name = window_name(dispatcher, name)
    (facts,) = [each for each in _facts(dispatcher) if each["name"] == name]
    runs = dispatcher.history(window=name, limit=limit)
    if as_json:
        print_json({**facts, "runs": runs})
        return
    print_table(f"Window {name}", ("", ""), [(key, _shown(key, value)) for key, value in facts.items()])
    print_table("Its last runs", RUN_COLUMNS, [run_line(run) for run in runs])


@click.command("trigger", short_help="Open a window now.")
@click.argument("name")
@click.option(
    "--wait",
    is_flag=False,
    flag_value=3600.0,
    type=click.FloatRange(min=0),
    metavar="[SECONDS]",
    help="Wait until its runs have ended (at most so long, an hour by default) and say what they did.",
)
@as_json
@click.pass_context
def trigger_command(ctx: click.Context, name: str, wait: float | None, as_json: bool) -> None:
    """Open a window now, whatever the time; its slots stay where they are.

    Of any number of callers one opens it. Exits 75 when another did, or when its consumers are still at work; 1 when it
    is paused, has no node, or (with --wait) a run did not end well; 69 when the database or the broker is not
    available.
    """
    dispatcher = dispatcher_of(ctx)
    name = window_name(dispatcher, name)
    outcome, reason, fire = dispatcher.trigger(name)
    answer: dict[str, Any] = {"window": name, "outcome": outcome.value, "reason": reason or _ANSWERS.get(outcome)}
    runs: list[dict[str, Any]] = []
    if fire is not None:
        runs = _ended(dispatcher, name, fire, wait or 0)
        answer |= {"fire_seq": fire, "published": dispatcher.broker_error is None, "runs": runs}
    _print_trigger(answer, runs, dispatcher, as_json, waited=wait is not None)
    ctx.exit(_exit_code(outcome, runs, dispatcher, waited=wait is not None))


@click.command("concurrency", short_help="Change how many consumers a window has.")
@click.argument("name")
@click.argument("consumers", type=click.IntRange(min=1), required=False)
@click.option("--reset", is_flag=True, help="Back to what code declares.")
@as_json
@click.pass_context
def concurrency_command(ctx: click.Context, name: str, consumers: int | None, reset: bool, as_json: bool) -> None:
    """Show or change how many consumers a window has, also while it is open.

    More start at once; with fewer, those with a number too high end between two rows. A deploy does not change it back.
    """
    if reset and consumers is not None:
        raise click.UsageError("give a number or --reset, not both")
    dispatcher = dispatcher_of(ctx)
    name = window_name(dispatcher, name)
    if reset or consumers is not None:
        dispatcher.set_concurrency(name, None if reset else consumers)
    (facts,) = [each for each in _facts(dispatcher) if each["name"] == name]
    if as_json:
        print_json({"window": name, "concurrency": facts["concurrency"], "overridden": facts["overridden"]})
    else:
        click.echo(f"{name}: {facts['concurrency']} consumers")
    if dispatcher.broker_error is not None:
        click.echo(f"Their messages are sent later, the broker is not available: {dispatcher.broker_error}", err=True)
        ctx.exit(UNAVAILABLE)


@click.command("pause", short_help="Fire a window no more.")
@click.argument("name")
@as_json
@click.pass_context
def pause_command(ctx: click.Context, name: str, as_json: bool) -> None:
    """Fire a window no more; consumers at work end between two rows. A deploy does not change it back."""
    dispatcher = dispatcher_of(ctx)
    name = window_name(dispatcher, name)
    dispatcher.pause(name)
    print_json({"window": name, "enabled": False}) if as_json else click.echo(f"{name}: paused")


@click.command("resume", short_help="Fire a window again.")
@click.argument("name")
@as_json
@click.pass_context
def resume_command(ctx: click.Context, name: str, as_json: bool) -> None:
    """Fire a window again, from its next slot on."""
    dispatcher = dispatcher_of(ctx)
    name = window_name(dispatcher, name)
    dispatcher.resume(name)
    print_json({"window": name, "enabled": True}) if as_json else click.echo(f"{name}: fires again")


def _facts(dispatcher: Dispatcher) -> list[dict[str, Any]]:
    """Every window, declared or in the table, by name; who looks enters nothing into the table."""
    declared, look = dispatcher.declared(), dispatcher.look()
    windows = {name: Window.unfired(each, dispatcher.settings.max_concurrency) for name, each in declared.items()}
    windows |= look.windows
    return [
        {**windows[name].facts(look.now), "declared": name in declared, "now": look.now} for name in sorted(windows)
    ]


def _line(facts: dict[str, Any]) -> list[Any]:
    changed = "*" if "concurrency" in facts["overridden"] else ""
    return [
        facts["name"],
        facts["task"],
        facts["run_type"],
        f"{facts['frequency']:g} s",
        f"{facts['max_run_time']:g} s",
        f"{facts['concurrency']}{changed}",
        _state(facts),
        instant(facts["last_slot_start"]),
        "" if facts["next_slot_start"] is None else f"in {(facts['next_slot_start'] - facts['now']) / 1000:.1f} s",
        facts["fire_seq"],
    ]


def _state(facts: dict[str, Any]) -> str:
    if not facts["declared"]:
        return "not declared"
    if not facts["enabled"]:
        return "paused"
    return "open" if facts["active"] else "waiting"


def _shown(key: str, value: Any) -> Any:
    if key in ("active_until", "last_slot_start", "next_slot_start", "triggered_at", "now"):
        return instant(value)
    return ", ".join(value) if isinstance(value, list) else value


def _ended(dispatcher: Dispatcher, name: str, fire: int, seconds: float) -> list[dict[str, Any]]:
    """The runs of a fire once all have ended, or as they are when the time is over."""
    until = time.monotonic() + seconds
    while True:
        runs = dispatcher.history(window=name, fire_seq=fire, limit=10_000)
        if all(run["finished_at"] for run in runs) or time.monotonic() >= until:
            return runs
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))


def _print_trigger(
    answer: dict[str, Any], runs: list[dict[str, Any]], dispatcher: Dispatcher, as_json: bool, *, waited: bool
) -> None:
    if as_json:
        print_json(answer)
    elif answer["outcome"] != Outcome.FIRED.value:
        click.echo(f"{answer['window']}: not opened: {answer['reason']}", err=True)
    else:
        click.echo(f"{answer['window']}: opened, {len(runs)} consumers")
        if any(run["finished_at"] for run in runs):
            print_table("Runs", RUN_COLUMNS, [run_line(run) for run in runs])
    unfinished = sum(not run["finished_at"] for run in runs)
    if waited and unfinished:
        click.echo(f"{unfinished} of {len(runs)} have not ended: celery claim show {answer['window']}", err=True)
    if dispatcher.broker_error is not None:
        click.echo(f"The broker is not available, a worker sends the runs later: {dispatcher.broker_error}", err=True)


def _exit_code(outcome: Outcome, runs: list[dict[str, Any]], dispatcher: Dispatcher, *, waited: bool) -> int:
    if outcome in (Outcome.OCCUPIED, Outcome.BUSY, Outcome.TOO_SOON):
        return LOST_RACE
    if outcome is not Outcome.FIRED:
        return FAILED
    if dispatcher.broker_error is not None:
        return UNAVAILABLE
    well = ("done", "empty", "timeout")
    return FAILED if waited and any(run["state"] not in well for run in runs) else 0
