"""`celery claim streams|dead|delayed|purge`: look at the queues of a redis-streams:// broker and act on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click

from celery_claim.bin.broker import Broker, broker_of
from celery_claim.bin.tasks import as_json, instant, print_json, print_table

#: Characters of a message that --show prints.
SHOWN_CHARACTERS = 2000


@click.command("streams", short_help="Queues of a redis-streams:// broker: ready, pending, delayed, dead.")
@click.argument("queue", nargs=-1)
@as_json
@click.pass_context
def streams_command(ctx: click.Context, queue: tuple[str, ...], as_json: bool) -> None:
    """Show what stands in each queue of a redis-streams:// broker. Needs only the broker.

    ready: messages that wait for a worker. pending: those that workers hold, running or prefetched. delayed: those with
    a countdown or ETA that is not over. dead: dead letters, see `dead`. consumers: connections that read the queue now.
    oldest idle: how long the most silent owner of a message has not renewed its lease; more than lease_timeout means a
    dead owner, whose messages the next reader with room takes over. oldest ready: how long the first one has waited.
    """
    from celery_claim.streams.look import look

    with broker_of(ctx) as broker:
        for name in queue:
            broker.require_queue(ctx.obj.app, name)
        facts = look(broker.client, broker.keys, broker.options.group, queue or broker.known_queues(ctx.obj.app))
    if as_json:
        print_json([asdict(each) for each in facts])
        return
    header = ("queue", "ready", "pending", "delayed", "dead", "consumers", "oldest idle", "oldest ready", "next due")
    lines = [
        (
            each.queue, each.ready, each.pending, each.delayed, each.dead, each.consumers,
            _span(each.oldest_idle_ms), _span(each.oldest_ready_ms), _span(each.next_due_ms),
        )
        for each in facts
    ]  # fmt: skip
    print_table(f"Queues of {broker.url}", header, lines)


@click.command("dead", short_help="Dead letters of a queue: list, put back, drop.")
@click.argument("queue")
@click.option("--requeue", is_flag=True, help="Put them back at the end of the queue, as if they had just been sent.")
@click.option("--drop", "dropping", is_flag=True, help="Delete them. There is no undo.")
@click.option(
    "--id",
    "ids",
    multiple=True,
    metavar="ID",
    help="A dead letter, by the id of the list; may be given more than once.",
)
@click.option("--all", "everything", is_flag=True, help="All dead letters that are there now.")
@click.option("--show", is_flag=True, help="Also print the messages with their arguments, which may be secret.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many are listed.")
@as_json
@click.pass_context
def dead_command(
    ctx: click.Context, queue: str, requeue: bool, dropping: bool, ids: tuple[str, ...], everything: bool, show: bool,
    limit: int, as_json: bool,
) -> None:  # fmt: skip
    """List the dead letters of a queue, the oldest first, or act on them. Needs only the broker.

    A message is a dead letter when it was delivered delivery_limit times without an end (its task kills the worker, for
    example), was rejected, could not be read, or names a task that the worker does not know. It stays until you put it
    back or drop it; the newest dead_letter_maxlen are kept.

    Mend the cause, then `--requeue --id ID` or `--requeue --all`: each goes back as a fresh message whose deliveries
    count from zero. Putting back and taking out is one step of the server: Ctrl-C in the middle loses nothing and
    leaves nothing twice.
    """
    from celery_claim.streams import dead_letters

    _check_choice(requeue, dropping, ids, everything)
    with broker_of(ctx) as broker:
        broker.require_queue(ctx.obj.app, queue)
        if ids:
            chosen: Iterable[Any] = _letters_of(broker, queue, ids)
        else:
            acting = requeue or dropping
            chosen = dead_letters.letters(broker.client, broker.keys, queue, limit=None if acting else limit)
        if requeue or dropping:
            act = dead_letters.replay if requeue else dead_letters.drop
            count = sum(1 for _ in act(broker.client, broker.keys, queue, chosen))
            _say_acted(queue, "requeued" if requeue else "dropped", count, as_json)
            return
        listed = [
            {**asdict(each), **({"message": _message(broker, each)} if show else {})} for each in chosen
        ]  # fmt: skip
        total = broker.client.xlen(broker.keys.dead(queue))
    print_json(listed) if as_json else _print_letters(queue, listed, total)


@click.command("delayed", short_help="Messages with a countdown or ETA: list, cancel.")
@click.argument("queue")
@click.option("--cancel", "task_id", metavar="TASK_ID", help="Take this task out of the queue before it is due.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many are listed.")
@as_json
@click.pass_context
def delayed_command(ctx: click.Context, queue: str, task_id: str | None, limit: int, as_json: bool) -> None:
    """List the messages of a queue that the broker holds until they are due, the next one first.

    `--cancel TASK_ID` takes a task out for good, with no worker running. That lasts, unlike a revoke (`celery control
    revoke`), which workers remember in memory and forget when the last of them stops. Its result stays PENDING. Exits 1
    when the task is not there: it never was, it is due already, or it was cancelled before. Needs only the broker.
    """
    from celery_claim.streams import delayed

    with broker_of(ctx) as broker:
        broker.require_queue(ctx.obj.app, queue)
        if task_id is not None:
            _say_cancelled(ctx, queue, task_id, delayed.cancel(broker.client, broker.keys, queue, task_id), as_json)
            return
        listed = delayed.delayed(broker.client, broker.keys, queue, limit=limit)
        total = broker.client.zcard(broker.keys.due(queue))
    if as_json:
        print_json([asdict(each) for each in listed])
        return
    header = ("due (UTC)", "task", "task id", "priority")
    lines = [(instant(each.due_ms), each.task, each.task_id, each.priority) for each in listed]
    print_table(f"Delayed messages of {queue}{_of(len(listed), total)}", header, lines)


@click.command("purge", short_help="Delete the messages of a queue that no worker holds.")
@click.option("--queue", "-Q", "queues", multiple=True, required=True, help="A queue; may be given more than once.")
@click.option("--force", "-f", is_flag=True, help="Do not ask.")
@as_json
@click.pass_context
def purge_command(ctx: click.Context, queues: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Delete the messages of a queue that no worker holds: the ready and the delayed ones. There is no undo.

    What workers hold is finished; dead letters stay (`celery claim dead QUEUE --drop --all`). Needs only the broker.
    """
    with broker_of(ctx) as broker:
        for name in queues:
            broker.require_queue(ctx.obj.app, name)
        if not force:
            click.confirm(
                f"This deletes all messages of {', '.join(queues)} that no worker holds, and there is no undo.\n"
                "Delete them?",
                abort=True,
                err=True,
            )
        with broker.connection.channel() as channel:
            purged = {name: int(channel.queue_purge(name) or 0) for name in dict.fromkeys(queues)}
    if as_json:
        print_json([{"queue": name, "purged": count} for name, count in purged.items()])
        return
    for name, count in purged.items():
        click.echo(f"{name}: {count} {_messages(count)} deleted")


