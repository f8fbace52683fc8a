"""Clients in virtual time: they ask, read, lose their connection, and come back or not."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import msgspec

from journal import events
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.simulation.doors import Doors
from scheduler.simulation.timeline import Timeline
from scheduler.simulation.truth import Truth
from scheduler.streams import Accepted, Arrival, Joined, Rejected, RequestStream

RETRY_NS = 2_000_000_000
"""Between two tries while the server is not there, or takes nothing."""

Return = Literal["attach", "resend", "never"]

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
"""Where they are read from a text."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to come: `at_ns` after the start. It puts out `max_tokens`, or fewer where the
    engine ends turns and `ends_turn` lets it. `shares`: so many tokens of its prompt are those of
    the first request.
    """

    num_prompt_tokens: AtLeastOne
    max_tokens: AtLeastOne
    at_ns: NotNegative = 0
    ends_turn: bool = False
    shares: NotNegative = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a client does beside reading. Those with equal `content` (0: its own) ask the same.
    `key` is its Idempotency-Key (0: none), `session` its session.

    It loses its connection when it has read one of `leaves_at_tokens`, and at `leaves_ns`. When its
    connection is lost, by itself or with the server, it comes back after `back_ns`: by the position
    that it has reached, or by sending the request again. So it does when nothing came for
    `patience_ns` (0: it waits for ever). After `tries` it stays away. At `cancels_at_tokens` (-1:
    never) it wants the request to end.
    """

    content: int = 0
    key: int = 0
    session: int = 0
    leaves_at_tokens: tuple[int, ...] = ()
    leaves_ns: tuple[int, ...] = ()
    returns: Return = "attach"
    back_ns: int = 0
    patience_ns: int = 0
    tries: int = 50
    cancels_at_tokens: int = -1


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a client lives in. `new_id` gives an id to each request that is sent."""

    doors: Doors
    timeline: Timeline
    truth: Truth
    new_id: Callable[[], str]


class Client:
    """One client from its first request until it is `over`: how that was is its `outcome`.

    `stream` is what it follows, over a `connection` that may have been made for another one;
    `answer` is the id of the answer that it has begun to read, `position` how much of it.
    """

    def __init__(self, around: Surroundings, asked: Asked, prompt: "array[int]", seed: int) -> None:
        self.around = around
        self.asked = asked
        self.prompt = prompt
        self.seed = seed
        self.first_id = around.new_id()
        self.habits = Habits()
        self.leaves: set[int] = set()
        self.stream: RequestStream | None = None
        self.connection: RequestStream | None = None
        self.answer = ""
        self.position = 0
        self.num_sent = 0
        self.num_tries = 0
        self.last_news_ns = 0
        self.outcome = ""

    def __str__(self) -> str:
        where = "away" if self.stream is None else f"at {self.stream.request_id}"
        return f"{self.first_id} {where}, {self.position} tokens of {self.answer or 'nothing'}"

    @property
    def over(self) -> bool:
        """Whether it has got its answer, or has gone for good."""
        return bool(self.outcome)

    def begin(self, habits: Habits) -> None:
        """Plans its first request, and when it loses its connection."""
        self.habits = habits
        self.leaves = set(habits.leaves_at_tokens)
        timeline = self.around.timeline
        timeline.at(self.asked.at_ns, self.ask, outside=True)
        for at_ns in habits.leaves_ns:
            timeline.at(at_ns, self.lose_connection, outside=True)

    # What it does

    def ask(self) -> None:
        """Sends the request, for the first time or again."""
        stream = None
        if self.around.doors.loop is not None:
            request_id = self.around.new_id() if self.num_sent else self.first_id
            stream = self.around.doors.submit(self.arrival(request_id))
        if stream is None:
            self.try_later(self.ask)
            return
        self.num_sent += 1
        self.around.truth.prompts[stream.request_id] = self.prompt
        self.follow(stream)

    def arrival(self, request_id: str) -> Arrival:
        """The request as HTTP hands it over."""
        habits = self.habits
        sampling = SamplingParameters(seed=self.seed, ignore_end_of_turn=not self.asked.ends_turn)
        parameters = RequestParameters(
            route="completions", model="fake", created=1, stream=True, sampling=sampling
        )
        return Arrival(
            request_id,
            None,
            "completions",
            True,
            self.prompt,
            self.asked.max_tokens,
            parameters,
            content_digest=f"content {habits.content}" if habits.content else "",
            session_digest=f"session {habits.session}" if habits.session else "",
            key_digest=f"key {habits.key}" if habits.key else "",
        )

    def follow(self, stream: RequestStream) -> None:
        """It has a connection, and waits for news no longer than it has patience."""
        self.stream = self.connection = stream
        self.last_news_ns = self.around.timeline.now_ns
        self.watch_patience()

    def come_back(self) -> None:
        """After its connection was lost."""
        if self.over or self.stream is not None:
            return
        doors = self.around.doors
        if doors.loop is None:
            self.try_later(self.come_back)
        elif self.habits.returns == "resend" or not self.answer:
            self.ask()
        else:
            stream = doors.attach(self.answer)
            if stream is None or self.position > len(stream.tokens):
                self.forget_answer(stream)
            else:
                self.follow(stream)
                self.look()  # it may have ended, and then no step comes

    def forget_answer(self, stream: RequestStream | None) -> None:
        """The server knows nothing of it any more, or less than was read: it is asked again."""
        if stream is not None:
            self.around.doors.leave(stream)
        self.answer = ""
        self.ask()

    def try_later(self, again: Callable[[], None]) -> None:
        """The server is not there, or takes nothing now."""
        self.num_tries += 1
        if self.num_tries > self.habits.tries:
            self.outcome = "gave up"
        else:
            self.around.timeline.at(self.around.timeline.now_ns + RETRY_NS, again, outside=True)

    # What happens to it

    def look(self) -> None:
        """Reads what has come; called after each step."""
        stream = self.stream
        if stream is None:
            return
        if stream.request_id != self.answer and not self.is_judged(stream):
            return
        assert self.stream is not None, "who is judged follows an answer"
        self.read(self.stream)

    def is_judged(self, stream: RequestStream) -> bool:
        """Whether it is known now which answer it reads."""
        match stream.judgement:
            case Accepted():
                self.answer, self.position = stream.request_id, 0
            case Joined(request_id=joined_id):
                self.answer, self.position = joined_id, 0
                self.stream = stream.joined or self.around.doors.find(joined_id)
                assert self.stream is not None, f"{joined_id} was joined, and nobody knows of it"
            case Rejected(event=event):
                self.leave()
                self.refused(event)
                return False
            case None:
                if stream.cut or stream.end is not None:
                    self.lost()
                return False
        return True

    def refused(self, event: events.RequestRejected) -> None:
        """What will pass is tried again."""
        if event.reason in ("server_stopping", "queue_full"):
            self.try_later(self.come_back)
        else:
            self.outcome = event.reason

    def read(self, stream: RequestStream) -> None:
        """Takes what is there, up to where it loses its connection, or to the end."""
        before = self.position
        for token in stream.tokens[before:]:
            self.around.truth.deliver(self.answer, self.position, token)
            self.position += 1
            if self.position == self.habits.cancels_at_tokens:
                self.cancel()
            if self.position in self.leaves:
                self.leaves.remove(self.position)
                self.lose_connection()
                return
        if self.position > before:
            self.last_news_ns = self.around.timeline.now_ns
        if stream.end is not None:
            self.outcome = f"{stream.end.kind} ({stream.end.reason})"
            self.leave()
        elif stream.cut:
            self.lost()

    def cancel(self) -> None:
        """Wants the request to end."""
        if self.around.doors.loop is not None:
            wish = events.CancelRequested(request_id=self.answer)
            self.around.doors.loop.sensors.wish(wish)

    def lose_connection(self) -> None:
        """Its connection is lost, and the server notices."""
        if self.stream is not None:
            self.leave()
            self.lost()

    def leave(self) -> None:
        """It ends its connection, and the server notices."""
        assert self.connection is not None, "there is a connection"
        self.around.doors.leave(self.connection)
        self.stream = self.connection = None

    def lost(self) -> None:
        """There is no connection any more."""
        self.stream = self.connection = None
        self.num_tries += 1
        if self.habits.returns == "never" or self.num_tries > self.habits.tries:
            self.outcome = "left"
            return
        timeline = self.around.timeline
        timeline.at(timeline.now_ns + self.habits.back_ns, self.come_back, outside=True)

    def watch_patience(self) -> None:
        """Looks again when its patience may be at its end."""
        if self.habits.patience_ns:
            due_ns = self.last_news_ns + self.habits.patience_ns
            look = partial(self.be_impatient, self.connection)
            self.around.timeline.at(due_ns, look, outside=True)

    def be_impatient(self, connection: RequestStream | None) -> None:
        """Nothing came for too long, on this connection."""
        if self.connection is not connection or self.over:
            return
        if self.around.timeline.now_ns - self.last_news_ns >= self.habits.patience_ns:
            self.lose_connection()
        else:
            self.watch_patience()
