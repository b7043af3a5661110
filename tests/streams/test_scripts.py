"""Each script alone, on the oldest server that we promise, on Redis 7 and on Valkey 8: what its header says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ResponseError

from celery_claim.streams import scripts
from celery_claim.streams.consumer_group import ensure_groups
from celery_claim.streams.wire.keys import Keys

KEYS, QUEUE, GROUP = Keys(), "work", "celery"
URGENT, *_ = STREAMS = KEYS.streams(QUEUE)
NEVER, AT_ONCE = 10**9, 0


@pytest.fixture(params=["redis62_server", "redis_server", "valkey_server"])
def client(request: pytest.FixtureRequest) -> Any:
    with request.getfixturevalue(request.param).client() as client:
        ensure_groups(client, KEYS, GROUP, [QUEUE])
        yield client


@pytest.fixture
def run(client: Any) -> Callable[..., Any]:
    """run(script, keys, *arguments) -> its reply."""
    return lambda name, keys, *arguments: scripts.run(client, name, keys, arguments)


@pytest.fixture
def fetch(run: Callable[..., Any]) -> Callable[..., Any]:
    """fetch(consumer, budget) -> (ms until the next is due, taken, dead, gone)."""

    def read(
        consumer: str, budget: int = 100, *, lease: int = NEVER, recover: bool = True, limit: int = 20,
        backoff: int = NEVER, moved: int = 500,
    ) -> Any:  # fmt: skip
        return run(
            "fetch", KEYS.to_fetch(QUEUE),
            GROUP, consumer, budget, lease, int(recover), limit, 100, backoff, len(STREAMS), moved,
        )  # fmt: skip

    return read


def add(client: Any, *bodies: int, stream: str = URGENT) -> list[bytes]:
    return [client.xadd(stream, {"body": body}) for body in bodies]


def bodies(taken: list[Any]) -> list[int]:
    return [int(words[1]) for _, _, _, words in taken]


def ids(taken: list[Any]) -> list[bytes]:
    return [id_ for _, id_, *_ in taken]


def pending(client: Any, stream: str = URGENT) -> dict[bytes, tuple[str, int]]:
    return {
        each["message_id"]: (each["consumer"].decode(), each["times_delivered"])
        for each in client.xpending_range(stream, GROUP, "-", "+", 10_000)
    }


# ---- append -----------------------------------------------------------------------------------------------------


def append(run: Callable[..., Any], body: Any, *, must_exist: bool = False, delay: int = 0, step: int = 1) -> Any:
    names = [
        KEYS.meta(QUEUE), STREAMS[step - 1], KEYS.due(QUEUE), KEYS.delayed(QUEUE), KEYS.wake(QUEUE), *STREAMS
    ]  # fmt: skip
    return run("append", names, int(must_exist), delay, f"tag-{body}" if delay else "", step, "body", body)


def test_append_checks_the_limits_before_it_writes(client: Any, run: Callable[..., Any]) -> None:
    assert append(run, 1, must_exist=True) == b"gone"
    client.hset(KEYS.meta(QUEUE), "max_length", 2)
    append(run, 1)
    append(run, 2, delay=60_000, step=2)

    assert append(run, 3) == b"full"
    assert append(run, 3, delay=60_000) == b"full"
    assert (client.xlen(URGENT), client.zcard(KEYS.due(QUEUE)), client.hlen(KEYS.delayed(QUEUE))) == (1, 1, 1)


def test_append_keeps_all_keys_of_an_expiring_queue_alive(client: Any, run: Callable[..., Any]) -> None:
    client.hset(KEYS.meta(QUEUE), "expires", 60_000)
    append(run, 1, must_exist=True)

    assert all(0 < client.pttl(key) <= 60_000 for key in (KEYS.meta(QUEUE), *STREAMS))


def test_a_delayed_message_wakes_a_reader_only_when_it_is_the_first_one_due(
    client: Any, run: Callable[..., Any]
) -> None:
    for body, delay in ((1, 60_000), (2, 90_000), (3, 30_000)):
        append(run, body, delay=delay)

    assert client.xlen(KEYS.wake(QUEUE)) == 2
    assert client.zrange(KEYS.due(QUEUE), 0, -1) == [b"tag-3", b"tag-1", b"tag-2"]


def test_a_queue_that_expires_is_made_with_its_end(client: Any, run: Callable[..., Any]) -> None:
    names = [*KEYS.streams("replies"), KEYS.wake("replies")]
    for _ in range(2):
        assert run("declare", names, GROUP, 60_000) is None
        assert all(0 < client.pttl(name) <= 60_000 for name in names)
        assert [client.xinfo_groups(name)[0]["name"] for name in names] == [GROUP.encode()] * len(names)
    run("describe", [KEYS.meta("replies")], 60_000, "expires", 60_000)
    assert 0 < client.pttl(KEYS.meta("replies")) <= 60_000
    assert client.hgetall(KEYS.meta("replies")) == {b"expires": b"60000"}
    client.set("taken", "by somebody")

    with pytest.raises(ResponseError, match="WRONGTYPE"):
        run("declare", ["taken"], GROUP, 60_000)


# ---- fetch ------------------------------------------------------------------------------------------------------


def test_fetch_takes_urgent_ones_first_and_never_more_than_asked(client: Any, fetch: Callable[..., Any]) -> None:
    add(client, 3, 4, stream=STREAMS[3])
    add(client, 1, 2)

    assert bodies(fetch("a", 3)[1]) == [1, 2, 3]
    assert bodies(fetch("b", 3)[1]) == [4]
    assert fetch("b", 3) == [-1, [], [], [], 0]


def test_fetch_takes_given_back_ones_first_however_many_wait(
    client: Any, run: Callable[..., Any], fetch: Callable[..., Any]
) -> None:
    held = add(client, *range(300))
    fetch("a", 300)
    # The first 250 wait for their next try, as after a second rejection; the others were never started.
    for id_ in held[:250]:
        client.xclaim(URGENT, GROUP, "@free", 0, [id_], idle=0, retrycount=5, justid=True)
    run("release", [KEYS.wake(QUEUE), *[URGENT] * 50], GROUP, "a", "0", *held[250:])

    next_due, taken, *_ = fetch("b", 20)

    assert bodies(taken) == list(range(250, 270))
    assert 0 < next_due <= 8000


def test_fetch_takes_over_what_was_not_renewed_and_nothing_of_its_own(client: Any, fetch: Callable[..., Any]) -> None:
    add(client, 1, 2)
    fetch("a", 1)
    fetch("b", 1)

    assert fetch("b", lease=NEVER)[1] == []
    assert fetch("b", lease=AT_ONCE, recover=False)[1] == []
    assert bodies(fetch("b", lease=AT_ONCE)[1]) == [1]
    assert sorted(owner for owner, _ in pending(client).values()) == ["b", "b"]


def test_abandoned_ones_are_found_behind_any_number_that_wait_for_their_next_try(
    client: Any, fetch: Callable[..., Any]
) -> None:
    waiting = add(client, *range(250))
    fetch("a", 250)
    for id_ in waiting:
        client.xclaim(URGENT, GROUP, "@free", 0, [id_], idle=60_000, retrycount=15, justid=True)
    add(client, 1000)
    fetch("dead", 1)

    assert bodies(fetch("b", 5, lease=AT_ONCE)[1]) == [1000]


def test_a_message_of_the_limit_is_a_dead_letter_with_all_its_fields(client: Any, fetch: Callable[..., Any]) -> None:
    (id_,) = add(client, 7)
    for consumer in ("a", "b"):
        assert bodies(fetch(consumer, lease=AT_ONCE, limit=2)[1]) == [7]

    _, taken, dead, *_ = fetch("c", lease=AT_ONCE, limit=2)

    assert (taken, ids(dead)) == ([], [id_])
    ((_, letter),) = client.xrange(KEYS.dead(QUEUE))
    assert {name: letter[name] for name in (b"reason", b"n", b"id", b"body")} == {
        b"reason": b"delivery limit", b"n": b"2", b"id": id_, b"body": b"7",
    }  # fmt: skip
    assert (client.xlen(URGENT), pending(client)) == (0, {})


def test_what_died_with_others_is_delivered_for_the_last_time_without_them(
    client: Any, run: Callable[..., Any], fetch: Callable[..., Any]
) -> None:
    first, second, third = add(client, 1, 2, 3)
    for consumer in ("a", "b"):
        fetch(consumer, lease=AT_ONCE, limit=3)

    _, taken, dead, _, later = fetch("c", lease=AT_ONCE, limit=3)
    assert (bodies(taken), dead, later) == ([1], [], 1)
    assert bodies(fetch("c", lease=AT_ONCE, limit=3)[1]) == []
    assert bodies(fetch("d", lease=AT_ONCE, limit=3)[1]) == [2]
    run("settle", [URGENT], GROUP, 1, first)
    _, taken, dead, _, later = fetch("c", lease=AT_ONCE, limit=3)
    # What "d" had is over the limit, and died alone.
    assert (bodies(taken), ids(dead), later) == ([3], [second], 0)
    assert pending(client) == {third: ("c", 3)}


def test_a_dead_letter_that_cannot_be_written_stays_a_message(client: Any, fetch: Callable[..., Any]) -> None:
    (id_,) = add(client, 7)
    fetch("a")
    client.set(KEYS.dead(QUEUE), "somebody else's")

    assert fetch("b", lease=AT_ONCE, limit=1)[1:3] == [[], []]
    assert pending(client) == {id_: ("a", 1)}


def test_a_pending_entry_without_its_message_is_told_of_and_forgotten(client: Any, fetch: Callable[..., Any]) -> None:
    id_, other = add(client, 7, 8)
    fetch("a", 1)
    client.xdel(URGENT, id_)

    _, taken, _, gone, _ = fetch("b", lease=AT_ONCE)

    assert (bodies(taken), gone) == ([8], [[1, id_]])
    assert pending(client) == {other: ("b", 1)}


def test_due_messages_are_moved_in_order_and_no_more_than_asked(
    client: Any, run: Callable[..., Any], fetch: Callable[..., Any]
) -> None:
    for body in range(5):
        append(run, body, delay=60_000 + body, step=2)
    for tag in client.zrange(KEYS.due(QUEUE), 0, -1):
        client.zincrby(KEYS.due(QUEUE), -120_000, tag)

    next_due, taken, *_ = fetch("a", moved=3)
    assert (next_due, bodies(taken)) == (0, [0, 1, 2])
    next_due, taken, *_ = fetch("a", moved=3)
    assert (next_due, bodies(taken)) == (-1, [3, 4])
    assert client.exists(KEYS.due(QUEUE), KEYS.delayed(QUEUE)) == 0


# ---- settle, release, renew, bury -------------------------------------------------------------------------------


def test_settle_deletes_finished_ones_of_any_owner_and_may_be_repeated(
    client: Any, run: Callable[..., Any], fetch: Callable[..., Any]
) -> None:
    low = STREAMS[1]
    first, second = add(client, 1, 2)
    (third,) = add(client, 3, stream=low)
    fetch("a")
    arguments = (GROUP, 1, first, 1, third)

    assert run("settle", [URGENT, low], *arguments) == 2
    assert run("settle", [URGENT, low], *arguments) == 0
    assert run("settle", ["not-there"], GROUP, 1, first) == 0
    assert (list(pending(client)), client.xlen(URGENT), client.xlen(low)) == ([second], 1, 0)


def test_release_gives_back_what_is_still_ours_and_wakes_as_many_as_may_take_it(
    client: Any, run: Callable[..., Any], fetch: Callable[..., Any]
) -> None:
    first, second, third = add(client, 1, 2, 3)
    fetch("a")
    client.xclaim(URGENT, GROUP, "b", 0, [third], justid=True)
    names = [KEYS.wake(QUEUE), URGENT, URGENT, URGENT]

    assert run("release", names, GROUP, "a", "0", first, second, third) == 2
    assert run("release", names, GROUP, "a", "0", first, second, third) == 0

    assert pending(client) == {first: ("@free", 0), second: ("@free", 0), third: ("b", 1)}
    assert client.xlen(KEYS.wake(QUEUE)) == 2


def test_a_counted_release_waits_longer_each_time(
    client: Any, run: Callable[..., Any], fetch: Callable[..., Any]
) -> None:
    (id_,) = add(client, 1)
    fetch("a")
    for tries in (1, 2, 3, 4):
        run("release", [KEYS.wake(QUEUE), URGENT], GROUP, "a", "1", id_)
        next_due, taken, *_ = fetch("a")
        if tries == 1:
            assert bodies(taken) == [1]
            continue
        assert taken == []
        assert 250 * 2**tries - 200 < next_due <= 250 * 2**tries
        # Time passes.
        client.xclaim(URGENT, GROUP, "@free", 0, [id_], idle=250 * 2**tries, retrycount=tries, justid=True)
        assert bodies(fetch("a")[1]) == [1]


def test_renew_takes_nothing_back(client: Any, run: Callable[..., Any], fetch: Callable[..., Any]) -> None:
    first, second = add(client, 1, 2)
    fetch("a")
    client.xclaim(URGENT, GROUP, "b", 0, [second], justid=True)

    assert run("renew", [URGENT], GROUP, "a") == [[1, first]]
    assert run("renew", [URGENT, URGENT], GROUP, "a", first, second) == [[1, first]]
    assert run("renew", ["not-there"], GROUP, "a") == []
    assert pending(client) == {first: ("a", 1), second: ("b", 1)}


def test_renew_reaches_every_message_of_a_large_prefetch(
    client: Any, run: Callable[..., Any], fetch: Callable[..., Any]
) -> None:
    add(client, *range(1201))
    fetch("a", 2000)

    owned = run("renew", [URGENT], GROUP, "a")

    assert sum(len(each) - 1 for each in owned) == 1201


def test_bury_moves_what_is_ours_or_nothing(client: Any, run: Callable[..., Any], fetch: Callable[..., Any]) -> None:
    first, second = add(client, 1, 2)
    fetch("a")
    client.xclaim(URGENT, GROUP, "b", 0, [second], justid=True)
    names = [URGENT, KEYS.dead(QUEUE)]

    assert run("bury", names, GROUP, "a", first, "why", 100) == [b"body", b"1"]
    assert run("bury", names, GROUP, "a", first, "why", 100) is None
    assert run("bury", names, GROUP, "a", second, "why", 100) is None

    assert (pending(client), client.xlen(URGENT), client.xlen(KEYS.dead(QUEUE))) == ({second: ("b", 1)}, 1, 1)


def test_bury_loses_nothing_when_the_letter_cannot_be_written(
    client: Any, run: Callable[..., Any], fetch: Callable[..., Any]
) -> None:
    (id_,) = add(client, 1)
    fetch("a")
    client.set(KEYS.dead(QUEUE), "somebody else's")

    with pytest.raises(ResponseError, match="WRONGTYPE"):
        run("bury", [URGENT, KEYS.dead(QUEUE)], GROUP, "a", id_, "why", 100)

    assert (list(pending(client)), client.xlen(URGENT)) == ([id_], 1)


# ---- replay, purge, leave, reap ---------------------------------------------------------------------------------


def test_replay_puts_each_letter_back_once(client: Any, run: Callable[..., Any], fetch: Callable[..., Any]) -> None:
    (id_,) = add(client, 1)
    fetch("a")
    run("bury", [URGENT, KEYS.dead(QUEUE)], GROUP, "a", id_, "why", 100)
    ((letter, _),) = client.xrange(KEYS.dead(QUEUE))

    assert run("replay", [KEYS.dead(QUEUE), *STREAMS], letter, 1) == [letter]
    assert run("replay", [KEYS.dead(QUEUE), *STREAMS], letter, 1) == []
    assert [(each[2], each[3]) for each in fetch("b")[1]] == [(1, [b"body", b"1"])]


def test_purge_leaves_what_is_worked_on(client: Any, run: Callable[..., Any], fetch: Callable[..., Any]) -> None:
    held, given_back, *_ = add(client, *range(1205))
    fetch("a", 2)
    run("release", [KEYS.wake(QUEUE), URGENT], GROUP, "a", "0", given_back)
    append(run, 9, delay=60_000)
    names = [KEYS.due(QUEUE), KEYS.delayed(QUEUE), *STREAMS]

    assert run("purge", names, GROUP) == 1205
    assert run("purge", names, GROUP) == 0

    assert pending(client) == {held: ("a", 1)}
    assert [id_ for id_, _ in client.xrange(URGENT)] == [held]


def test_a_consumer_with_messages_is_not_removed(
    client: Any, run: Callable[..., Any], fetch: Callable[..., Any]
) -> None:
    (id_,) = add(client, 1)
    fetch("a")

    run("leave", STREAMS, GROUP, "a")
    run("reap", [KEYS.wake(QUEUE), *STREAMS], GROUP, 0)
    assert pending(client) == {id_: ("a", 1)}

    run("settle", [URGENT], GROUP, 1, id_)
    run("leave", STREAMS, GROUP, "a")
    assert client.xinfo_consumers(URGENT, GROUP) == []


def test_calls_to_look_that_a_killed_reader_had_are_removed(client: Any, run: Callable[..., Any]) -> None:
    client.xadd(KEYS.wake(QUEUE), {"why": "due"})
    client.xreadgroup(GROUP, "killed", {KEYS.wake(QUEUE): ">"})

    run("reap", [KEYS.wake(QUEUE), *STREAMS], GROUP, 0)

    assert client.xlen(KEYS.wake(QUEUE)) == 0
