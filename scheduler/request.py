"""A request as the scheduler sees it, and the life that it can lead.

A request is its tokens, and nothing in this module holds them: the scheduler decides by counts. KV
is a cache of those tokens, so a request that loses its row loses time only, and goes back to
`waiting` with all that it is.

The life of a request is a table. A row of it reads: in this phase, an event of this kind leads to
that phase. What the table does not list is illegal, raises `IllegalTransition` and changes
nothing.

- A request is born `waiting`, by `request_received`. In the same step `decide` takes it
  (`request_queued`) or refuses it (`request_rejected`), so a received request that nobody has
  judged exists only inside a step.
- `request_admitted` gives it a row in the engine: it is `prefilling` until all of its known tokens
  but the last are in the row's caches. The last token is pending: the first decode step feeds it.
  So a prompt of one token has nothing to prefill, and passes through `prefilling` within one step.
- `batch_changed` that names it among the joined makes it `decoding`. From here on, at every
  committed boundary, the cached positions are prompt + output - 1.
- A row may be held: `pause_started` makes it `pausing`. It leaves the batch, its launched step
  comes in, what disk lacks of it is saved, and with `request_paused` it is `paused`: it has no row,
  and the chain that `chain_pinned` names is its KV. With `kv_dropped` it has its tokens only. One
  that waits can be paused too; it has nothing to save.
- `resume_started` gives it a row again, which is filled from its chain: it is `resuming` until
  `request_resumed`, then `prefilling`, most often with nothing left to prefill.
- Its row may fail (`request_retried`), or the process may end (`server_started` of the next run):
  it is `waiting` again, and what it has put out so far is now known, to be prefilled like a prompt.
- Its client may be lost. A request with a row is held then, one without is put aside with its
  tokens, and neither goes on before somebody attaches to it. A request that is sent again is
  `joined` with the one that it equals, whose client it brings back; it is none of its own any more.
- `finished`, `cancelled`, `aborted`, `rejected` and `joined` are ends. Nothing leads out of them,
  and a request that has reached one leaves the state in the same step.
"""

from enum import StrEnum

import msgspec

from journal.events import Orphaning


