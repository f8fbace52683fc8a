"""The fake engine keeps the rules of scheduler/engine/base.py."""

import threading

import pytest

from journal.events import ModelFacts
from scheduler.engine.base import (
    ChunkDone,
    DropRow,
    EngineDied,
    EngineLoaded,
    EngineResult,
    ReleaseStep,
    RowFailed,
    RowFreed,
    RowTokens,
    RunChunk,
    SetBatch,
    StartRow,
    StepDone,
)
from scheduler.engine.fake import FakeEngine, fake_facts
from scheduler.engine.fake_row import Failure
from scheduler.engine.fake_settings import FakeSettings
from scheduler.engine.fake_tokenizer import END_OF_TURN, FakeTokenizer
from scheduler.parameters import SamplingParameters

FACTS: ModelFacts = fake_facts(FakeSettings(context_tokens=4096))
SAMPLING = SamplingParameters(seed=1)


class Bench:
    """An engine without a thread, and what it delivered."""

    def __init__(self, nonce: int = 1, turn_tokens: int = 0) -> None:
        settings = FakeSettings(turn_tokens=turn_tokens)
        self.engine = FakeEngine(FACTS, nonce, settings, threaded=False)
        self.results: list[EngineResult] = []
        self.engine.start(self.results.append)
        assert self.run() == [EngineLoaded(FACTS, False, "", 0)]

    def run(
        self, *commands: StartRow | RunChunk | SetBatch | ReleaseStep | DropRow
    ) -> list[EngineResult]:
        """Hands commands over, lets the engine work until it has nothing to do."""
        for command in commands:
            self.engine.submit(command)
        self.engine.work_until_idle()
        results, self.results[:] = list(self.results), []
        return results

    def prefilled(
        self,
        number: int,
        *tokens: int,
        max_tokens: int = 100,
        sampling: SamplingParameters = SAMPLING,
    ) -> None:
        """A row whose tokens but the last are in its caches."""
        start = start_row(number, tokens, max_tokens=max_tokens, sampling=sampling)
        commands: list[StartRow | RunChunk] = [start]
        if len(tokens) > 1:
            commands.append(RunChunk(number, number, 0, len(tokens) - 1))
        self.run(*commands)

    def step(self, *commands: SetBatch | ReleaseStep | DropRow) -> StepDone:
        """The one decode step that comes of these commands."""
        steps = [result for result in self.run(*commands) if isinstance(result, StepDone)]
        assert len(steps) == 1, "one step is delivered until its release"
        return steps[0]


def start_row(
    number: int,
    tokens: tuple[int, ...],
    num_prompt_tokens: int | None = None,
    max_tokens: int = 100,
    sampling: SamplingParameters = SAMPLING,
) -> StartRow:
    num_prompt_tokens = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return StartRow(number, f"req_{number}", tokens, num_prompt_tokens, max_tokens, sampling)


def ids(step: StepDone) -> dict[int, tuple[int, ...]]:
    return {row.number: row.token_ids for row in step.rows}


def test_a_chunk_fills_the_caches() -> None:
    bench = Bench()
    [done] = bench.run(start_row(1, tuple(range(600))), RunChunk(1, 5, 0, 300))
    assert isinstance(done, ChunkDone)
    row_bytes = 512 * FACTS.kv_bytes_per_token  # 300 tokens, allocated in steps of 256
    assert (done.number, done.chunk, done.start, done.length) == (1, 5, 0, 300)
    assert done.active_bytes == FACTS.weights_bytes + row_bytes
    assert done.peak_bytes == done.active_bytes + 300 * FACTS.transient_bytes_per_token
    assert bench.run(DropRow(1)) == [RowFreed(1, row_bytes)]
    assert bench.engine.num_prefilled_tokens == 300


def test_dropping_an_unknown_row_frees_nothing() -> None:
    assert Bench().run(DropRow(7)) == [RowFreed(7, 0)]


def test_one_step_is_ahead_and_no_more() -> None:
    bench = Bench()
    bench.prefilled(1, 10, 11)
    first = bench.step(SetBatch(1, (1,)))
    row = bench.engine.rows[1]
    assert row.num_output_tokens == 2, "the next step is computed and kept back"
    assert bench.run() == []
    second = bench.step(ReleaseStep())
    assert [row.tokens[2:4]] == [[*ids(first)[1], *ids(second)[1]]]
    assert row.num_output_tokens == 3


