"""How long a chunk beside running rows may be, so that the gap between two of their tokens keeps
its bound. A helper of `decide`, and of `evolve` for what it remembers.

A gap is a chunk and a decode step. What the next chunk will take is told from the last one of the
same prompt: rates of other prompts are those of other contexts. Where the last one was short
enough, a longer one takes at most in proportion longer; half of that is used, since one chunk may
have met a quiet moment. Where it was too long, the part that does not shrink with it is taken for
a decode step: both read the weights once.
"""

from scheduler.request import Fed, Request
from scheduler.state import SchedulerState

SLACK_PERMILLE = 250
"""Of the bound without the step: left for what varies, and for what is between chunk and step."""

GROUND_CHUNKS, GROUND_TOKENS = 4, 256
"""Attention is taken to cost as much as the rest of a token's work behind so many chunks, and never
before so many tokens: that much slower a chunk may be than the one before it.
"""


def tokens_beside_rows(state: SchedulerState, request: Request, start: int) -> int:
    """The longest chunk of this prompt behind `start` that keeps the bound; at least one token."""
    limits = state.limits
    assert limits is not None, "a server has started"
    last = request.fed or state.fed
    if not limits.gap_ns or (last is None and not state.step_ns):
        return limits.chunk_tokens_beside_rows
    if last is None:  # no token of a prompt takes longer than a step, which feeds one
        most = min(limits.chunk_tokens_beside_rows, budget_ns(state) // state.step_ns)
    else:
        most = min(limits.chunk_tokens, tokens_within(state, last, start))
    return max(1, most)


def budget_ns(state: SchedulerState) -> int:
    """What a chunk may take: the bound less a step and the slack, and never less than a step."""
    assert state.limits is not None, "a server has started"
    left_ns = state.limits.gap_ns - state.step_ns
    return max(left_ns * (1000 - SLACK_PERMILLE) // 1000, state.step_ns)


def tokens_within(state: SchedulerState, last: Fed, start: int) -> int:
    """So many tokens behind `start` are fed in the time that a chunk may take."""
    may_ns, took_ns = budget_ns(state), max(1, last.duration_ns)
    if took_ns <= may_ns:
        num_tokens = nearest(last.length * (may_ns + took_ns), 2 * took_ns)
    else:
        fixed_ns = min(state.step_ns, may_ns // 2)
        num_tokens = last.length * (may_ns - fixed_ns) // (took_ns - fixed_ns)
    if took_ns <= may_ns == state.step_ns:  # reading the weights may be all of it
        num_tokens = max(num_tokens, last.length + max(1, last.length // 8))
    ground = max(GROUND_TOKENS, GROUND_CHUNKS * num_tokens)
    middle, last_middle = start + num_tokens // 2, last.start + last.length // 2
    if middle <= last_middle:
        return num_tokens
    return nearest(num_tokens * (last_middle + ground), middle + ground)


def nearest(value: int, divisor: int) -> int:
    """The quotient, rounded: lengths of a few tokens could not grow else."""
    return (2 * value + divisor) // (2 * divisor)


def in_even_parts(num_tokens: int, most: int) -> int:
    """The first of as few parts as there can be, of one length: a short rest would say little of
    how long the next chunk takes.
    """
    num_parts = -(-num_tokens // most)
    return -(-num_tokens // num_parts)
