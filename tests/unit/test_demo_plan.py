"""What the demo asks for and the memory that it gives, for machines and models of all sizes."""

import pytest

from journal.events import ModelFacts
from scheduler.memory import max_context_tokens, row_bytes
from scheduler.settings import Settings
from tools.demo_plan import PROMPT_TOKENS, Measured, make_memory_plan, make_plan


def model(kv: int, transient: int, weights: int, state: int = 0) -> ModelFacts:
    """A model of these sizes, in bytes."""
    return ModelFacts(
        name="any",
        fingerprint="",
        context_tokens=8192,
        weights_bytes=weights,
        kv_bytes_per_token=kv,
        kv_step_tokens=256,
        window_layers=(),
        state_bytes=state,
        transient_bytes_per_token=transient,
    )


MODELS = {
    "smollm2": model(46_080, 29_282, 538_060_032),
    "plain": model(2048, 3270, 1_510_656),
    "hybrid": model(512, 21_858, 1_659_872, state=58_368),
    "fake": model(1024, 256, 1_000_000),
}
MEASURED = Measured(rate=100, tokens_per_line=14.0, other_tokens=45.0)


def num_steps(tokens: int) -> int:
    """Steps in which the memory of a row grows."""
    return -(-tokens // 256)


@pytest.mark.parametrize("rate", [1, 100, 2_000, 100_000])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_fit_the_first_step_and_answers_go_beyond_it(name: str, rate: float) -> None:
    plan = make_plan(Measured(rate, 14.0, 45.0), MODELS[name], seed=1)
    num_prompt_tokens = 45 + 14 * plan.num_lines
    assert PROMPT_TOKENS - 14 < num_prompt_tokens <= PROMPT_TOKENS
    assert num_steps(num_prompt_tokens + plan.max_tokens) >= 2
    assert [prompt.count("\n") for prompt in plan.prompts] == [plan.num_lines + 1] * 3
    assert len(set(plan.prompts)) == 3


def test_a_fast_machine_is_asked_for_long_answers() -> None:
    asked = [make_plan(Measured(r, 14.0, 45.0), MODELS["smollm2"], 1) for r in (10, 1_000, 10**6)]
    assert [plan.max_tokens for plan in asked] == [100, 200, 512]


@pytest.mark.parametrize("rate", [1, 100_000])
@pytest.mark.parametrize("name", MODELS)
def test_three_rows_get_in_and_do_not_stay(name: str, rate: float) -> None:
    facts = MODELS[name]
    num_tokens = PROMPT_TOKENS + make_plan(Measured(rate, 14.0, 45.0), facts, 1).max_tokens
    memory = make_memory_plan(facts, num_tokens)
    chunk_bytes = memory.chunk_tokens * facts.transient_bytes_per_token
    first, full = row_bytes(facts, 1), row_bytes(facts, num_tokens)
    assert facts.weights_bytes + chunk_bytes + 3 * first <= memory.low_bytes < memory.high_bytes
    assert facts.weights_bytes + 3 * full > memory.high_bytes, "one must be held"
    assert memory.high_bytes < memory.ceiling_bytes
    assert memory.holds([PROMPT_TOKENS] * 3)
    assert not memory.holds([num_tokens] * 3), "one stays held"


@pytest.mark.parametrize("name", MODELS)
def test_a_server_takes_the_settings_and_each_request_fits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = MODELS[name]
    num_tokens = PROMPT_TOKENS + make_plan(MEASURED, facts, 1).max_tokens
    memory = make_memory_plan(facts, num_tokens)
    for variable, value in memory.settings().items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("FERMATA_SCHEDULER__CHUNK_TOKENS", str(memory.chunk_tokens))
    limits = Settings().limits(facts)
    assert limits.ceiling_bytes == memory.ceiling_bytes
    assert limits.memory is not None
    assert limits.memory.low_permille < limits.memory.high_permille < 1000
    assert max_context_tokens(facts, limits) >= num_tokens


def test_the_room_is_about_one_and_a_half_of_them() -> None:
    memory = make_memory_plan(MODELS["smollm2"], 320)
    assert "room for 1.8 of the three, which grow to 23.5MB each" in memory.text()
