"""Short ways to make events and journals, shared by the journal's tests."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from journal.database import Durability, Run
from journal.events import (
    BatchChanged,
    BlockSaved,
    BlockSavePlanned,
    ClientGone,
    Decision,
    EngineReady,
    Fact,
    KvLimits,
    Limits,
    ModelFacts,
    Part,
    PlannedBlock,
    PrefillChunkCommitted,
    Record,
    RequestAdmitted,
    RequestFinished,
    RequestQueued,
    RequestReceived,
    ServerStarted,
    TokensDecoded,
)
from journal.journal import Journal
from journal.memory import MemoryJournal
from journal.tokens import NO_ROWS, Logprobs, SideRows, StepTokens, pack_ids

SomeJournal = TypeVar("SomeJournal", bound=Journal | MemoryJournal)

START_NS = 1_760_000_000_000_000_000
SECOND_NS = 1_000_000_000

KV_DOMAIN = "d" * 64
KV_BLOCK_TOKENS = 16
LIMITS = Limits(
    max_rows=8,
    max_waiting=1000,
    token_budget=65536,
    chunk_tokens=2048,
    chunk_tokens_beside_rows=64,
    default_max_tokens=1024,
    ceiling_bytes=None,
    max_retries=2,
    max_deaths=2,
    kv=KvLimits(
        block_tokens=KV_BLOCK_TOKENS,
        max_bytes=10**9,
        memory_bytes=0,
        writing_bytes=10**6,
        reserve_bytes=0,
        max_age_ns=0,
        state_every_blocks=0,
        await_ns=0,
    ),
)
MODEL = ModelFacts(
    name="fake",
    fingerprint="0" * 64,
    context_tokens=8192,
    weights_bytes=1_000,
    kv_bytes_per_token=10,
    kv_step_tokens=256,
    window_layers=(),
    state_bytes=0,
    transient_bytes_per_token=1,
)


def request_id(number: int) -> str:
    """The request id that tests give to a request."""
    return f"req_{number:026d}"


def server_started(policy_version: int = 1) -> ServerStarted:
    return ServerStarted(
        policy_version=policy_version,
        code_digest="digest",
        limits=LIMITS,
        model=MODEL,
        engine_nonce=7,
        configuration={"scheduler.max_rows": 8},
        platform="test",
        blas="none",
        versions={"python": "3.11.0", "sqlite": "3.40.1", "mlx": "0.0.0"},
        process_id=1,
    )


class Steps(Generic[SomeJournal]):
    """Commits steps to a journal, one second apart. Every method is one commit."""

    def __init__(self, journal: SomeJournal) -> None:
        self.journal = journal
        self.batch: tuple[int, ...] = ()
        self.num_batches = 0
        self.to_prefill: dict[int, int] = {}

    def commit(
        self,
        facts: Sequence[Fact],
        decisions: Sequence[Decision] = (),
        side: SideRows = NO_ROWS,
        durability: Durability = "process",
    ) -> list[Record]:
        journal = self.journal
        at_ns = max(journal.last_at_ns, START_NS) + SECOND_NS
        step = journal.last_step + 1
        return journal.commit(step, at_ns, facts, decisions, side, durability=durability)

    def start(self, policy_version: int = 1) -> list[Record]:
        ready = EngineReady(
            model=MODEL, one_row_only=False, note="", load_ns=5, kv_domain=KV_DOMAIN
        )
        return self.commit([server_started(policy_version), ready])

    def receive(self, number: int, prompt: Sequence[int] = (1, 2, 3)) -> list[Record]:
        name = request_id(number)
        self.to_prefill[number] = len(prompt) - 1
        queued = RequestQueued(request_id=name, max_tokens=100, num_waiting=1)
        side = SideRows([(name, pack_ids(prompt))], [(name, b'{"route":"chat"}')])
        return self.commit([received(number, len(prompt))], [queued], side)

    def join(self, *numbers: int) -> list[Record]:
        """Admits and prefills requests, and lets them decode."""
        self.batch += numbers
        self.num_batches += 1
        decisions: list[Decision] = []
        for number in numbers:
            held = self.to_prefill[number]
            fed = PrefillChunkCommitted(request_id=request_id(number), num_cached_tokens=held)
            decisions += [admitted(number), fed] if held else [admitted(number)]
        decisions.append(
            BatchChanged(batch=self.num_batches, numbers=self.batch, joined=numbers, left=())
        )
        gone = ClientGone(request_id=request_id(999_999))
        return self.commit([gone], decisions)

    def decode(
        self, tokens: dict[int, list[int]], logprobs: dict[int, list[Logprobs]] | None = None
    ) -> list[Record]:
        """One decode step of the batch; rows that `tokens` does not name get none."""
        event, rows = self.decoded(tokens, logprobs or {})
        for number, ids in tokens.items():
            self.to_prefill[number] = self.to_prefill.get(number, 0) + len(ids)
        return self.commit([event], [], SideRows(tokens={0: rows}))

    def decoded(
        self, tokens: dict[int, list[int]], logprobs: dict[int, list[Logprobs]]
    ) -> tuple[TokensDecoded, StepTokens]:
        event = TokensDecoded(
            batch=self.num_batches,
            numbers=self.batch,
            counts=tuple(len(tokens.get(number, [])) for number in self.batch),
            ended=(),
            duration_ns=11,
        )
        rows = [(tokens.get(number, []), logprobs.get(number)) for number in self.batch]
        return event, StepTokens.of(rows)

    def plan_blocks(self, number: int, names: Sequence[str]) -> list[Record]:
        """A chain of blocks of a request is to be saved."""
        blocks = [
            PlannedBlock(index=index, hash=name, part="block", parent=parent)
            for index, (parent, name) in enumerate(zip(["", *names], names, strict=False))
        ]
        plan = BlockSavePlanned(request_id=request_id(number), number=number, blocks=tuple(blocks))
        return self.commit([ClientGone(request_id=request_id(999_999))], [plan])

    def save(self, name: str, num_bytes: int = 100, part: Part = "block") -> list[Record]:
        """A file of a block is on disk."""
        return self.commit([BlockSaved(hash=name, part=part, saved_bytes=num_bytes, duration_ns=1)])

    def finish(self, number: int, tokens: list[int], num_output_tokens: int) -> list[Record]:
        """The last decode step of a request, with its end."""
        event, rows = self.decoded({number: tokens}, {})
        self.batch = tuple(other for other in self.batch if other != number)
        self.num_batches += 1
        end = RequestFinished(
            request_id=request_id(number),
            number=number,
            reason="length",
            num_prompt_tokens=3,
            num_output_tokens=num_output_tokens,
        )
        left = BatchChanged(batch=self.num_batches, numbers=self.batch, joined=(), left=(number,))
        return self.commit([event], [end, left], SideRows(tokens={0: rows}), "power")


def run_sql(journal: Journal, statement: str, *values: Any) -> Any:
    """The result of a statement on the connection that writes, to look or to break behind its
    back.
    """
    return run_of(journal)(statement, *values)


def run_of(journal: Journal) -> Run:
    """What runs statements on the connection that writes."""
    return journal._run  # pyright: ignore[reportPrivateUsage]


def received(number: int, num_prompt_tokens: int = 3) -> RequestReceived:
    return RequestReceived(
        request_id=request_id(number),
        number=number,
        client_request_id=None,
        model_fingerprint=MODEL.fingerprint,
        route="/v1/chat/completions",
        stream=True,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=100,
        seed=1,
        parameters_digest="d",
    )


def admitted(number: int) -> RequestAdmitted:
    return RequestAdmitted(
        request_id=request_id(number),
        number=number,
        num_known_tokens=3,
        num_cached_tokens=0,
        reserved_bytes=10,
        in_use_bytes=0,
        ceiling_bytes=None,
        num_admitted=1,
        solo=False,
    )
