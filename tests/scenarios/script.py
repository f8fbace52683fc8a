"""Plays a scenario file against the core and writes down what came of it.

A file is blocks with an empty line between them. A block is one step: a fact a line, then `----`,
then what the step led to: its records with their seqs, its effects with the seq of their cause,
and the open requests behind it. Lines before the first block that begin with # say what the
scenario is about.

    server_started max_rows=2 ceiling_bytes=9000000 fingerprint=other
    engine_ready one_row_only=true
    request_received a num_prompt_tokens=20 max_tokens=5
    prefill_chunk_done                      the chunk that is planned
    tokens_decoded a=stop                   a token for each row of the batch, and who ends
    kv_freed a
    engine_failed a during=prefill
    cancel_requested a
    client_gone a
    server_stopping

With saved KV (a value with commas is a list):

    server_started kv.max_bytes=64000
    engine_ready kv_domain=d
    blocks_named a first=0 hashes=h0,h1
    block_saved h0 saved_bytes=16000        the file of a block, or with part=state of a state
    block_save_failed h0 reason=io_error
    chain_restored a num_tokens=32
    block_corrupt h0 reason=missing
    blocks_lost hashes=h0,h1
    store_measured free_bytes=5
    saving_stopped, saving_resumed, clear_requested, clock_ticked

With marks, and requests that are held:

    server_started ceiling_bytes=9000000 memory.growth_tokens=16
    memory_sampled active_bytes=8000000 cached_bytes=500000
    memory_reclaimed freed_bytes=500000 active_bytes=8000000
    chain_saved a number=1 tail_start=32 num_tokens=40 tail_bytes=8000
    chain_save_failed a number=1 reason=disk_full
    hold_requested a, release_requested a

With clients that are looked after:

    server_started orphans.grace_ns=5000000000
    request_received a num_prompt_tokens=20 content=c session=s key=k
    client_attached a
    drain_ended

    after 30s                               not a fact: the step is so much later
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec

from journal import events
from journal.events import AnyEvent, Record
from scheduler.effects import Effect
from scheduler.request import Phase, Request
from scheduler.state import SchedulerState
from tests.unit.core_driver import LIMITS, MEMORY, MODEL, CoreDriver, server_started
from tests.unit.kv_driver import KV
from tests.unit.orphan_driver import ORPHANS

RULE = "----"
AFTER = "after "
Details = dict[str, Any]


def rewritten(text: str) -> str:
    """The scenario with what its steps lead to now."""
    head, *blocks = text.strip().split("\n\n")
    script = Script()
    played = [script.play(block.partition(RULE)[0].strip()) for block in blocks]
    return "\n\n".join([head, *played]) + "\n"


class Script:
    """One scenario in progress."""

    def __init__(self) -> None:
        self.driver = CoreDriver()
        self.arrived = 0

    def play(self, block: str) -> str:
        """Takes one step with the facts of this block; the block with its outcome."""
        first, self.arrived = len(self.driver.records), 0
        lines = block.splitlines()
        waits = [line for line in lines if line.startswith(AFTER)]
        self.driver.now_ns += sum(seconds_of(line) * 10**9 for line in waits)
        self.driver.step(*(self.fact(line) for line in lines if line not in waits))
        state = self.driver.state
        lines = [self.line_of(record) for record in self.driver.records[first:]]
        lines += [f"-> {self.words_of_effect(effect)}" for effect in self.driver.effects]
        lines += [f"   {standing(state, state.requests[number])}" for number in state.requests]
        return "\n".join([block, RULE, *lines])

    def fact(self, line: str) -> AnyEvent:
        """The fact that a line names. Raises KeyError for a kind that scenarios do not know."""
        kind, *words = line.split()
        names = [word for word in words if "=" not in word]
        details = dict(word.split("=") for word in words if "=" in word)
        return FACTS[kind](self, *names, **details)

    def line_of(self, record: Record) -> str:
        """A record, without what its script line says already."""
        kind = events.kind_of(type(record.event).__name__)
        if record.source == "fact":
            return f"{record.seq} {kind}"
        return f"{record.seq} {kind} {words_of(fields_of(record.event))}".rstrip()

    def words_of_effect(self, effect: Effect) -> str:
        details = asdict(effect)
        seq, _ = details.pop("seq"), details.pop("event", None)
        kind = events.kind_of(type(effect).__name__)
        return f"{kind} {words_of(details)}".rstrip() + f" ({seq})"


def seconds_of(line: str) -> int:
    """How much later a step is. Raises ValueError for anything but whole seconds."""
    return int(line.removeprefix(AFTER).removesuffix("s"))


def fields_of(event: AnyEvent) -> Details:
    """The fields that say something: not those that have their default."""
    unset = {field.name: field.default for field in msgspec.structs.fields(event)}
    fields = msgspec.structs.asdict(event)
    return {name: value for name, value in fields.items() if value != unset[name]}


def words_of(details: Details) -> str:
    """Fields as words; the request's id stands alone, numbers that explain are unfolded, and what
    is null, false or empty is left out.
    """
    words: list[str] = []
    for name, value in details.items():
        if value is None or value is False or value == "":
            continue
        if name == "request_id":
            words.insert(0, value)
        elif isinstance(value, msgspec.Struct):
            words.append(words_of(msgspec.structs.asdict(value)))
        elif isinstance(value, tuple):
            words.append(f"{name}={','.join(map(word_of, value)) or '-'}")
        else:
            words.append(f"{name}={value}" if " " not in str(value) else f"{name}='{value}'")
    return " ".join(words)


def word_of(value: object) -> str:
    """One of several values: a block to be saved by its name."""
    if isinstance(value, events.PlannedBlock):
        return value.hash if value.part == "block" else f"{value.hash}.state"
    return str(value)


def standing(state: SchedulerState, request: Request) -> str:
    """Where a request is now."""
    words = f"{request.request_id}: {request.phase.value}"
    words += f" {request.num_prompt_tokens}+{request.num_output_tokens} tokens"
    if request.phase is not Phase.WAITING:
        words += f", {request.num_cached_tokens} cached, {request.reserved_bytes} bytes"
    if request.held_reason is not None:
        words += f", held: {request.held_reason}"
    if request.orphaned_by is not None:
        words += f", without client: {request.orphaned_by}"
    for what in ("retries", "deaths"):
        if getattr(request, what):
            words += f", {getattr(request, what)} {what}"
    return words + (", solo" if request.solo else "")


# Facts


def start(script: Script, **details: str) -> AnyEvent:
    script.driver.run_id += 1
    limits = changed(LIMITS, details)
    parts = {"kv": KV, "memory": MEMORY, "orphans": ORPHANS}
    for part, default in parts.items():
        about = {
            k.removeprefix(f"{part}."): v for k, v in details.items() if k.startswith(f"{part}.")
        }
        if about:
            limits = msgspec.structs.replace(limits, **{part: changed(default, about)})
    model = changed(MODEL, details)
    script.driver.model = model
    return server_started(limits, model)


def changed(default: Any, details: dict[str, str]) -> Any:
    """Limits or model facts with what the line says of them."""
    fields = {name: details[name] for name in default.__struct_fields__ if name in details}
    whole = msgspec.structs.asdict(default) | fields
    return msgspec.convert(whole, type(default), strict=False)


def ready(
    script: Script, one_row_only: str = "false", kv_domain: str = "", **details: str
) -> AnyEvent:
    return events.EngineReady(
        model=changed(script.driver.model, details),
        one_row_only=one_row_only == "true",
        note="",
        load_ns=1,
        kv_domain=kv_domain,
    )


def receive(
    script: Script, name: str, num_prompt_tokens: str, max_tokens: str = "none", **digests: str
) -> AnyEvent:
    limit = None if max_tokens == "none" else int(max_tokens)
    arrival = script.driver.receive(int(num_prompt_tokens), limit, name=name)
    script.arrived += 1
    known = {f"{what}_digest": digest for what, digest in digests.items()}
    return msgspec.structs.replace(arrival, number=arrival.number + script.arrived - 1, **known)


def fail(script: Script, name: str, during: str) -> AnyEvent:
    fact = script.driver.failed(name)
    return msgspec.convert(msgspec.to_builtins(fact) | {"during": during}, events.EngineFailed)


def about_blocks(kind: type[AnyEvent], **defaults: object) -> Callable[..., AnyEvent]:
    """Reads a fact about blocks: what the line leaves out has these values."""

    def read(_: Script, *names: str, **details: str) -> AnyEvent:
        lists = {k: v.split(",") for k, v in details.items() if k in LISTS}
        named = {"request_id" if kind in OF_REQUESTS else "hash": name for name in names}
        return msgspec.convert({**defaults, **named, **details, **lists}, kind, strict=False)

    return read


LISTS = ("hashes", "states", "tails")
OF_REQUESTS = (
    events.BlocksNamed,
    events.ChainRestored,
    events.ChainSaved,
    events.ChainSaveFailed,
    events.ChainRestoreFailed,
)
NO_TOKENS = {"num_memory_tokens": 0, "num_disk_tokens": 0, "read_bytes": 0, "duration_ns": 1}

FACTS: dict[str, Callable[..., AnyEvent]] = {
    "server_started": start,
    "engine_ready": ready,
    "request_received": receive,
    "prefill_chunk_done": lambda script: script.driver.chunk_done(),
    "tokens_decoded": lambda script, **ends: script.driver.decoded(**ends),
    "kv_freed": lambda script, name: script.driver.freed(name),
    "engine_failed": fail,
    "cancel_requested": lambda _, name: events.CancelRequested(request_id=name),
    "client_gone": lambda _, name: events.ClientGone(request_id=name),
    "client_attached": lambda _, name: events.ClientAttached(request_id=name),
    "drain_ended": lambda _: events.DrainEnded(),
    "server_stopping": lambda _: events.ServerStopping(reason="SIGTERM"),
    "blocks_named": about_blocks(events.BlocksNamed, first=0),
    "block_saved": about_blocks(events.BlockSaved, part="block", duration_ns=1),
    "block_save_failed": about_blocks(events.BlockSaveFailed, part="block", detail=""),
    "saving_stopped": about_blocks(events.SavingStopped, detail=""),
    "saving_resumed": about_blocks(events.SavingResumed, stopped_ns=1),
    "chain_restored": about_blocks(events.ChainRestored, number=0, **NO_TOKENS),
    "block_corrupt": about_blocks(events.BlockCorrupt, part="block", detail=""),
    "blocks_lost": about_blocks(events.BlocksLost, hashes=(), states=(), reason="missing"),
    "store_measured": about_blocks(events.StoreMeasured, num_swept=0, swept_bytes=0),
    "clear_requested": about_blocks(events.ClearRequested, by="test"),
    "clock_ticked": about_blocks(events.ClockTicked),
    "memory_sampled": about_blocks(
        events.MemorySampled, cached_bytes=0, peak_bytes=0, process_bytes=0, available_bytes=0
    ),
    "memory_reclaimed": about_blocks(
        events.MemoryReclaimed, cached_bytes=0, active_bytes=0, duration_ns=1
    ),
    "hold_requested": lambda _, name: events.HoldRequested(request_id=name),
    "release_requested": lambda _, name: events.ReleaseRequested(request_id=name),
    "chain_saved": about_blocks(events.ChainSaved, duration_ns=1),
    "chain_save_failed": about_blocks(events.ChainSaveFailed, detail=""),
    "chain_restore_failed": about_blocks(events.ChainRestoreFailed, number=0, detail=""),
}
assert set(FACTS) == {events.kind_of(fact.__name__) for fact in events.FACTS} - {"state_carried"}
