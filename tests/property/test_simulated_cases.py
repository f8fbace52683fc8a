"""Lost clients, deaths and broken disks one at a time, each in virtual time."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest

from journal import events
from scheduler.request import Phase
from scheduler.simulation.checks import check_end
from scheduler.simulation.happenings import Happening, plan
from scheduler.simulation.models import small_ceiling, small_machine, small_settings
from scheduler.simulation.world import Asked, Habits, World, nothing

S = 1_000_000_000
LIMIT_NS = 3_600 * S
ROW = Asked(num_prompt_tokens=100, max_tokens=60)
RESENDS = Habits(content=1, returns="resend", back_ns=S)
FIRST, SECOND = f"req_{1:026}", f"req_{2:026}"

E = TypeVar("E", bound=events.AnyEvent)


def world_of(**overrides: object) -> World:
    """A small server with room for three rows, in which files become durable in any order."""
    settings = small_settings(small_ceiling(800, num_rows=3), **overrides)
    world = World(settings, small_machine(), seed=1)
    world.disk.jitter = world.random
    return world


def run(world: World) -> World:
    """To its end, with all that must hold then."""
    world.run(LIMIT_NS)
    check_end(world)
    return world


def happen(world: World, at_ms: int, kind: str, **details: int | str) -> None:
    plan(world, Happening(at_ms=at_ms, kind=kind, **details))  # pyright: ignore[reportArgumentType]


def when(world: World, reached: Callable[[], bool], do: Callable[[], None]) -> None:
    """Does something the first time that this holds after a step."""

    def look() -> None:
        if reached():
            world.watch = nothing
            world.timeline.at(world.timeline.now_ns, do)

    world.watch = look


def events_of(world: World, kind: type[E]) -> list[E]:
    """All of this kind, in order."""
    return [r.event for r in world.journal.read() if isinstance(r.event, kind)]


def num_put_out(world: World) -> int:
    """The tokens that engines have put out for requests, in all lives."""
    return sum(sum(event.counts) for event in events_of(world, events.TokensDecoded))


def outcomes_of(world: World) -> list[str]:
    return [client.outcome for client in world.clients]


def hold_second(world: World) -> None:
    """The second request is held by hand while it decodes, for some seconds. Who lets it go on asks
    twice, since a process may have died of the first time.
    """
    world.plan(2 * S, lambda: world.wish(events.HoldRequested(request_id=SECOND)))
    release = events.ReleaseRequested(request_id=SECOND)
    for at_s in (5, 8):
        world.plan(at_s * S, lambda: world.wish(release))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        ("request_received", 2),
        ("prefill_chunk_committed", 1),
        ("tokens_decoded", 9),
        ("pause_started", 1),
        ("tail_save_planned", 1),
        ("chain_pinned", 1),
        ("resume_started", 1),
        ("request_resumed", 1),
        ("request_finished", 1),
    ],
)
def test_a_step_counts_when_it_is_committed_though_none_of_its_effects_came(
    moment: str, kind: str, passes: int
) -> None:
    world = world_of()
    for content in (1, 2):
        world.ask(ROW, Habits(content=content, back_ns=S))
    hold_second(world)
    world.marks.arm(f"commit.{moment}.{kind}", passes)
    run(world)
    assert world.nonce == 2, "the process has died once"
    assert outcomes_of(world) == ["finished (length)"] * 2
    assert num_put_out(world) == 120, "nothing is put out twice"


def test_a_process_that_dies_while_it_starts_is_followed_by_another() -> None:
    world = world_of(requests__max_deaths=100)
    world.ask(ROW)
    world.plan(2 * S, world.crash)
    for point in ("recovery.state", "recovery.done", "recovery.started"):
        world.plan(1 * S, partial(world.marks.arm, point, 1))
    run(world)
    assert world.nonce == 5
    assert outcomes_of(world) == ["finished (length)"]
    assert num_put_out(world) == 60


@pytest.mark.parametrize("crash", [False, True])
def test_what_is_sent_again_is_the_same_request(*, crash: bool) -> None:
    world = world_of()
    world.ask(ROW, RESENDS)
    if crash:
        world.plan(2 * S, world.crash)
    else:
        world.plan(2 * S, lambda: world.clients[0].lose_connection())
    run(world)
    adopted = events_of(world, events.RequestAdopted)
    assert [e.orphaned_by for e in adopted] == ["restart" if crash else "client_gone"]
    assert outcomes_of(world) == ["finished (length)"]
    assert num_put_out(world) == 60
    assert len(world.truth.delivered) == 1, "there is one answer"


def test_the_answer_of_one_that_finished_meanwhile_is_given_once() -> None:
    world = world_of()
    world.ask(ROW, Habits(content=1, returns="resend", back_ns=20 * S))
    world.ask(Asked(num_prompt_tokens=100, max_tokens=60, at_ns=40 * S), RESENDS)
    world.plan(2 * S, world.crash)
    run(world)
    assert world.coverage["adoption of a finished request"] == 1
    assert num_put_out(world) == 120, "the other one asks anew"


def test_equal_twins_are_two_requests_as_long_as_both_have_their_clients() -> None:
    world = world_of()
    for _ in range(2):
        world.ask(ROW, RESENDS)
    run(world)
    assert world.records["RequestAdopted"] == 0
    assert num_put_out(world) == 120


def test_what_its_client_has_cancelled_is_adopted_by_nobody() -> None:
    world = world_of()
    world.ask(ROW, Habits(content=1, cancels_at_tokens=5))
    world.ask(Asked(num_prompt_tokens=100, max_tokens=60, at_ns=2 * S), RESENDS)
    run(world)
    assert outcomes_of(world) == ["cancelled (cancel_requested)", "finished (length)"]
    assert world.records["RequestAdopted"] == 0


def test_a_key_is_one_request_in_all_lives() -> None:
    world = world_of()
    keyed = Habits(content=1, key=1, returns="resend", back_ns=S)
    for at_s in (0, 1, 30):
        world.ask(Asked(num_prompt_tokens=100, max_tokens=60, at_ns=at_s * S), keyed)
    world.ask(Asked(num_prompt_tokens=90, max_tokens=60, at_ns=S), Habits(content=2, key=1))
    world.plan(2 * S, world.crash)
    run(world)
    assert outcomes_of(world) == ["finished (length)"] * 3 + ["key_reused"]
    assert num_put_out(world) == 60


def test_a_request_whose_client_leaves_while_it_is_held_waits_for_it() -> None:
    world = world_of()
    world.ask(ROW)
    world.ask(ROW, Habits(leaves_ns=(3 * S,), back_ns=6 * S))
    world.plan(2 * S, lambda: world.wish(events.HoldRequested(request_id=SECOND)))
    world.plan(12 * S, lambda: world.wish(events.ReleaseRequested(request_id=SECOND)))
    run(world)
    assert world.coverage["disconnect while paused"] == 1
    [resumed] = events_of(world, events.RequestResumed)
    assert resumed.num_lost_tokens == 0
    assert outcomes_of(world) == ["finished (length)"] * 2


def test_cancelled_attempts_at_a_long_prompt_get_further_each_time() -> None:
    """Its client waits two seconds, and nobody for its client."""
    world = world_of(requests__orphan_grace_s=0, kv__await_ms=0)
    long = Asked(num_prompt_tokens=2_000, max_tokens=5)
    world.settings = small_settings(small_ceiling(2_100), requests__orphan_grace_s=0)
    world.downtime_ns = 0
    world.plan(0, world.crash)
    world.ask(
        Asked(long.num_prompt_tokens, long.max_tokens, at_ns=S),
        Habits(content=1, returns="resend", back_ns=S, patience_ns=2 * S),
    )
    run(world)
    admitted = events_of(world, events.RequestAdmitted)
    found = [event.num_cached_tokens for event in admitted]
    assert len(found) >= 2
    assert found == sorted(set(found)), "each finds more than the one before"
    fed = sum(event.length for event in events_of(world, events.PrefillChunkDone))
    assert fed <= 2_000 + 200 * len(found), "what was saved is not fed again"
    assert outcomes_of(world) == ["finished (length)"]


# Stops


def test_a_stop_holds_what_does_not_finish_and_the_next_start_goes_on_from_there() -> None:
    world = world_of(server__drain_limit_ms=500, server__hold_limit_ms=5_000)
    for _ in range(2):
        world.ask(ROW)
    happen(world, 2_000, "stop", number=1_000)
    run(world)
    paused = events_of(world, events.RequestPaused)
    assert [event.reason for event in paused] == ["drain", "drain"]
    assert [e.num_lost_tokens for e in events_of(world, events.RequestResumed)] == [0, 0]
    assert num_put_out(world) == 120


def test_a_second_signal_ends_at_once_and_loses_nothing() -> None:
    world = world_of(server__drain_limit_ms=5_000)
    world.ask(ROW)
    happen(world, 2_000, "stop", lasts_ms=20)
    run(world)
    assert world.coverage["second signal"] == 1
    assert world.records["RequestPaused"] == 0
    assert num_put_out(world) == 60


def test_a_stop_while_the_journal_is_full_ends_within_its_limits() -> None:
    world = world_of(server__drain_limit_ms=500, server__hold_limit_ms=500)
    world.ask(ROW)
    happen(world, 1_900, "full journal", lasts_ms=20_000)
    happen(world, 2_000, "stop", number=25_000)
    run(world)
    assert world.nonce == 2
    assert outcomes_of(world) == ["finished (length)"]


@pytest.mark.parametrize(
    ("on_restart", "outcome"),
    [
        ("resume", "finished (length)"),
        ("hold", "cancelled (nobody_attached)"),
        ("cancel", "cancelled (on_restart)"),
    ],
)
def test_what_a_start_makes_of_a_request_that_nobody_comes_for(
    on_restart: str, outcome: str
) -> None:
    world = world_of(requests__restart_grace_s=30)
    world.ask(ROW, Habits(returns="never"))
    happen(world, 2_000, "crash", word=on_restart)
    run(world)
    [row] = world.journal.requests.values()
    assert f"{row.outcome} ({row.reason})" == outcome


def test_a_request_of_another_model_waits_until_its_own_is_served_again() -> None:
    world = world_of()
    world.ask(ROW)
    happen(world, 2_000, "crash", word="other model")
    happen(world, 9_000, "crash")
    run(world)
    assert num_put_out(world) == 60
    assert outcomes_of(world) == ["finished (length)"]


# Disks


def tail_of(world: World) -> str:
    [tail] = [name for name in world.disk.files if name.startswith(SECOND)]
    return tail


def is_paused(world: World) -> bool:
    return any(r.phase is Phase.PAUSED for r in world.state.requests.values())


@pytest.mark.parametrize("part", ["tail", "block"])
def test_a_bad_file_at_a_resume_costs_what_is_behind_it(part: str) -> None:
    world = world_of()
    world.ask(ROW)
    world.ask(ROW)
    hold_second(world)

    def damage() -> None:
        blocks = world.state.requests[2].hashes
        world.disk.damage(tail_of(world) if part == "tail" else blocks[1], "corrupt")

    when(world, lambda: is_paused(world), damage)
    run(world)
    assert world.coverage[f"bad {part} at a resume"] >= 1
    [resumed] = events_of(world, events.RequestResumed)
    [pinned] = events_of(world, events.ChainPinned)
    good = pinned.num_tokens // 16 * 16 if part == "tail" else 16
    assert resumed.num_cached_tokens == good
    assert resumed.num_lost_tokens == pinned.num_tokens - good
    assert outcomes_of(world) == ["finished (length)"] * 2


@pytest.mark.parametrize(
    ("kind", "reason"), [("full disk", "disk_full"), ("broken disk", "io_error")]
)
def test_a_disk_that_fails_under_a_tail_costs_the_row_and_not_the_request(
    kind: str, reason: str
) -> None:
    world = world_of()
    for _ in range(2):
        world.ask(ROW)
    hold_second(world)
    happen(world, 1_900, kind, lasts_ms=2_000)
    run(world)
    assert [event.reason for event in events_of(world, events.KvDropped)] == [reason]
    assert outcomes_of(world) == ["finished (length)"] * 2


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_loss_of_power_takes_what_was_not_flushed_and_no_more(durability: str) -> None:
    world = world_of(journal__durability=durability)
    for _ in range(2):
        world.ask(ROW)
    hold_second(world)
    for at_s in (2, 4, 6):
        world.plan(at_s * S, partial(world.crash, power=True))
    run(world)
    assert outcomes_of(world) == ["finished (length)"] * 2
    assert num_put_out(world) == 120, "what is lost of the journal was never put out"
    if durability == "power":
        assert world.journal.commits["process"] == 0
