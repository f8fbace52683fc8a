"""What a server is asked while it is ended: variants that together come to every point.

Each is drawn from a seed. All of them are small, since each is played hundreds of times.
"""

import errno
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from tools.crash_checks import Allowed
from tools.crash_child import Ballast, Fault, RowFailure
from tools.crash_clients import CHAT, TEXT, Act, Ask

Groups = dict[str, dict[str, Any]]


NOTHING = Allowed()


@dataclass(frozen=True)
class Script:
    """One drawn variant. `faults`, `failures` and `ballast` befall each life. `idle_s`: how long
    the server is left alone before it is stopped, so that upkeep comes. `journal` is what it starts
    with: none at all, an empty one, or one that has grown too large. `loses`: files vanish between
    two lives. `stops`: the first life is stopped in the middle of its work.
    """

    settings: Groups
    asks: tuple[Ask, ...]
    allowed: Allowed = NOTHING
    faults: tuple[Fault, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    ballast: tuple[Ballast, ...] = ()
    idle_s: float = 0.0
    journal: Literal["none", "empty", "grown"] = "empty"
    loses: bool = False
    stops: bool = False


QUIET: Groups = {
    "server": {"host": "127.0.0.1", "port": 0, "drain_limit_ms": 5_000},
    "scheduler": {"chunk_tokens": 48, "gap_ms": 0},
    "memory": {"ceiling": "none"},
    "requests": {"max_deaths": 100, "orphan_grace_s": 0},
    "journal": {"snapshot_events": 100, "gather_steps": 20, "upkeep_s": 1},
    "kv": {
        "block_tokens": 16,
        "reserve_bytes": 0,
        "memory_bytes": 0,
        "probe_s": 1,
        "measure_s": 1,
    },
    "fake": {"turn_tokens": 0},
}


def settings(**groups: Mapping[str, Any]) -> Groups:
    """The usual ones, and these."""
    return {name: {**QUIET.get(name, {}), **groups.get(name, {})} for name in {**QUIET, **groups}}


def text_of(rng: Random, length: int) -> str:
    """A prompt of so many tokens: a token is a character."""
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(length))


def ask(
    rng: Random, prompt: str, max_tokens: int, *acts: Act, stream: bool = True, **more: Any
) -> Ask:
    """A request on either route, with or without log-probabilities."""
    body: dict[str, Any] = {"model": "default", "max_tokens": max_tokens, "stream": stream}
    body |= {"ignore_eos": True, "seed": rng.randrange(1000)}
    wants_logprobs = rng.random() < 0.25
    if rng.random() < 0.5:
        body |= {"prompt": prompt}
        body |= {"logprobs": 2} if wants_logprobs else {}
        return Ask(TEXT, body, acts, by_header=rng.random() < 0.5, **more)
    body |= {"messages": [{"role": "user", "content": prompt}]}
    body |= {"logprobs": True, "top_logprobs": 2} if wants_logprobs else {}
    return Ask(CHAT, body, acts, by_header=rng.random() < 0.5, **more)


def plain(rng: Random) -> Script:
    """More requests than rows, of all forms, with prompts that share what they begin with."""
    shared = text_of(rng, rng.randrange(60, 160))
    asks = (
        ask(rng, shared + text_of(rng, 40), rng.randrange(40, 90)),
        ask(rng, shared + text_of(rng, 30), 30, stream=False),
        ask(rng, text_of(rng, 200), 30, after_tokens=20),
        ask(rng, shared + text_of(rng, 20), 40, after_tokens=40, sends_again=True),
        ask(rng, text_of(rng, 90), 400, Act(10, "cancel"), after_tokens=30),
        ask(rng, text_of(rng, 50), 400, Act(8, "leave"), after_tokens=60),
    )
    groups = settings(scheduler={"max_rows": 3, "chunk_tokens": 48})
    return Script(groups, asks, journal="none")


def states(rng: Random) -> Script:
    """A model with layers that cannot be cut, whose prompts come again."""
    prompt = text_of(rng, 150)
    asks = (
        ask(rng, prompt + text_of(rng, 60), 40),
        ask(rng, prompt + text_of(rng, 60), 40, after_tokens=30),
        ask(rng, prompt + text_of(rng, 10), 200, *by_hand(rng), after_tokens=50),
        ask(rng, text_of(rng, 30), 60, Act(30, "clear"), after_tokens=60),
    )
    fake = {"turn_tokens": 0, "state_bytes": 2_000, "kv_bytes_per_token": 100}
    return Script(settings(fake=fake, kv={"state_every_blocks": 2}), asks)


