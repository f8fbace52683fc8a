"""What the demo claims, checked: pure functions from what was seen to a line that says so.

A check that does not hold says where two things part, in the numbers that anybody can look up in
the journal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from journal.rows import RequestRow
from tools.demo_client import Answer

BATCH_INVARIANT = ("stock", "none")
"""Matrix libraries that compute a row of a batch exactly as the row alone: no tie is accepted."""

NEAR_TIE = 1e-3
"""Two log-probabilities this close are a tie that another order of additions can decide."""

TopLogprobs = Sequence[Mapping[int, float]]
"""For each output token, the log-probabilities of the likeliest tokens, the chosen one included."""


@dataclass(frozen=True, slots=True)
class Check:
    """One claim, and whether it held."""

    holds: bool
    text: str

    def line(self) -> str:
        return f"{'ok    ' if self.holds else 'FAILED'}  {self.text}"


@dataclass(frozen=True, slots=True)
class Output:
    """An answer as the journal has it: token ids and, beside them, the likeliest tokens."""

    token_ids: tuple[int, ...]
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class AtTheKill:
    """What there was when the server had been killed: what each client had been sent, and what the
    journal had.
    """

    delivered: Sequence[Answer]
    rows: Sequence[RequestRow]
    recorded: Sequence[Output]


@dataclass(frozen=True, slots=True)
class Seen:
    """All that the demo saw, by client: `joined` are the answers in two pieces, `whole` the same
    read in one piece, `final` the journal's at the end, `uninterrupted` those of the other run.
    """

    joined: Sequence[Answer]
    kill: AtTheKill
    whole: Sequence[Answer]
    final: Sequence[Output]
    uninterrupted: Sequence[Output]


def check_all(seen: Seen, blas: str, *, new_tokens: bool) -> list[Check]:
    """Every claim, client by client. `new_tokens`: the model is the fake one, whose tokens differ
    from one life of the server to the next, so that what was put out before the kill can only have
    been kept, not computed again.
    """
    found = [check_kill(seen.kill.rows)]
    for index, joined in enumerate(seen.joined):
        recorded, final = seen.kill.recorded[index], seen.final[index]
        expected = seen.uninterrupted[index]
        if recorded.token_ids:
            found += check_before_kill(seen, index)
        if new_tokens:
            expected = Output(recorded.token_ids + expected.token_ids[len(recorded.token_ids) :])
        found += [
            check_whole(joined.name, joined, seen.whole[index]),
            check_uninterrupted(joined.name, final, expected, ties=blas not in BATCH_INVARIANT),
        ]
    return found


def check_before_kill(seen: Seen, index: int) -> list[Check]:
    """What is claimed of an answer that had begun when the server was killed."""
    delivered, recorded = seen.kill.delivered[index], seen.kill.recorded[index]
    return [
        check_recorded(delivered.name, delivered, recorded),
        check_kept(delivered.name, recorded, seen.final[index]),
        check_delivered(delivered.name, delivered, seen.whole[index]),
    ]


def check_kill(rows: Sequence[RequestRow]) -> Check:
    """The kill came at the moment it was meant for."""
    phases = [row.phase for row in rows]
    text = f"at the kill A, B and C were {', '.join(phases)}"
    return Check(phases == ["decoding", "decoding", "prefilling"], text)


def check_chain(name: str, num_known: int, num_restored: int, num_fed: int) -> Check:
    """After the kill the request went on from its saved KV: only the rest was computed. The last
    known token is fed with the first step of decoding.
    """
    text = (
        f"{name}: of {num_known} known tokens {num_restored} were restored,"
        f" {num_fed} prefilled after the kill"
    )
    return Check(num_restored > 0 and num_restored + num_fed == num_known - 1, text)


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first index at which two lists differ, or one of them ends; null when they are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def around(output: Output, at: int) -> str:
    """The token at this index, if there is one."""
    return str(output.token_ids[at]) if at < len(output.token_ids) else "missing"


def check_recorded(name: str, delivered: Answer, recorded: Output) -> Check:
    """Nothing is sent that is not committed."""
    num_delivered, num_recorded = delivered.position, len(recorded.token_ids)
    text = f"{name}: {num_delivered} tokens delivered before the kill, {num_recorded} recorded"
    return Check(num_delivered <= num_recorded, text)


def check_kept(name: str, recorded: Output, final: Output) -> Check:
    """What the journal had at the kill is the beginning of what it has at the end."""
    count = len(recorded.token_ids)
    at = first_difference(recorded.token_ids, final.token_ids[:count])
    if at is None:
        return Check(True, f"{name}: the {count} tokens recorded before the kill are unchanged")
    return Check(
        False,
        f"{name}: token {at} was {around(recorded, at)} before the kill,"
        f" and is {around(final, at)} now",
    )


def check_delivered(name: str, delivered: Answer, whole: Answer) -> Check:
    """What the client had been sent, log-probabilities included, is what everybody can read now."""
    count = len(delivered.tokens)
    at = first_difference(delivered.tokens, whole.tokens[:count])
    if at is None and whole.text.startswith(delivered.text):
        return Check(True, f"{name}: the {count} tokens delivered before the kill read the same")
    where = "the text" if at is None else f"token {at}, {delivered.tokens[at]!r},"
    return Check(False, f"{name}: {where} delivered before the kill reads otherwise now")


def check_whole(name: str, joined: Answer, whole: Answer) -> Check:
    """The client's two pieces, put together, are the answer as it is read in one piece."""
    if not whole.done:
        return Check(False, f"{name}: the answer cannot be read again: {whole.error or 'cut'}")
    if (joined.text, joined.tokens) == (whole.text, whole.tokens):
        size = f"{len(joined.tokens)} tokens, {len(joined.text)} characters"
        return Check(True, f"{name}: both pieces together are the whole answer ({size})")
    at = first_difference(joined.text, whole.text)
    where = "in the tokens" if at is None else f"at character {at}"
    return Check(False, f"{name}: both pieces together part from the whole answer {where}")


def check_uninterrupted(name: str, final: Output, expected: Output, *, ties: bool) -> Check:
    """The answer equals that of a run that nobody killed. `ties`: whether the matrix library may
    decide a near-tie otherwise, because it adds up in another order for another batch.
    """
    at = first_difference(final.token_ids, expected.token_ids)
    if at is None:
        count = len(final.token_ids)
        return Check(True, f"{name}: all {count} tokens equal those of an uninterrupted run")
    where = f"token {at} is {around(final, at)}, uninterrupted {around(expected, at)}"
    gap = tie_gap(final, expected, at)
    if gap is None:
        return Check(False, f"{name}: {where}")
    near = " (a near-tie)" if gap <= NEAR_TIE else ""
    text = f"{name}: {where}, with log-probabilities {gap:.2g} apart{near}"
    return Check(ties and gap <= NEAR_TIE, text)


def tie_gap(final: Output, expected: Output, at: int) -> float | None:
    """How far apart the two tokens' log-probabilities are: the larger distance of both runs. Null
    where one of them is not among a run's likeliest tokens.
    """
    if at >= len(final.token_ids) or at >= len(expected.token_ids):
        return None
    one, other = final.token_ids[at], expected.token_ids[at]
    gaps: list[float] = []
    for output in (final, expected):
        top = output.top[at] if at < len(output.top) else {}
        if one not in top or other not in top:
            return None
        gaps.append(abs(top[one] - top[other]))
    return max(gaps)
