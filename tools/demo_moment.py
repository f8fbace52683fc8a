"""When the server is killed: the moment at which it holds a request."""

import time
from collections.abc import Mapping, Sequence

import httpx2

from tools.demo_client import Answer, Clients
from tools.demo_journal import DemoJournal
from tools.demo_plan import BLOCK_TOKENS, MemoryPlan
from tools.demo_screen import Screen

TOKENS_BEFORE_KILL = 3
"""Tokens that two of the clients have been sent before the server is killed."""

LOOK_S = 0.05
"""Between two looks at what the requests do, which the server has to answer beside its work."""


class DemoFailed(Exception):
    """The demo could not be shown to its end. One line that says where."""


class Moment:
    """Looks out for it. Where memory suffices for too long, one request is held by hand."""

    def __init__(self, journal: DemoJournal, memory: MemoryPlan, screen: Screen) -> None:
        self.journal = journal
        self.memory = memory
        self.screen = screen
        self.next_look = 0.0
        self.are_saved = False
        self.held_by_hand: Answer | None = None

    def has_come(self, clients: Clients, answers: Sequence[Answer]) -> bool:
        """Whether one request is held and will be for a while, another decodes, two answers have
        begun, and each request has blocks on disk.
        """
        begun = [answer for answer in answers if answer.position >= TOKENS_BEFORE_KILL]
        if len(begun) < 2 or time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + LOOK_S
        self.are_saved = self.are_saved or all(map(self.num_saved_tokens, answers))
        found = self.look(clients)
        phases = [found.get(answer.request_id, ("ended", 0))[0] for answer in answers]
        decoding = [
            answer for answer in begun if found.get(answer.request_id, ("", 0))[0] == "decoding"
        ]
        if "paused" in phases:
            has_time = any(8 * left(answer) >= answer.max_tokens for answer in decoding)
            return self.are_saved and has_time and self.is_lasting(found)
        is_late = len(decoding) > 1 and 4 * left(decoding[0]) <= decoding[0].max_tokens
        if self.held_by_hand is None and is_late:
            self.hold(clients, decoding[-1])
        return False

    def look(self, clients: Clients) -> dict[str, tuple[str, int]]:
        """What the open requests do, and their tokens. Raises DemoFailed."""
        try:
            return clients.open_requests()
        except httpx2.HTTPError as error:
            raise DemoFailed(f"the server does not list its requests: {error}") from error

    def is_lasting(self, found: Mapping[str, tuple[str, int]]) -> bool:
        """Whether what is held stays so: there is no room for all, or a hand holds it."""
        num_tokens = [count for _, count in found.values()]
        return self.held_by_hand is not None or not self.memory.holds(num_tokens)

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