def left(rng: Random) -> Script:
    """Clients that lose their connections: some come back, some send again, one never returns; one
    has a key, and so has another who asks for the same. A stop has little time.
    """
    dropped = (Act(rng.randrange(5, 20), "drop"),)
    key = f"key {rng.randrange(1000)}"
    keyed = ask(rng, text_of(rng, 40), 60, Act(10, "leave"), key=key)
    asks = (
        ask(rng, text_of(rng, 80), 80, *dropped),
        ask(rng, text_of(rng, 70), 80, *dropped, sends_again=True),
        ask(rng, text_of(rng, 60), 400, Act(10, "leave")),
        keyed,
        replace(keyed, acts=(), after_tokens=40),
        ask(rng, text_of(rng, 300), 60, Act(1, "leave")),
    )
    requests = {
        "orphan_grace_s": 1,
        "on_restart": rng.choice(("resume", "resume", "hold", "cancel")),
        "restart_grace_s": 1,
    }
    server = {"drain_limit_ms": 30}
    return Script(settings(requests=requests, server=server, fake={"step_ms": 1}), asks)


def awaited(rng: Random) -> Script:
    """Prompts that begin alike come together, so that one waits for what another computes."""
    shared = text_of(rng, 240)
    asks = tuple(ask(rng, shared + text_of(rng, 20), 40) for _ in range(4))
    return Script(settings(fake={"prefill_tokens_per_s": 4_000}), asks)


def by_hand(rng: Random, *between: str) -> tuple[Act, ...]:
    """Held once it has come somewhere, then something, then let go."""
    at = rng.randrange(5, 30)
    verbs = ("pause", "until paused", *between, "resume")
    return tuple(Act(at, verb) for verb in verbs)


def stopped(rng: Random) -> Script:
    """A clean stop comes in the middle of everything, and has little time."""
    asks = (
        ask(rng, text_of(rng, 200), 150),
        ask(rng, text_of(rng, 60), 150),
        ask(rng, text_of(rng, 80), 150, *by_hand(rng)),
        ask(rng, text_of(rng, 300), 60, after_tokens=20),
    )
    groups = settings(server={"drain_limit_ms": 30}, fake={"step_ms": 2})
    return Script(groups, asks, stops=True)


def held(rng: Random) -> Script:
    """An operator holds requests, lets them go, and cancels one meanwhile."""
    asks = (
        ask(rng, text_of(rng, 100), 150, *by_hand(rng)),
        ask(rng, text_of(rng, 60), 150, *by_hand(rng)),
        ask(rng, text_of(rng, 80), 150, *by_hand(rng, "cancel")),
        ask(rng, text_of(rng, 30), 60, after_tokens=40),
    )
    kv = {"memory_bytes": rng.choice((0, 100_000))}
    return Script(settings(kv=kv), asks)


def damaged(rng: Random) -> Script:
    """Files go bad while requests are held, and vanish while no server runs."""
    asks = (
        ask(rng, text_of(rng, 200), 150, *by_hand(rng, rng.choice(("corrupt", "remove")))),
        ask(rng, text_of(rng, 120), 120, *by_hand(rng, "corrupt tail")),
        ask(rng, text_of(rng, 30), 60, after_tokens=40),
    )
    fake = {"turn_tokens": 0, "state_bytes": rng.choice((0, 2_000))}
    return Script(settings(fake=fake), asks, Allowed(lost=True), loses=True)


def pressed(rng: Random, rows_bytes: int, length: int, max_tokens: int, **memory: Any) -> Script:
    """Three prompts under a ceiling for one and a half."""
    state_bytes = rng.choice((0, 30_000))
    model_bytes = 1_040_000
    groups = settings(
        fake={
            "turn_tokens": 0,
            "step_ms": 1,
            "prefill_tokens_per_s": 50_000,
            "kv_step_tokens": 32,
            "state_bytes": state_bytes,
        },
        memory={
            "ceiling": model_bytes + rows_bytes + 2 * state_bytes,
            "sample_ms": 10,
            **memory,
        },
        kv={"block_tokens": 32, "writing_bytes": 100_000 + state_bytes},
        scheduler={"chunk_tokens": 128, "gap_ms": 0},
    )
    asks = tuple(ask(rng, text_of(rng, length), max_tokens) for _ in range(3))
    return Script(groups, asks)


def tight_prefill(rng: Random) -> Script:
    """Short of memory while prompts are fed."""
    return pressed(rng, 610_000, 352, 20, reserve="chunk")


def tight_decode(rng: Random) -> Script:
    """Short of memory while outputs grow."""
    return pressed(rng, 680_000, 95, 165, growth_tokens=1)


