"""Short ways to hold requests in a journal and its twin, shared by the journal's tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from journal.events import (
    BatchChanged,
    ChainPinned,
    ChainRestored,
    ChainSaved,
    ChainUnpinned,
    ClientGone,
    Decision,
    EngineReady,
    Fact,
    KvDropped,
    KvFreed,
    MemorySampled,
    PauseStarted,
    Record,
    RequestAdmitted,
    RequestCancelled,
    RequestPaused,
    RequestResumed,
    ResumeStarted,
)
from journal.journal import Journal
from journal.memory import MemoryJournal
from journal.queries import select_rows
from journal.rows import (
    AdoptionRow,
    MinuteRow,
    OrphanRow,
    PauseRow,
    PinRow,
    RequestRow,
    SampleRow,
)
from journal.tables import adoption, memory_sample, minute, orphan, pause, pin, request
from journal.tokens import SideRows
from tests.journal_steps import (
    KV_DOMAIN,
    MODEL,
    SECOND_NS,
    START_NS,
    SomeJournal,
    Steps,
    admitted,
    request_id,
    run_of,
)

Reason = Literal["high", "emergency", "no_room", "operator"]

A, B = ("a" * 64, "b" * 64)
NUM_CACHED = 40
PROMPT = range(NUM_CACHED - 1)
TAIL_BYTES = 80


def sample(active_bytes: int = 500) -> MemorySampled:
    return MemorySampled(
        active_bytes=active_bytes,
        cached_bytes=50,
        peak_bytes=600,
        process_bytes=700,
        available_bytes=800,
        age_ns=3_000_000,
    )


def pause_started(number: int, reason: Reason = "high") -> PauseStarted:
    return PauseStarted(
        request_id=request_id(number),
        number=number,
        reason=reason,
        usage_bytes=950,
        ceiling_bytes=1000,
        rank=1,
        num_candidates=3,
        frees_bytes=400,
        unsaved_bytes=90,
        num_cached_tokens=NUM_CACHED - 1,
        num_output_tokens=1,
    )


def chain_saved(number: int, tail_bytes: int = TAIL_BYTES) -> ChainSaved:
    return ChainSaved(
        request_id=request_id(number),
        number=number,
        tail_start=32,
        num_tokens=NUM_CACHED,
        tail_bytes=tail_bytes,
        duration_ns=1,
    )


def chain_pinned(number: int, names: Sequence[str]) -> ChainPinned:
    return ChainPinned(
        request_id=request_id(number),
        number=number,
        num_blocks=len(names),
        last_hash=names[-1] if names else "",
        tail_bytes=TAIL_BYTES,
        num_tokens=NUM_CACHED,
    )


def request_paused(number: int, reason: Reason = "high", *, had_row: bool = True) -> RequestPaused:
    return RequestPaused(
        request_id=request_id(number),
        number=number,
        reason=reason,
        had_row=had_row,
        num_cached_tokens=NUM_CACHED if had_row else 0,
        num_output_tokens=2 if had_row else 0,
    )


def kv_dropped(number: int) -> KvDropped:
    return KvDropped(
        request_id=request_id(number), number=number, reason="disk_full", num_cached_tokens=0
    )


def resume_started(number: int, num_cached: int, num_blocks: int = 0) -> ResumeStarted:
    return ResumeStarted(
        request_id=request_id(number),
        number=number,
        num_known_tokens=NUM_CACHED + 1,
        num_cached_tokens=num_cached,
        reserved_bytes=500,
        in_use_bytes=100,
        ceiling_bytes=1000,
        num_admitted=0,
        solo=False,
        num_blocks=num_blocks,
        has_tail=True,
        num_memory_tokens=0,
        num_disk_tokens=num_cached,
        parted_because="whole",
        held_ns=1,
    )


def chain_restored(number: int, memory: int, disk: int) -> ChainRestored:
    return ChainRestored(
        request_id=request_id(number),
        number=number,
        num_tokens=memory + disk,
        num_memory_tokens=memory,
        num_disk_tokens=disk,
        read_bytes=280,
        duration_ns=1,
    )


def request_resumed(number: int, num_cached: int, num_lost: int) -> RequestResumed:
    return RequestResumed(
        request_id=request_id(number),
        number=number,
        num_cached_tokens=num_cached,
        num_lost_tokens=num_lost,
    )


def chain_unpinned(
    number: int, reason: Literal["resumed", "ended", "lost"] = "resumed"
) -> ChainUnpinned:
    return ChainUnpinned(
        request_id=request_id(number),
        number=number,
        domain=KV_DOMAIN,
        num_blocks=2,
        last_hash="b" * 64,
        num_tokens=NUM_CACHED,
        tail_bytes=TAIL_BYTES,
        reason=reason,
    )


def cancelled(number: int) -> RequestCancelled:
    return RequestCancelled(
        request_id=request_id(number), number=number, reason="deadline", num_output_tokens=2
    )


class HoldingSteps(Steps[SomeJournal]):
    """Steps of a request that is held. Every method is one commit."""

    def decide(self, *decisions: Decision) -> list[Record]:
        return self.commit([ClientGone(request_id=request_id(999_999))], decisions)

    def know(self, *facts: Fact) -> list[Record]:
        return self.commit(facts)

    def begin_pause(self, number: int, reason: Reason = "high") -> list[Record]:
        """A decoding row leaves its batch."""
        self.batch = tuple(other for other in self.batch if other != number)
        self.num_batches += 1
        left = BatchChanged(batch=self.num_batches, numbers=self.batch, joined=(), left=(number,))
        return self.decide(pause_started(number, reason), left)

    def join_again(self, number: int) -> list[Record]:
        """A row that has all its tokens decodes."""
        self.batch += (number,)
        self.num_batches += 1
        joined = BatchChanged(batch=self.num_batches, numbers=self.batch, joined=(number,), left=())
        return self.decide(joined)

    def late_token(self, number: int, token: int) -> list[Record]:
        """The step that was launched before the row left its batch."""
        rows, self.batch = self.batch, (*self.batch, number)
        event, tokens = self.decoded({number: [token]}, {})
        self.batch = rows
        self.to_prefill[number] = self.to_prefill.get(number, 0) + 1
        return self.commit([event], [], SideRows(tokens={0: tokens}))

    def end_pause(self, number: int, names: Sequence[str]) -> list[Record]:
        """The tail is saved, and in the same step the chain pinned; then the row is gone."""
        pinned = [chain_pinned(number, names), request_paused(number)]
        self.commit([chain_saved(number)], pinned, durability="power")
        freed = KvFreed(request_id=request_id(number), number=number, freed_bytes=390)
        return self.know(freed)

    def resume(self, number: int, memory: int, disk: int, num_lost: int = 0) -> list[Record]:
        """The row is filled and goes on."""
        num_cached = memory + disk
        self.decide(resume_started(number, num_cached, num_cached // 16))
        went_on = [request_resumed(number, num_cached, num_lost), chain_unpinned(number)]
        return self.commit([chain_restored(number, memory, disk)], went_on)

    def ready(self, domain: str) -> list[Record]:
        """The engine of a run, which saves in another domain perhaps."""
        ready = EngineReady(model=MODEL, one_row_only=False, note="", load_ns=5, kv_domain=domain)
        return self.know(ready)


class Held:
    """A journal and its twin, to which the same is done, and whose rows must be the same."""

    def __init__(self, folder: Path) -> None:
        self.file = HoldingSteps(Journal.open(folder))
        self.twin = HoldingSteps(MemoryJournal())

    def __call__(self, name: str, *arguments: object) -> None:
        for steps in (self.file, self.twin):
            getattr(steps, name)(*arguments)
        self.check()

    def check(self) -> None:
        """The rows of the file are those of the twin, and of a rebuild."""
        twin = self.twin.journal
        assert {row.pause_seq: row for row in self.pauses()} == twin.pauses
        assert {row.number: row for row in self.pins()} == twin.pins
        assert {row.number: row for row in self.requests()} == twin.requests
        samples = select_rows(run_of(self.file.journal), memory_sample, SampleRow, "")
        assert {row.seq: row for row in samples} == twin.samples
        assert {(row.lost_seq, row.number): row for row in self.orphans()} == twin.orphans
        assert {row.seq: row for row in self.adoptions()} == twin.adoptions
        assert self.file.journal.verify() == []

    def kill(self) -> None:
        """What the process had in memory is gone; a run has yet to begin."""
        self.file.journal.close()
        self.file.journal = Journal.open(self.file.journal.file)
        self.twin.journal.reopen()
        for steps in (self.file, self.twin):
            steps.batch = ()

    def compact(self) -> None:
        """All events so far become the carried state."""
        for journal in (self.file.journal, self.twin.journal):
            journal.begin_compaction(journal.last.seq, 1, {})
            while not journal.advance_compaction():
                pass

    def requests(self) -> list[RequestRow]:
        return select_rows(run_of(self.file.journal), request, RequestRow, "ORDER BY number")

    def pauses(self) -> list[PauseRow]:
        return select_rows(run_of(self.file.journal), pause, PauseRow, "ORDER BY pause_seq")

    def pins(self) -> list[PinRow]:
        return select_rows(run_of(self.file.journal), pin, PinRow, "ORDER BY number")

    def orphans(self) -> list[OrphanRow]:
        return select_rows(run_of(self.file.journal), orphan, OrphanRow, "ORDER BY lost_seq")

    def adoptions(self) -> list[AdoptionRow]:
        return select_rows(run_of(self.file.journal), adoption, AdoptionRow, "ORDER BY seq")

    def minute(self) -> MinuteRow:
        rows = select_rows(run_of(self.file.journal), minute, MinuteRow, "ORDER BY minute")
        return rows[-1]

    def parts(self, number: int) -> tuple[int, int, int]:
        """Where the tokens of a request's prompt came from."""
        row = self.requests()[number - 1]
        return row.num_memory_tokens, row.num_disk_tokens, row.num_prefilled_tokens

    def close(self) -> None:
        self.check()
        self.file.journal.close()


def decoding(folder: Path) -> Held:
    """In step 7 request 1 has its first token; both blocks of its prompt are on disk."""
    held = Held(folder)
    held("start")
    held("receive", 1, PROMPT)
    held("join", 1)
    held("plan_blocks", 1, [A, B])
    held("save", A)
    held("save", B)
    held("decode", {1: [7]})
    return held


def at(step: int) -> int:
    return START_NS + step * SECOND_NS


def pause_of(held: Held) -> PauseRow:
    (pause,) = held.pauses()
    return pause


def phase_of(held: Held, number: int = 1) -> str:
    return held.requests()[number - 1].phase


def hold(held: Held) -> None:
    """Steps 8 to 11: the row leaves, the token under way comes, the tail is saved, all is freed."""
    held("begin_pause", 1)
    assert phase_of(held) == "pausing"
    held("late_token", 1, 8)
    held("end_pause", 1, [A, B])
    assert phase_of(held) == "paused"


def join_again(held: Held, number: int = 1) -> None:
    held("decide", BatchChanged(batch=9, numbers=(number,), joined=(number,), left=()))


def admitted_from(number: int, num_cached: int) -> RequestAdmitted:
    return msgspec.structs.replace(admitted(number), num_cached_tokens=num_cached)