class Phase(StrEnum):
    """Where a request is in its life. The values are stored in journals and are for ever."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    ABORTED = "aborted"
    REJECTED = "rejected"
    JOINED = "joined"


WITH_ROW = (Phase.PREFILLING, Phase.DECODING, Phase.PAUSING, Phase.RESUMING)
OPEN = (Phase.WAITING, *WITH_ROW, Phase.PAUSED)
ENDS = (Phase.FINISHED, Phase.CANCELLED, Phase.ABORTED, Phase.REJECTED, Phase.JOINED)

TRANSITIONS: dict[tuple[Phase, str], Phase] = {
    (Phase.WAITING, "request_queued"): Phase.WAITING,
    (Phase.WAITING, "request_rejected"): Phase.REJECTED,
    (Phase.WAITING, "request_joined"): Phase.JOINED,
    (Phase.WAITING, "request_admitted"): Phase.PREFILLING,
    (Phase.WAITING, "request_cancelled"): Phase.CANCELLED,
    (Phase.WAITING, "request_aborted"): Phase.ABORTED,
    (Phase.WAITING, "request_deferred"): Phase.WAITING,
    (Phase.WAITING, "server_started"): Phase.WAITING,
    (Phase.WAITING, "request_paused"): Phase.PAUSED,
    (Phase.PREFILLING, "chain_restored"): Phase.PREFILLING,
    (Phase.PREFILLING, "prefill_chunk_planned"): Phase.PREFILLING,
    (Phase.PREFILLING, "prefill_chunk_committed"): Phase.PREFILLING,
    (Phase.PREFILLING, "batch_changed"): Phase.DECODING,
    (Phase.PREFILLING, "pause_started"): Phase.PAUSING,
    (Phase.PREFILLING, "request_retried"): Phase.WAITING,
    (Phase.PREFILLING, "request_cancelled"): Phase.CANCELLED,
    (Phase.PREFILLING, "request_aborted"): Phase.ABORTED,
    (Phase.PREFILLING, "server_started"): Phase.WAITING,
    (Phase.DECODING, "tokens_decoded"): Phase.DECODING,
    (Phase.DECODING, "pause_started"): Phase.PAUSING,
    (Phase.DECODING, "request_retried"): Phase.WAITING,
    (Phase.DECODING, "request_finished"): Phase.FINISHED,
    (Phase.DECODING, "request_cancelled"): Phase.CANCELLED,
    (Phase.DECODING, "request_aborted"): Phase.ABORTED,
    (Phase.DECODING, "server_started"): Phase.WAITING,
    (Phase.PAUSING, "chain_restored"): Phase.PAUSING,
    (Phase.PAUSING, "prefill_chunk_committed"): Phase.PAUSING,
    (Phase.PAUSING, "tokens_decoded"): Phase.PAUSING,
    (Phase.PAUSING, "tail_save_planned"): Phase.PAUSING,
    (Phase.PAUSING, "request_paused"): Phase.PAUSED,
    (Phase.PAUSING, "request_retried"): Phase.WAITING,
    (Phase.PAUSING, "request_finished"): Phase.FINISHED,
    (Phase.PAUSING, "request_cancelled"): Phase.CANCELLED,
    (Phase.PAUSING, "request_aborted"): Phase.ABORTED,
    (Phase.PAUSING, "server_started"): Phase.WAITING,
    (Phase.PAUSED, "resume_started"): Phase.RESUMING,
    (Phase.PAUSED, "request_cancelled"): Phase.CANCELLED,
    (Phase.PAUSED, "request_aborted"): Phase.ABORTED,
    (Phase.RESUMING, "chain_restored"): Phase.RESUMING,
    (Phase.RESUMING, "request_resumed"): Phase.PREFILLING,
    (Phase.RESUMING, "request_paused"): Phase.PAUSED,
    (Phase.RESUMING, "request_retried"): Phase.WAITING,
    (Phase.RESUMING, "request_cancelled"): Phase.CANCELLED,
    (Phase.RESUMING, "request_aborted"): Phase.ABORTED,
    (Phase.RESUMING, "server_started"): Phase.PAUSED,
}


class IllegalTransition(Exception):
    """An event that the phase of its request does not allow. The request is unchanged."""

    def __init__(self, request_id: str, phase: Phase, kind: str) -> None:
        super().__init__(f"{request_id} is {phase.value}, where {kind} cannot happen")
        self.request_id = request_id
        self.phase = phase
        self.kind = kind


class Fed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chunk that was fed: behind so many tokens, of so many, in so long."""

    start: int
    length: int
    duration_ns: int


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One open request. Only `evolve` changes it.

    `number` orders requests by arrival and breaks every tie. `max_tokens` bounds the output in
    all. `reserved_bytes` is the upper bound of its row, held from admission to the row's end.
    `joined_batch` is the batch with which it began to decode: tokens of an earlier one belong to a
    row that is gone. `end_reason`, `cancel_reason` and `failure` are what facts have said and
    `decide` has not answered yet; they are null between steps.

    `hashes` names the full blocks of its known tokens, in order. It holds `leases` on those that
    are on disk; `unsaved` are the indexes of those that are full in its row and neither on disk
    nor planned. While `restoring`, its row is being filled from saved blocks; so many tokens of
    its prompt came from memory and from disk. `deferred_hash` is the block of another request for
    which it waited in the queue. `fed` is its last chunk in its row, and `turn_tokens` what the
    state's `num_chunk_tokens` was when its turn was last.

    `first_admitted_seq` orders held requests and victims: who got a row first. `hold` is an
    operator's wish that stands until it is released. While it is pausing or paused, `pause_reason`
    says why; `tail_start` is the position behind its last whole block, of which there are
    `chain_blocks`, once the tail's save is planned, `saved_tokens` the position up to which its
    KV is durable (-1: none of it is, and it has its tokens only), and `pins` its pinned blocks.
    `room_tokens` is the room that its row has from the start when it is filled from disk.
    `resuming_tokens` is what its row held when it was paused, `resumed_tokens` when it went on: it
    is left alone until it has made some progress since. `held_ns` is how long it was held, in all
    pauses that are over.

    `orphaned_by` says since `orphaned_ns` why it has no client; `needs_client`: it does not go on
    without one. The digests are those of `request_received`.
    """

    number: int
    request_id: str
    model_fingerprint: str
    route: str
    num_prompt_tokens: int
    asked_max_tokens: int | None
    received_ns: int
    phase: Phase = Phase.WAITING
    max_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    reserved_bytes: int = 0
    queued_seq: int = 0
    admitted_ns: int = 0
    joined_batch: int = 0
    turn_tokens: int = 0
    fed: Fed | None = None
    retries: int = 0
    deaths: int = 0
    solo: bool = False
    held_reason: str | None = None
    end_reason: str | None = None
    cancel_reason: str | None = None
    failure: str | None = None
    num_suffix_tokens: int = 0
    keep_output: bool = True
    hashes: list[str] = []
    leases: dict[str, None] = {}
    unsaved: list[int] = []
    restoring: bool = False
    num_memory_tokens: int = 0
    num_disk_tokens: int = 0
    deferred_hash: str = ""
    deferred_ns: int = 0
    deferred_until_ns: int = 0
    first_admitted_seq: int = 0
    hold: bool = False
    pause_reason: str | None = None
    paused_ns: int = 0
    held_ns: int = 0
    num_pauses: int = 0
    tail_planned: bool = False
    tail_start: int = 0
    chain_blocks: int = 0
    room_tokens: int = 0
    tail_bytes: int = 0
    saved_tokens: int = -1
    save_failure: str | None = None
    pins: dict[str, None] = {}
    pin_domain: str = ""
    dropped_alone: bool = False
    resumed_tokens: int | None = None
    resuming_tokens: int = 0
    content_digest: str = ""
    session_digest: str = ""
    key_digest: str = ""
    owner_digest: str = ""
    orphaned_by: Orphaning | None = None
    orphaned_ns: int = 0
    needs_client: bool = False

    @property
    def stays_held(self) -> bool:
        """Whether it does not go on though there is room: an operator holds it, this server cannot
        run it, or nobody would read what it puts out.
        """
        return self.hold or self.needs_client or self.held_reason is not None

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output so far: all tokens that this request is."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Known tokens that are still to be fed before it can decode. The last known one is never
        among them.
        """
        return self.num_known_tokens - 1 - self.num_cached_tokens

    @property
    def num_prefilled_tokens(self) -> int:
        """The prompt's tokens that its row, or the one that it had before it was held, computed."""
        restored = self.num_memory_tokens + self.num_disk_tokens
        is_held = self.phase is Phase.PAUSED or (self.restoring and self.saved_tokens >= 0)
        cached = self.resuming_tokens if is_held else self.num_cached_tokens
        return min(cached, self.num_prompt_tokens) - restored


def order_of(request: Request) -> tuple[int, int]:
    """Who was in the engine first, and of those who never were, who was queued first."""
    return (request.first_admitted_seq or request.queued_seq, request.number)


def enter(request: Request, kind: str) -> None:
    """Moves the request to the phase to which an event of this kind leads.

    Raises IllegalTransition, and changes nothing, when the table has no such row.
    """
    phase = TRANSITIONS.get((request.phase, kind))
    if phase is None:
        raise IllegalTransition(request.request_id, request.phase, kind)
    request.phase = phase
