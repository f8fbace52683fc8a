"""When the server is killed: the moment at which it holds a request."""

import time
from collections.abc import Sequence

import httpx2

from tools.demo_client import Answer, Clients
from tools.demo_journal import DemoJournal
from tools.demo_plan import BLOCK_TOKENS
from tools.demo_screen import Screen

TOKENS_BEFORE_KILL = 3
"""Tokens that two of the clients have been sent before the server is killed."""

LOOK_S = 0.05
"""Between two looks at what the requests do, which the server has to answer beside its work."""


class DemoFailed(Exception):
    """The demo could not be shown to its end. One line that says where."""


class Moment:
    """Looks out for it. Where memory suffices for too long, one request is held by hand."""

    def __init__(self, journal: DemoJournal, screen: Screen) -> None:
        self.journal = journal
        self.screen = screen
        self.next_look = 0.0
        self.held_by_hand: Answer | None = None

    def has_come(self, clients: Clients, answers: Sequence[Answer]) -> bool:
        """Whether one request is held, another decodes, two answers have begun, and each request
        has blocks on disk.
        """
        if time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + LOOK_S
        phases = self.phases(clients, answers)
        begun = [answer for answer in answers if answer.position >= TOKENS_BEFORE_KILL]
        decoding = [
            answer
            for answer, phase in zip(answers, phases, strict=True)
            if phase == "decoding" and answer in begun
        ]
        if len(begun) < 2 or not decoding:
            return False
        if "paused" in phases and any(8 * left(answer) >= answer.max_tokens for answer in decoding):
            return all(map(self.num_saved_tokens, answers))
        is_late = len(decoding) > 1 and 4 * left(decoding[0]) <= decoding[0].max_tokens
        if self.held_by_hand is None and "paused" not in phases and is_late:
            self.hold(clients, decoding[-1])
        return False

    def phases(self, clients: Clients, answers: Sequence[Answer]) -> list[str]:
        """What each request does. Raises DemoFailed."""
        try:
            phases = clients.phases()
        except httpx2.HTTPError as error:
            raise DemoFailed(f"the server does not list its requests: {error}") from error
        return [phases.get(answer.request_id, "ended") for answer in answers]

    def hold(self, clients: Clients, answer: Answer) -> None:
        """An operator's word. Raises DemoFailed."""
        self.screen.say(f"memory has sufficed so far: {answer.name} is held by hand")
        self.held_by_hand = answer
        try:
            clients.wish(answer, "pause")
        except httpx2.HTTPError as error:
            raise DemoFailed(f"{answer.name} cannot be held: {error}") from error

    def release(self, clients: Clients) -> None:
        """What was held by hand may go on: that it was survives a death. Raises DemoFailed."""
        if self.held_by_hand is None:
            return
        try:
            clients.wish(self.held_by_hand, "resume")
        except httpx2.HTTPError as error:
            raise DemoFailed(f"{self.held_by_hand.name} cannot go on: {error}") from error

    def num_saved_tokens(self, answer: Answer) -> int:
        """The tokens that a row of this request could be restored to now."""
        saved = self.journal.num_saved_blocks(answer.request_id) * BLOCK_TOKENS
        return max(saved, self.journal.account(answer.request_id).num_restored_tokens)


def left(answer: Answer) -> int:
    """The tokens that are still to come."""
    return answer.max_tokens - answer.position