def crowded_out(rng: Random) -> Script:
    """Something else takes memory and gives it back: every rung of the ladder."""
    ceiling = 2_000_000
    script = pressed(rng, 960_000, 95, 120, growth_tokens=1)
    memory = script.settings["memory"] | {"ceiling": ceiling, "act_limit_ms": 50}
    kv = script.settings["kv"] | {"memory_bytes": 200_000}
    asks = tuple(ask(rng, text_of(rng, 95), 150) for _ in range(3))
    at = rng.randrange(8, 14)
    ballast = (
        Ballast(at, 600_000),
        Ballast(at + 15, 900_000),
        Ballast(at + 22, 0),
        Ballast(at + 30, 700_000),
        Ballast(at + 45, 0),
    )
    groups = script.settings | {"memory": memory, "kv": kv}
    return Script(groups, asks, Allowed(aborts=True), ballast=ballast)


def full(rng: Random) -> Script:
    """The disk of saved KV is full for a while, and is tried again until it has room."""
    first = rng.randrange(2, 12)
    error = rng.choice((errno.ENOSPC, errno.EIO))
    fault = Fault("file.write.before.block", error, first, first)
    asks = (
        ask(rng, text_of(rng, 200), 60, *by_hand(rng)),
        ask(rng, text_of(rng, 120), 120, *by_hand(rng)),
        ask(rng, text_of(rng, 40), 180, after_tokens=20),
    )
    return Script(settings(fake={"turn_tokens": 0, "step_ms": 10}), asks, faults=(fault,))


def full_tails(rng: Random) -> Script:
    """The disk is full in the middle of a pause."""
    fault = Fault("file.write.before.tail", rng.choice((errno.ENOSPC, errno.EIO)))
    asks = tuple(ask(rng, text_of(rng, length), 60, *by_hand(rng)) for length in (120, 60, 40))
    return Script(settings(fake={"turn_tokens": 0, "step_ms": 4}), asks, faults=(fault,))


def unreadable(rng: Random) -> Script:
    """A row cannot be filled because the disk does not read."""
    fault = Fault(f"file.read.before.{rng.choice(('block', 'tail'))}", errno.EIO, 1, 3)
    asks = (
        ask(rng, text_of(rng, 100), 150, *by_hand(rng)),
        ask(rng, text_of(rng, 60), 150, *by_hand(rng)),
    )
    return Script(settings(), asks, Allowed(lost=True), faults=(fault,))


def crowded_disk(rng: Random) -> Script:
    """More blocks than there is room for, on disk and in memory; and the cache is cleared."""
    asks = [ask(rng, text_of(rng, 150), 30, after_tokens=30 * number) for number in range(5)]
    asks.append(ask(rng, text_of(rng, 40), 60, Act(10, "clear"), after_tokens=90))
    kv = {"max_bytes": 300_000, "memory_bytes": 100_000}
    return Script(settings(kv=kv), tuple(asks))


def refused(rng: Random) -> Script:
    """Prompts that are too long, rows that fail once and that fail for good, and one too old."""
    asks = (
        ask(rng, text_of(rng, 100), 40),
        ask(rng, text_of(rng, 2_100), 40),
        ask(rng, text_of(rng, 100), 60, after_tokens=10),
        ask(rng, text_of(rng, 100), 1_000, after_tokens=20),
        ask(rng, text_of(rng, 2_200), 1, stream=False),
    )
    failures = (
        RowFailure(1, "decode", 10),
        RowFailure(1, "decode", 20),
        RowFailure(2, "decode", 10),
        RowFailure(3, "prefill", 0),
    )
    requests = {"max_deaths": 100, "max_retries": 1, "max_age_s": 1}
    fake = {"turn_tokens": 0, "context_tokens": 2_048, "step_ms": 5}
    groups = settings(requests=requests, fake=fake)
    return Script(groups, asks, Allowed(aborts=True), failures=failures)


def kept_up(rng: Random) -> Script:
    """A journal that is too large and has tokens to purge: it is shortened once nobody works."""
    asks = (ask(rng, text_of(rng, 60), 40), ask(rng, text_of(rng, 60), 40, after_tokens=30))
    groups = settings(
        requests={"max_deaths": 100, "retention_s": 0},
        journal={**QUIET["journal"], "keep_bytes": 2**20},
    )
    return Script(groups, asks, Allowed(purges=True), idle_s=1.6, journal="grown")


def long_log(rng: Random) -> Script:
    """So many commits that the log is copied into the file."""
    asks = tuple(ask(rng, text_of(rng, 20), 620) for _ in range(2))
    return Script(settings(journal={"gather_steps": 100, "snapshot_events": 500}), asks)


VARIANTS: dict[str, Callable[[Random], Script]] = {
    variant.__name__: variant
    for variant in (
        plain,
        states,
        awaited,
        left,
        stopped,
        held,
        damaged,
        tight_prefill,
        tight_decode,
        crowded_out,
        full,
        full_tails,
        unreadable,
        crowded_disk,
        refused,
        kept_up,
        long_log,
    )
}
"""By name. Those that are played sooner come first."""