def test_a_dropped_row_gets_nothing_from_the_step_ahead() -> None:
    bench = Bench()
    bench.prefilled(1, 10)
    bench.prefilled(2, 20)
    bench.step(SetBatch(1, (1, 2)))
    step = bench.step(DropRow(1), SetBatch(2, (2,)), ReleaseStep())
    assert step.batch == 1, "it was launched for the batch before"
    assert step.rows[0] == RowTokens(1, (), None)
    assert len(step.rows[1].token_ids) == 1
    assert ids(bench.step(ReleaseStep())).keys() == {2}


def test_a_row_that_leaves_the_batch_still_gets_the_step_ahead() -> None:
    bench = Bench()
    bench.prefilled(1, 10)
    bench.prefilled(2, 20)
    bench.step(SetBatch(1, (1, 2)))
    assert all(ids(bench.step(SetBatch(2, (2,)), ReleaseStep())).values())
    assert ids(bench.step(ReleaseStep())).keys() == {2}


def test_a_row_that_ended_gets_no_more() -> None:
    bench = Bench()
    bench.prefilled(1, 10, max_tokens=1)
    bench.prefilled(2, 20)
    step = bench.step(SetBatch(1, (1, 2)))
    assert [row.ended for row in step.rows] == ["length", None]
    assert bench.step(ReleaseStep()).rows[0] == RowTokens(1, (), None)


def test_when_all_rows_have_ended_the_engine_stands_still() -> None:
    bench = Bench()
    bench.prefilled(1, 10, max_tokens=1)
    bench.step(SetBatch(1, (1,)))
    assert bench.run(ReleaseStep()) == []


def test_the_turn_ends_with_its_token() -> None:
    bench = Bench(turn_tokens=2)
    bench.prefilled(1, 10)
    bench.prefilled(2, 10, sampling=SamplingParameters(seed=1, ignore_end_of_turn=True))
    assert [row.ended for row in bench.step(SetBatch(1, (1, 2))).rows] == [None, None]
    ended, goes_on = bench.step(ReleaseStep()).rows
    assert (ended.token_ids, ended.ended) == ((END_OF_TURN,), "end_of_turn")
    assert goes_on.ended is None
    assert END_OF_TURN not in goes_on.token_ids


def test_a_stop_string_ends_the_row_also_across_tokens() -> None:
    bench = Bench()
    bench.prefilled(1, 10)
    text = bytes(bench.step(SetBatch(1, (1,))).rows[0].token_ids)
    text += bytes(bench.step(ReleaseStep()).rows[0].token_ids)
    bench.prefilled(2, 10, sampling=SamplingParameters(seed=1, stop=(text.decode(),)))
    commands = (SetBatch(2, (2,)), ReleaseStep())
    bench.step(*commands)  # the step of the batch before comes in first
    assert bench.step(ReleaseStep()).rows[0].ended is None
    assert bench.step(ReleaseStep()).rows[0].ended == "stop"


def test_a_row_that_starts_again_goes_on_where_it_was() -> None:
    bench = Bench()
    bench.prefilled(1, 10, 11)
    output = [*bench.step(SetBatch(1, (1,))).rows[0].token_ids]
    output += bench.step(ReleaseStep()).rows[0].token_ids
    bench.run(start_row(2, (10, 11, output[0]), num_prompt_tokens=2), RunChunk(2, 9, 0, 2))
    bench.step(SetBatch(2, (2,)), ReleaseStep())
    assert list(bench.step(ReleaseStep()).rows[0].token_ids) == output[1:]


def test_a_stop_string_that_began_before_a_restart_ends_the_row() -> None:
    bench = Bench()
    bench.prefilled(1, 10)
    output = [*bench.step(SetBatch(1, (1,))).rows[0].token_ids]
    output += bench.step(ReleaseStep()).rows[0].token_ids
    stop = SamplingParameters(seed=1, stop=(bytes(output).decode(),))
    again = Bench()
    again.run(start_row(2, (10, output[0]), 1, sampling=stop), RunChunk(2, 9, 0, 1))
    [row] = again.step(SetBatch(1, (2,))).rows
    assert (row.token_ids, row.ended) == ((output[1],), "stop")