def _check_choice(requeue: bool, dropping: bool, ids: tuple[str, ...], everything: bool) -> None:
    if requeue and dropping:
        raise click.UsageError("--requeue or --drop, not both")
    if ids and everything:
        raise click.UsageError("--id ID ... or --all, not both")
    if (requeue or dropping) and not ids and not everything:
        raise click.UsageError("say which dead letters: --id ID ... or --all")
    if everything and not (requeue or dropping):
        raise click.UsageError("--all goes with --requeue or --drop")


def _letters_of(broker: Broker, queue: str, ids: tuple[str, ...]) -> list[Any]:
    from celery_claim.streams import dead_letters

    for id_ in ids:
        first, dash, second = id_.partition("-")
        if not (first.isdigit() and (second.isdigit() or not dash)):
            raise click.UsageError(f"{id_!r} is no id of a dead letter; `celery claim dead {queue}` lists them")
    found = dead_letters.named(broker.client, broker.keys, queue, ids)
    missing = sorted(set(ids) - {each.id for each in found})
    if missing:
        raise click.UsageError(f"queue {queue} has no dead letter {', '.join(missing)}; nothing was done")
    return found


def _message(broker: Broker, letter: Any) -> dict[str, str]:
    from celery_claim.streams.dead_letters import message_of

    fields = message_of(broker.client, broker.keys, letter)
    return {name.decode(errors="replace"): value.decode(errors="backslashreplace") for name, value in fields.items()}


def _print_letters(queue: str, listed: list[dict[str, Any]], total: int) -> None:
    header = ("id", "died (UTC)", "reason", "deliveries", "task", "task id", "body")
    lines = [
        (
            each["id"], instant(each["at_ms"]), each["reason"], each["deliveries"], each["task"], each["task_id"],
            f"{each['body_bytes']} B",
        )
        for each in listed
    ]  # fmt: skip
    print_table(f"Dead letters of {queue}{_of(len(listed), total)}", header, lines)
    for each in listed:
        if "message" in each:
            click.secho(each["id"], bold=True)
            for name, value in each["message"].items():
                more = (
                    f" ... ({len(value)} characters; --json prints them all)" if len(value) > SHOWN_CHARACTERS else ""
                )
                click.echo(f"  {name}: {value[:SHOWN_CHARACTERS]}{more}")


def _say_acted(queue: str, what: str, count: int, as_json: bool) -> None:
    print_json({"queue": queue, what: count}) if as_json else click.echo(f"{queue}: {count} {_messages(count)} {what}")


def _say_cancelled(ctx: click.Context, queue: str, task_id: str, count: int, as_json: bool) -> None:
    from celery_claim.bin import FAILED

    if as_json:
        print_json({"queue": queue, "task_id": task_id, "cancelled": count})
    elif count:
        click.echo(f"{queue}: task {task_id} is cancelled")
    else:
        click.echo(f"{queue}: no delayed task {task_id}: it is due already, was cancelled, or never was here", err=True)
    if not count:
        ctx.exit(FAILED)


def _messages(count: int) -> str:
    return "message" if count == 1 else "messages"


def _of(listed: int, total: int) -> str:
    return f" ({listed} of {total}; --limit lists more)" if total > listed else f" ({total})"


def _span(milliseconds: int | None) -> str:
    if milliseconds is None:
        return ""
    seconds = milliseconds / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
