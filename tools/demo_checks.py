"""What the demo claims, checked: pure functions from what was seen to a line that says so.

A check that does not hold says where two things part, in the numbers that anybody can look up in
the journal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from journal.audit import Pause
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
    """One claim, and whether it held; null where this model gives nothing to hold it against."""

    holds: bool | None
    text: str

    def line(self) -> str:
        head = "-     " if self.holds is None else "ok    " if self.holds else "FAILED"
        return f"{head}  {self.text}"


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
    pauses: Sequence[Pause]


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


def check_all(seen: Seen, blas: str, *, comparable: bool) -> list[Check]:
    """Every claim, client by client. `comparable`: whether two lives of the engine compute the same
    tokens.
    """
    found = [check_kill(seen.kill.rows, seen.kill.pauses)]
    for index, joined in enumerate(seen.joined):
        if seen.kill.recorded[index].token_ids:
            found += check_before_kill(seen, index)
        found.append(check_whole(joined.name, joined, seen.whole[index]))
        if comparable:
            final, expected = seen.final[index], seen.uninterrupted[index]
            ties = blas not in BATCH_INVARIANT
            found.append(check_uninterrupted(joined.name, final, expected, ties=ties))
        else:
            found.append(not_comparable(joined.name))
    return found


def not_comparable(name: str) -> Check:
    """The fake model draws other tokens in each life of its engine, so what was put out before the
    kill can only have been kept; there is no other run to compare it with.
    """
    return Check(
        None,
        f"{name}: not comparable with an uninterrupted run:"
        " each life of this engine has tokens of its own",
    )


def check_before_kill(seen: Seen, index: int) -> list[Check]:
    """What is claimed of an answer that had begun when the server was killed."""
    delivered, recorded = seen.kill.delivered[index], seen.kill.recorded[index]
    return [
        check_recorded(delivered.name, delivered, recorded),
        check_kept(delivered.name, recorded, seen.final[index]),
        check_delivered(delivered.name, delivered, seen.whole[index]),
    ]


WHY_HELD = {
    "operator": "by hand",
    "no_room": "because the next chunk had no room",
    "high": "because memory was over its high mark",
    "emergency": "because memory was at its ceiling",
}


def check_kill(rows: Sequence[RequestRow], pauses: Sequence[Pause]) -> Check:
    """The kill came at the moment it was meant for: one is held and one decodes."""
    phases = [row.phase for row in rows]
    text = f"at the kill A, B and C were {', '.join(phases)}"
    held = {row.request_id: row.phase == "paused" for row in rows}
    reasons = {
        WHY_HELD[pause.reason]: None
        for pause in pauses
        if pause.outcome == "open" and held.get(pause.request_id)
    }
    if reasons:
        text += f"; held {', '.join(reasons)}"
    return Check("paused" in phases and "decoding" in phases, text)


def check_ends(names: Sequence[str], rows: Sequence[RequestRow]) -> Check:
    """Nothing was given up for memory, or for the death of the server."""
    ends = [f"{name} {row.outcome}" for name, row in zip(names, rows, strict=True)]
    return Check(
        all(row.outcome == "finished" for row in rows),
        f"nobody was refused or aborted: {', '.join(ends)}",
    )


def check_pauses(name: str, pauses: Sequence[Pause]) -> Check:
    """What was held went on with all that it had. One that was about to be held when the server
    died waits like any other, and one that had its last token ends.
    """
    resumed = [pause for pause in pauses if pause.outcome == "resumed"]
    num_over_kill = sum(pause.resumed_run_id != pause.run_id for pause in resumed)
    num_lost = sum(pause.num_lost_tokens or 0 for pause in resumed)
    text = (
        f"{name}: held {len(pauses)} x, went on {len(resumed)} x,"
        f" {num_over_kill} of them after the kill; {num_lost} tokens lost"
    )
    return Check(num_lost == 0 and all(pause.outcome != "open" for pause in pauses), text)


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
