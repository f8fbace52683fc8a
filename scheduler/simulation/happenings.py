"""What may happen to a simulated server, by name: each is done to a world, and undone again where
it lasts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from journal import events
from scheduler.engine.fake_row import Failure
from scheduler.request import Phase
from scheduler.settings import NS_PER_MS
from scheduler.simulation.world import World

OTHER_MODEL = "6" * 64
OTHER_PROGRAM = "other model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that happens at a moment, and, where it is a state, is over after a while.
    `number` and `word` say more: which request or file, how much, what comes after it.
    """

    at_ms: int
    kind: str
    number: int = 0
    word: str = ""
    lasts_ms: int = 0


def plan(world: World, happening: Happening) -> None:
    """Lets it happen at its time."""
    begin, end = HAPPENINGS[happening.kind]
    at_ns = happening.at_ms * NS_PER_MS
    world.plan(at_ns, lambda: begin(world, happening))
    if end is not None:
        world.plan(at_ns + happening.lasts_ms * NS_PER_MS, lambda: end(world, happening))


# The ends of processes. The number is how many ms nobody is there, the word how the next one begins


def crash(world: World, happening: Happening) -> None:
    prepare_next(world, happening)
    if world.is_up:
        world.crash()


def lose_power(world: World, happening: Happening) -> None:
    prepare_next(world, happening)
    if world.is_up:
        world.crash(power=True)


def stop(world: World, happening: Happening) -> None:
    """With a second signal after a while, where it lasts."""
    prepare_next(world, happening)
    world.stop()


def stop_again(world: World, happening: Happening) -> None:
    if happening.lasts_ms and world.is_up and world.process.stopping.begun:
        world.stop()


def mark(world: World, happening: Happening) -> None:
    """From here on the process dies at the n-th pass of a point."""
    world.marks.arm(happening.word, happening.number)


def prepare_next(world: World, happening: Happening) -> None:
    """The settings and the model of the next process."""
    world.downtime_ns = happening.number * NS_PER_MS
    facts = world.home.facts
    if happening.word == OTHER_PROGRAM:
        world.coverage.meet("another model")
        facts = replace_model(world)
        world.disk.was_damaged = True  # held requests keep their tokens only
    world.hardware = replace(world.home, facts=facts)
    if happening.word in ("resume", "hold", "cancel"):
        requests = world.settings.requests.model_copy(update={"on_restart": happening.word})
        world.settings = world.settings.model_copy(update={"requests": requests})


def replace_model(world: World) -> events.ModelFacts:
    """Another model of the same sizes."""
    facts = world.home.facts
    return events.ModelFacts(
        **{
            name: getattr(facts, name)
            for name in facts.__struct_fields__
            if name not in ("name", "fingerprint")
        },
        name="another",
        fingerprint=OTHER_MODEL,
    )


# Disk, memory, journal, clock


def fill_disk(world: World, _: Happening) -> None:
    world.disk.trouble = "disk_full"


def break_disk(world: World, _: Happening) -> None:
    world.disk.trouble = "io_error"


def mend_disk(world: World, _: Happening) -> None:
    world.free_disk()


def break_reads(world: World, _: Happening) -> None:
    world.disk.fail_reads()


def slow_disk(world: World, happening: Happening) -> None:
    world.disk.slow_down(happening.number)


def damage_file(world: World, happening: Happening) -> None:
    """One file is lost, has other bytes, or fewer. Tails are few: every other time one of them."""
    names = sorted(world.disk.files)
    tails = [name for name in names if name.startswith("req_")]
    names = tails if tails and happening.number % 2 else names
    if not names:
        return
    name = names[happening.number // 2 % len(names)]
    how: Literal["missing", "corrupt", "cut"] = "corrupt"
    if happening.word in ("missing", "cut"):
        how = happening.word
    world.disk.damage(name, how)


def take_memory(world: World, happening: Happening) -> None:
    world.take_memory(happening.number)


def give_memory(world: World, happening: Happening) -> None:
    world.take_memory(-happening.number)


def keep_for_reuse(world: World, happening: Happening) -> None:
    """Buffers of work that is over are in the allocator's cache."""
    if world.engine.loaded:
        world.engine.memory.take(happening.number)
        world.engine.memory.take(-happening.number)


def fill_journal(world: World, _: Happening) -> None:
    world.journal.is_full = True


def free_journal(world: World, _: Happening) -> None:
    world.journal.is_full = False


def set_clock(world: World, happening: Happening) -> None:
    world.coverage.meet("clock jump")
    world.timeline.jump_ns += happening.number * NS_PER_MS


# Requests


def pick(world: World, happening: Happening) -> str | None:
    """One of the open requests."""
    ids = list(world.state.numbers)
    return ids[happening.number % len(ids)] if ids else None


def hold(world: World, happening: Happening) -> None:
    if (request_id := pick(world, happening)) is not None:
        world.wish(events.HoldRequested(request_id=request_id))


def release_all(world: World, _: Happening) -> None:
    for request_id in world.state.numbers:
        world.wish(events.ReleaseRequested(request_id=request_id))


def cancel(world: World, happening: Happening) -> None:
    if (request_id := pick(world, happening)) is not None:
        world.wish(events.CancelRequested(request_id=request_id))


def clear(world: World, _: Happening) -> None:
    world.wish(events.ClearRequested(by="somebody"))


def fail_row(world: World, happening: Happening) -> None:
    """The row of an open request fails in what it does next."""
    rows = [
        r for r in world.state.requests.values() if r.phase in (Phase.PREFILLING, Phase.DECODING)
    ]
    if rows and world.is_up:
        request = rows[happening.number % len(rows)]
        during = "prefill" if request.phase is Phase.PREFILLING else "decode"
        world.engine.failures.append(Failure(request.number, during))


# The end of a story


def settle(world: World, happening: Happening) -> None:
    """Nothing is in the way any more: everything works, and the process is one that goes on."""
    world.marks.disarm()
    world.journal.is_full = False
    world.ballast_bytes = 0
    world.disk.heal()
    world.store.probe()
    at_home = world.hardware == world.home and world.settings.requests.on_restart == "resume"
    prepare_next(world, replace(happening, number=0, word="resume"))
    if world.is_up and not at_home:
        world.crash()


def let_go(world: World, happening: Happening) -> None:
    """What is held goes on, and what this server can never run ends."""
    release_all(world, happening)
    for request in world.state.requests.values():
        if request.held_reason in ("other_model", "exceeds_capacity"):
            world.wish(events.CancelRequested(request_id=request.request_id))


Do = Callable[[World, Happening], None]

HAPPENINGS: dict[str, tuple[Do, Do | None]] = {
    "crash": (crash, None),
    "power": (lose_power, None),
    "stop": (stop, stop_again),
    "mark": (mark, None),
    "full disk": (fill_disk, mend_disk),
    "broken disk": (break_disk, mend_disk),
    "broken reads": (break_reads, mend_disk),
    "slow disk": (slow_disk, mend_disk),
    "damage": (damage_file, None),
    "memory": (take_memory, give_memory),
    "reuse": (keep_for_reuse, None),
    "full journal": (fill_journal, free_journal),
    "clock": (set_clock, None),
    "hold": (hold, release_all),
    "release": (release_all, None),
    "cancel": (cancel, None),
    "clear": (clear, None),
    "fail": (fail_row, None),
    "settle": (settle, None),
    "let go": (let_go, None),
}
"""What begins each of them, and what ends it."""
