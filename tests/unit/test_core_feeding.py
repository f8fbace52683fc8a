"""How long the next chunk beside running rows may be."""

import msgspec
import pytest

from scheduler.feeding import in_even_parts, tokens_beside_rows
from scheduler.request import Fed, Request
from scheduler.state import SchedulerState
from tests.unit.core_driver import LIMITS

MS = 10**6
FAR = 10**9
"""So far behind the start that the rate does not change within a chunk."""


def tokens(
    gap_ms: int, step_ms: int, own: Fed | None, other: Fed | None = None, start: int = FAR
) -> int:
    """What the policy lets a prompt be fed, of which a chunk was fed, or of another one."""
    limits = msgspec.structs.replace(
        LIMITS, chunk_tokens=1_000, chunk_tokens_beside_rows=64, gap_ns=gap_ms * MS
    )
    request = Request(
        number=1,
        request_id="a",
        model_fingerprint="",
        route="",
        num_prompt_tokens=2 * FAR,
        asked_max_tokens=None,
        received_ns=0,
        fed=own,
    )
    state = SchedulerState(limits=limits, step_ns=step_ms * MS, fed=other or own)
    return tokens_beside_rows(state, request, start)


@pytest.mark.parametrize(
    ("gap_ms", "step_ms", "num_tokens", "chunk_ms", "length"),
    [
        (250, 50, 150, 150, 150),  # three quarters of the bound less the step: as it should be
        (250, 50, 50, 50, 100),  # half of what it could grow, which is to 150
        (250, 50, 300, 300, 120),  # 50 of the 300 ms do not shrink: 300 * 100 / 250
        (250, 200, 80, 210, 72),  # nothing is left beside the step: as long as it
        (250, 200, 80, 200, 90),  # reading the weights may be all that it takes
        (250, 200, 1, 190, 2),
        (250, 50, 300, 1, 1_000),  # never more than a chunk without rows
        (250, 50, 4, 64_000, 1),  # never nothing
        (0, 50, 4, 64_000, 64),  # no bound: as the setting says
    ],
)
def test_next_chunk_follows_from_the_last_one(
    gap_ms: int, step_ms: int, num_tokens: int, chunk_ms: int, length: int
) -> None:
    fed = Fed(FAR - num_tokens, num_tokens, chunk_ms * MS)
    assert tokens(gap_ms, step_ms, fed) == length


def test_own_chunk_says_more_than_another_prompts() -> None:
    slow, fast = Fed(FAR - 50, 50, 150 * MS), Fed(0, 900, 150 * MS)
    assert tokens(250, 50, slow, other=fast) == 50


def test_before_any_chunk_a_token_takes_a_step_at_most() -> None:
    assert tokens(250, 10, None) == 18, "180 ms in all"
    assert tokens(250, 1, None) == 64, "as the setting says"
    assert tokens(250, 0, None) == 64, "there was no step either"
    assert tokens(250, 200, None) == 1


def test_rate_is_taken_to_fall_with_the_context() -> None:
    begun = Fed(0, 150, 150 * MS)
    assert tokens(250, 50, begun, start=150) == 123, "150 * (75 + 600) / (225 + 600)"
    later = Fed(15_000, 150, 150 * MS)
    assert tokens(250, 50, later, start=15_150) == 149
    assert tokens(250, 50, later, start=0) == 150, "and not to rise"


def test_first_chunk_behind_a_saved_prefix_is_told_from_how_far_it_is() -> None:
    assert tokens(250, 50, None, other=Fed(0, 1_000, 1_000 * MS), start=90_000) == 1
    assert tokens(250, 50, None, other=Fed(0, 1_000, 150 * MS), start=90_000) == 48


def test_parts_are_as_few_as_can_be_and_of_one_length() -> None:
    assert [in_even_parts(n, 100) for n in (1, 99, 100, 101, 200, 201)] == [1, 99, 100, 51, 100, 67]
