"""What clients were told, which nothing may change, and what each engine life must put out."""

from array import array
from dataclasses import dataclass, field

from journal.memory import MemoryJournal
from scheduler.engine.fake_row import fake_token, prompt_digest
from scheduler.engine.fake_tokenizer import END_OF_TURN


@dataclass
class Truth:
    """`prompts` are those of all requests by their ids. `told` is the output up to the end of the
    last life, `delivered` what any client has read of it, by position. What a loss of power took
    was not flushed: it may come out differently.
    """

    prompts: "dict[str, array[int]]" = field(default_factory=dict[str, "array[int]"])
    told: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    delivered: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def deliver(self, request_id: str, position: int, token: int) -> None:
        """A client reads the token at this position of an answer."""
        delivered = self.delivered.setdefault(request_id, [])
        assert position <= len(delivered), f"{request_id} has a gap before token {position}"
        if position == len(delivered):
            delivered.append(token)
        assert delivered[position] == token, (
            f"{request_id}: token {position} was {delivered[position]} and is {token} now"
        )

    def num_delivered(self, request_id: str) -> int:
        """How many tokens of an answer any client has read."""
        return len(self.delivered.get(request_id, ()))

    def end_life(self, journal: MemoryJournal, nonce: int) -> None:
        """An engine's life has ended: what it has put out are its own tokens, behind all that was
        put out before; and nothing was delivered that is not there.
        """
        for request_id, prompt in self.prompts.items():
            tokens = journal.output_tokens(request_id)[0].tolist()
            told = self.told.get(request_id, [])
            expected = told[:] + expected_tokens(prompt, len(told), len(tokens), nonce)
            if tokens and tokens[-1] == END_OF_TURN:
                expected[-1:] = [END_OF_TURN]
            assert tokens == expected, f"{request_id} has other tokens than its engine put out"
            delivered = self.delivered.get(request_id, [])
            assert delivered == tokens[: len(delivered)], f"{request_id} was told other tokens"
            self.told[request_id] = tokens

    def lose(self, journal: MemoryJournal) -> None:
        """What the journal has lost with the power is as if it had never been."""
        for request_id in self.prompts:
            num_tokens = len(journal.output_tokens(request_id)[0])
            for tokens in (self.told.get(request_id, []), self.delivered.get(request_id, [])):
                del tokens[num_tokens:]


def expected_tokens(prompt: "array[int]", start: int, end: int, nonce: int) -> list[int]:
    """What one engine life puts out for a prompt, from one index to another."""
    if start >= end:
        return []
    digest = prompt_digest(prompt)
    return [fake_token(digest, index, nonce) for index in range(start, end)]
