"""Clients of a server that dies: what they ask, what they were sent, and how they go on.

A client believes what came over the wire and nothing else. After a cut it waits for the server's
next life, and takes its stream up where it was, or sends its request again.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tools.crash_wire import Cut, exchange

AGAIN_S = 0.005
"""Between two tries at a server that does not answer yet, or not now."""

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Act:
    """Something done to a request once so many of its tokens were delivered: pause, resume, cancel,
    or the name of what is done to the server or its files. A client that leaves does not come back;
    one that drops its connection does, and goes on as after a cut.
    """

    position: int
    verb: str


@dataclass(frozen=True)
class Ask:
    """One request. `after_tokens`: it is sent when so many tokens of others were delivered.

    `sends_again`: after a cut it is posted anew, instead of its stream being taken up; an answer in
    one object can only be asked for anew. `by_header` says how a stream is taken up.
    """

    path: str
    body: dict[str, Any]
    acts: tuple[Act, ...] = ()
    after_tokens: int = 0
    key: str | None = None
    sends_again: bool = False
    by_header: bool = False

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def leaves(self) -> bool:
        """Whether its client goes in the middle, and does not come back."""
        return any(act.verb == "leave" for act in self.acts)


@dataclass
class Attempt:
    """What was delivered of one answer: `pieces` are positions and what came with each."""

    request_id: str
    pieces: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    tokens: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    error: dict[str, Any] | None = None
    finish: str | None = None
    is_done: bool = False
    is_whole: bool = False

    @property
    def position(self) -> int:
        return self.pieces[-1][0] if self.pieces else 0

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)


class Listening(Protocol):
    """A life of a server, forked or not, that listens."""

    address: str | None


class Address:
    """Where the server listens now. Between two lives it listens nowhere."""

    def __init__(self) -> None:
        self._life: Listening | None = None
        self._changed = asyncio.Condition()

    async def move(self, life: Listening | None) -> None:
        """A life listens, or the last one is over."""
        async with self._changed:
            self._life = life
            self._changed.notify_all()

    async def wait(self) -> str:
        """The address, as soon as there is one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._life is not None)
        assert self._life is not None
        assert self._life.address is not None
        return self._life.address