def test_another_engine_life_draws_other_tokens() -> None:
    texts: list[list[int]] = []
    for nonce in (1, 1, 2):
        bench = Bench(nonce)
        bench.prefilled(1, 10)
        tokens = [*bench.step(SetBatch(1, (1,))).rows[0].token_ids]
        for _ in range(6):
            tokens += bench.step(ReleaseStep()).rows[0].token_ids
        texts.append(tokens)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_log_probabilities_come_when_asked_for() -> None:
    bench = Bench()
    bench.prefilled(1, 10, sampling=SamplingParameters(seed=1, logprobs=True, top_logprobs=3))
    bench.prefilled(2, 10)
    asked, plain = bench.step(SetBatch(1, (1, 2))).rows
    assert plain.logprobs is None
    assert asked.logprobs is not None
    [values] = asked.logprobs
    assert values.top[0] == (asked.token_ids[0], values.chosen)
    assert [value for _, value in values.top] == sorted((v for _, v in values.top), reverse=True)
    assert len({token for token, _ in values.top}) == 3


@pytest.mark.parametrize("during", ["start", "prefill", "decode"])
def test_a_failure_touches_its_row_only(during: str) -> None:
    bench = Bench()
    bench.engine.failures.append(Failure(1, during, at=0, error="as scripted"))  # pyright: ignore[reportArgumentType]
    bench.prefilled(2, 20, 21)
    results = bench.run(start_row(1, (10, 11)), RunChunk(1, 3, 0, 1))
    numbers = (1, 2) if during == "decode" else (2,)
    results += bench.run(SetBatch(1, numbers))
    assert RowFailed(1, during, "as scripted") in results  # pyright: ignore[reportArgumentType]
    [step] = [result for result in results if isinstance(result, StepDone)]
    assert ids(step)[2]
    assert not ids(step).get(1)
    assert [type(result) for result in bench.run(DropRow(1))] == [RowFreed]


def test_chunks_and_decode_steps_take_turns() -> None:
    bench = Bench()
    bench.prefilled(1, 10)
    bench.step(SetBatch(1, (1,)))
    chunks = (RunChunk(2, 3, 0, 10), RunChunk(2, 4, 10, 10))
    for command in (start_row(2, tuple(range(100))), *chunks, ReleaseStep()):
        bench.engine.submit(command)
    seen: list[tuple[type[EngineResult], bool]] = []
    while bench.engine.work():
        seen += [(type(result), bench.engine.ahead is not None) for result in bench.results]
        bench.results.clear()
    assert seen == [(StepDone, False), (ChunkDone, False), (ChunkDone, True)]


def test_its_own_thread_does_the_same() -> None:
    results: list[EngineResult] = []
    done = threading.Event()

    def deliver(result: EngineResult) -> None:
        results.append(result)
        if isinstance(result, StepDone):
            done.set()

    engine = FakeEngine(FACTS, 1)
    engine.start(deliver)
    engine.submit(start_row(1, (10,)))
    engine.submit(SetBatch(1, (1,)))
    assert done.wait(10)
    engine.stop()
    assert [type(result) for result in results] == [EngineLoaded, StepDone]


def test_a_load_that_fails_is_a_death_while_loading() -> None:
    results: list[EngineResult] = []
    engine = FakeEngine(FACTS, 1, load_error="no such file", threaded=False)
    engine.start(results.append)
    engine.work_until_idle()
    assert results == [EngineDied("no such file", while_loading=True)]


def test_a_load_says_how_long_it_took() -> None:
    results: list[EngineResult] = []
    engine = FakeEngine(FACTS, 1, settings=FakeSettings(load_ms=200), threaded=False)
    engine.start(results.append)
    engine.work_until_idle()
    [loaded] = results
    assert isinstance(loaded, EngineLoaded)
    assert loaded.load_ns == 200_000_000


def test_the_tokenizer_gives_back_what_it_got() -> None:
    tokenizer = FakeTokenizer()
    prompt = tokenizer.render_chat([{"role": "user", "content": "Grüße, 世界"}])
    tokens = tokenizer.encode(prompt)
    assert tokens.count(END_OF_TURN) == 1
    assert max(tokens) < tokenizer.vocab_size
    detokenizer = tokenizer.detokenizer
    pieces: list[str] = []
    for token in tokens:
        detokenizer.add_token(token)
        pieces.append(detokenizer.last_segment)
    assert "".join(pieces) == "user\nGrüße, 世界\nassistant\n"
    assert "" in pieces, "half a character gives no text"
