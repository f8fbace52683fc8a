"""All that the scheduler knows: the folded journal. Only `evolve` changes it
(scheduler/evolve.py).
"""

import msgspec

from journal.events import Limits, ModelFacts, Orphaning
from scheduler.prefix import BlockIndex
from scheduler.request import Fed, Request

STATE_VERSION = 2
"""To be raised when the meaning of a field changes: snapshots of another version are not used."""


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one chunk that is planned and not committed. `done` once the engine has fed it."""

    number: int
    chunk: int
    start: int
    length: int
    done: bool = False


class Memory(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The newest reading, and what the readings before it came to.

    `usage_bytes` is the larger of the reading and the analytic sum, with what is reserved and not
    yet allocated. `num_high` and `num_emergency` count readings over a mark, one after the other,
    since the last action ended; `level` is the mark that is left only below it by the hysteresis.
    `tier_bytes` is what the rows leave below the low mark for blocks in memory,
    `passing_bytes` what of the reading goes away by itself.
    `declared`: the emergency is in the journal; `reclaimed`: the allocator was asked,
    and nothing else was done since.
    """

    active_bytes: int = 0
    cached_bytes: int = 0
    sampled_ns: int = 0
    usage_bytes: int = 0
    ceiling_bytes: int | None = None
    num_high: int = 0
    num_emergency: int = 0
    tier_bytes: int | None = None
    passing_bytes: int = 0
    level: str = ""
    declared: bool = False
    reclaimed: bool = False


class Relief(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An action against pressure whose effect has not been measured yet. `number`: whose row."""

    rung: str
    expected_bytes: int
    until_ns: int
    number: int = 0


class Remembered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that has finished, whose answer is for whoever sends it again until `until_ns`."""

    request_id: str
    number: int
    model_fingerprint: str
    content_digest: str
    session_digest: str
    key_digest: str
    orphaned_by: Orphaning | None
    orphaned_ns: int
    num_output_tokens: int
    ended_ns: int
    until_ns: int


class SchedulerState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The folded journal. Lists of requests hold their numbers; `requests` holds open requests
    only.

    `leaving` maps the number of a row that has ended, and whose bytes the engine has not given
    back yet, to those bytes. `arrivals`, `endings`, `cancellations` and `failures` are what the
    facts of a step have brought for `decide` to answer; they are empty between steps. `unsaved`
    names the requests that have full blocks to save. `paused` holds the held requests in the order
    in which they go on, `pausing` rows on their way there, `holds` what an operator wants held and
    `decide` has not answered. `reliefs` are actions against pressure under way.

    `lost` and `found` say until when requests may be without a client: those whose connection was
    lost, and those that a start has found; each in the order of these times. `orphans` are rows
    whose client is lost and that `decide` has not held yet. `keys` maps the digest of an
    Idempotency-Key to the request that holds it, open or in `remembered`: what has finished and may
    be asked for again. `drained`: a stop lets rows go on no longer.

    `num_chunk_tokens` are those of all planned chunks; `fed` is the last one that was fed.
    `step_ns` is what a decode step took lately; 0: not known. `chunk_bytes_per_token` is what
    chunks needed lately beside what they left behind, for each of their tokens. `progress_ns` is
    when anything went on last.
    """

    seq: int = 0
    step: int = 0
    run_id: int = 0
    now_ns: int = 0
    policy_version: int = 0
    code_digest: str = ""
    limits: Limits | None = None
    model: ModelFacts | None = None
    max_context_tokens: int = 0
    engine_ready: bool = False
    one_row_only: bool = False
    stopping: bool = False
    next_number: int = 1
    requests: dict[int, Request] = {}
    numbers: dict[str, int] = {}
    waiting: list[int] = []
    held: list[int] = []
    admitted: list[int] = []
    batch: int = 0
    batch_rows: list[int] = []
    chunk: Chunk | None = None
    num_chunks: int = 0
    num_chunk_tokens: int = 0
    decoded_since_chunk: bool = False
    reserved_bytes: int = 0
    reserved_tokens: int = 0
    leaving: dict[int, int] = {}
    arrivals: list[int] = []
    endings: list[int] = []
    cancellations: list[int] = []
    failures: list[int] = []
    index: BlockIndex = msgspec.field(default_factory=BlockIndex)
    unsaved: dict[int, None] = {}
    clearing: bool = False
    paused: list[int] = []
    pausing: list[int] = []
    holds: list[int] = []
    memory: Memory = msgspec.field(default_factory=Memory)
    reliefs: list[Relief] = []
    fed: Fed | None = None
    chunk_bytes_per_token: int = 0
    step_ns: int = 0
    progress_ns: int = 0
    lost: dict[int, int] = {}
    found: dict[int, int] = {}
    orphans: list[int] = []
    keys: dict[str, str] = {}
    remembered: dict[str, Remembered] = {}
    drained: bool = False

    def find(self, request_id: str) -> Request | None:
        """The open request with this id."""
        number = self.numbers.get(request_id)
        return None if number is None else self.requests[number]

    def get(self, request_id: str) -> Request:
        """The open request with this id, for decisions: it must exist."""
        request = self.find(request_id)
        assert request is not None, f"a decision names {request_id}, which is not open"
        return request