@dataclass
class Client:
    """One client, from its request to its end. `problems` are what no client should see."""

    name: str
    ask: Ask
    address: Address
    crowd: "Crowd"
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    problems: list[str] = field(default_factory=list[str])
    has_begun: bool = False
    num_drops: int = 0
    has_left: bool = False
    refusal: dict[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it wants nothing more."""
        ended = bool(self.attempts) and self.attempts[-1].is_done
        return ended or self.has_left or self.refusal is not None

    async def run(self) -> None:
        """Asks until it has its answer, whatever happens to the server."""
        await self.crowd.reached(self.ask.after_tokens)
        self.has_begun = True
        operator = asyncio.ensure_future(self.operate())
        while not self.is_over and not self.problems:
            address = await self.address.wait()
            try:
                await self.once(address)
            except Cut:
                await asyncio.sleep(AGAIN_S)
        await operator

    async def once(self, address: str) -> None:
        """One exchange. Raises Cut."""
        last = self.attempts[-1] if self.attempts else None
        if last is None or self.ask.sends_again or not self.ask.streams:
            await self.post(address)
            return
        query = "" if self.ask.by_header else f"?after={last.position}"
        headers = {"last-event-id": str(last.position)} if self.ask.by_header else {}
        path = f"/v1/requests/{last.request_id}/stream{query}"
        async with exchange(address, "GET", path, headers=headers) as found:
            if found.status == 200:
                await self.follow(last, found)
            elif found.status == 503:
                await asyncio.sleep(AGAIN_S)
            elif found.status == 410:
                self.refusal = {"status": found.status}
            else:
                self.problems.append(f"{path}: {found.status} {(await found.body()).decode()}")

    async def post(self, address: str) -> None:
        """Sends the request. Raises Cut."""
        headers = {"content-type": "application/json"}
        if self.ask.key is not None:
            headers["idempotency-key"] = self.ask.key
        async with exchange(address, "POST", self.ask.path, self.ask.body, headers) as found:
            if found.status == 200:
                attempt = Attempt(found.headers["x-request-id"])
                if self.ask.streams:
                    self.attempts.append(attempt)
                    await self.follow(attempt, found)
                else:
                    await self.take_whole(attempt, await found.body())
                return
            answer = msgspec.json.decode(await found.body())
            if found.status in (503, 499):
                await asyncio.sleep(AGAIN_S)
            else:
                self.refusal = {"status": found.status, **answer["error"]}

    async def follow(self, attempt: Attempt, found: Any) -> None:
        """Takes the events of a stream to its end. Raises Cut."""
        async for position, data in found.events():
            self.take(attempt, position, data)
            self.crowd.tell()
            if self.has_left or self.drops(attempt):
                return
        if not attempt.is_done:
            self.problems.append(f"{attempt.request_id}: a clean end without a last event")

    def drops(self, attempt: Attempt) -> bool:
        """Whether it loses its connection here, once for each such act."""
        drops = [act for act in self.ask.acts if act.verb == "drop"]
        if self.num_drops == len(drops) or attempt.position < drops[self.num_drops].position:
            return False
        self.num_drops += 1
        return not attempt.is_done

    def take(self, attempt: Attempt, position: int | None, data: bytes) -> None:
        """One event."""
        if data == b"[DONE]":
            attempt.is_done = True
            return
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            attempt.error, attempt.is_done = chunk["error"], True
            return
        for choice in chunk["choices"]:
            text, tokens = shown(choice)
            attempt.finish = choice["finish_reason"] or attempt.finish
            attempt.tokens += tokens
            if text and position is not None:
                if position <= attempt.position:
                    self.problems.append(f"{attempt.request_id}: {position} came again")
                self.crowd.count(position - attempt.position)
                attempt.pieces.append((position, text))
        if any(act.verb == "leave" and attempt.position >= act.position for act in self.ask.acts):
            self.has_left = True

    async def take_whole(self, attempt: Attempt, body: bytes) -> None:
        """An answer in one object."""
        answer = msgspec.json.decode(body)
        choice = answer["choices"][0]
        text, attempt.tokens = shown(choice)
        attempt.pieces = [(answer["usage"]["completion_tokens"], text)]
        attempt.finish, attempt.is_done, attempt.is_whole = choice["finish_reason"], True, True
        self.attempts.append(attempt)
        self.crowd.count(attempt.position)
        self.crowd.tell()

    async def operate(self) -> None:
        """Does to the request what is to be done, one by one, each until it is answered."""
        for act in self.ask.acts:
            if act.verb in ("leave", "drop"):
                continue
            await self.crowd.until(lambda act=act: self.is_over or self.has_come_to(act))
            while not self.is_over:
                if await self.crowd.act(self, act.verb):
                    break
                await asyncio.sleep(AGAIN_S)

    def has_come_to(self, act: Act) -> bool:
        """Whether so much of the answer was delivered."""
        return bool(self.attempts) and self.attempts[-1].position >= act.position


def shown(choice: dict[str, Any]) -> tuple[str, list[tuple[str, float]]]:
    """Text and tokens with log-probabilities of a choice, of either route, whole or not."""
    logprobs = choice.get("logprobs")
    if "text" in choice:
        pairs: list[tuple[str, float]] = []
        if logprobs is not None:
            pairs = list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
        return choice["text"], pairs
    message = choice.get("delta") or choice.get("message") or {}
    content = [] if logprobs is None else logprobs["content"] or []
    return message.get("content") or "", [(t["token"], t["logprob"]) for t in content]


class Crowd:
    """All clients of one story, and what they do beside reading."""

    def __init__(self, asks: Sequence[Ask], deeds: "Deeds") -> None:
        self.address = Address()
        self.deeds = deeds
        self.num_tokens = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self.clients = [
            Client(f"client {number}", ask, self.address, self) for number, ask in enumerate(asks)
        ]

    def count(self, num_tokens: int) -> None:
        """So much more was delivered to somebody."""
        self.num_tokens += num_tokens

    def tell(self) -> None:
        """Something was delivered: whoever waits for that looks again."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def is_quiet(self) -> bool:
        """Whether everybody who has begun has come to an end."""
        return all(client.is_over for client in self.clients if client.has_begun)

    async def until(self, reached: Any) -> None:
        """Returns once it is so."""
        while not reached():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            await asyncio.wait((waiter,), timeout=0.1)

    async def reached(self, num_tokens: int) -> None:
        """Returns once so much was delivered, to all together, or no more is going to be."""
        await self.until(lambda: self.num_tokens >= num_tokens or self.is_quiet)

    async def act(self, client: Client, verb: str) -> bool:
        """One deed. False: it is to be tried again."""
        return await self.deeds.do(client, verb)

    async def until_idle(self) -> None:
        """Returns once the server has no open request any more, also of nobody."""
        while True:
            try:
                async with exchange(await self.address.wait(), "GET", "/v1/requests") as found:
                    listed = msgspec.json.decode(await found.body())
                    if found.status == 200 and not listed["data"]:
                        return
            except Cut:
                pass
            await asyncio.sleep(AGAIN_S)

    async def run(self) -> None:
        """Until all clients are at their ends."""
        await asyncio.gather(*(client.run() for client in self.clients))


class Deeds:
    """What operators, and those who damage files, do. `damage` is called for other verbs."""

    def __init__(self, damage: Any) -> None:
        self._damage = damage

    async def do(self, client: Client, verb: str) -> bool:
        """Does it. False: the server did not answer."""
        address = await client.address.wait()
        request_id = client.attempts[-1].request_id
        try:
            match verb:
                case "pause" | "resume":
                    return await answered(address, "POST", f"/v1/requests/{request_id}/{verb}")
                case "until paused":
                    return await is_paused(address, request_id)
                case "cancel":
                    return await answered(address, "DELETE", f"/v1/requests/{request_id}")
                case "clear":
                    return await answered(address, "POST", "/v1/cache/clear")
                case _:
                    self._damage(verb)
                    return True
        except Cut:
            return False


async def answered(address: str, method: str, path: str) -> bool:
    """Whether the server took it, or says that it is too late for it. Raises Cut."""
    async with exchange(address, method, path) as found:
        await found.body()
        return found.status < 500


async def is_paused(address: str, request_id: str) -> bool:
    """Whether the request is held by now, or cannot be any more. Raises Cut."""
    async with exchange(address, "GET", f"/v1/requests/{request_id}") as found:
        view = msgspec.json.decode(await found.body())
        return found.status == 200 and view["state"] not in ("prefilling", "decoding", "pausing")
