"""The demo's clients: three chat requests, each in its own thread, and each taken up again.

A client asks with the openai client, and reads the events as they stand on the wire, since it needs
what the openai client does not show: the `id:` of each event, the number of output tokens that it
and all events before it have used up. With that number it goes on after the server's death.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import httpx2
import openai
from openai.types.chat import ChatCompletionChunk

SILENCE_LIMIT_S = 300
"""Seconds without a byte after which a client gives up. Heartbeats come every 10 s, but only once
the model is described, and on a slow machine its first making and loading take a while.
"""

TO_THE_LENGTH = {"ignore_eos": True}
"""Each answer has all of its tokens, whatever the model writes: its memory grows as planned."""

SentToken = tuple[str, float]
"""A token as the wire shows it: its text, and the log-probability with which it was chosen."""


@dataclass(slots=True)
class Answer:
    """What a client has been sent of one answer."""

    name: str
    prompt: str
    max_tokens: int
    request_id: str = ""
    text: str = ""
    tokens: list[SentToken] = field(default_factory=list[SentToken])
    position: int = 0
    done: bool = False
    error: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more comes: the stream is at its end, or broken."""
        return self.done or bool(self.error)

    def so_far(self) -> "Answer":
        """A copy of what has come."""
        return replace(self, tokens=list(self.tokens))

    def take(self, identifier: str | None, data: str) -> None:
        """One event of the stream."""
        if data == "[DONE]":
            self.done = True
            return
        chunk = ChatCompletionChunk.model_validate_json(data)
        if identifier is not None:
            self.position = int(identifier)
        for choice in chunk.choices:
            self.text += choice.delta.content or ""
            if choice.logprobs is not None:
                self.tokens += [(t.token, t.logprob) for t in choice.logprobs.content or ()]


def read_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """The lines of a response that is read piece by piece. Only a line feed ends one: text may
    hold other characters at which `str.splitlines`, and so the HTTP library, would cut.
    """
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode()


def read_events(lines: Iterable[str]) -> Iterator[tuple[str | None, str]]:
    """The (id, data) of server-sent events. Comments are skipped; a cut event never comes out."""
    identifier: str | None = None
    data: list[str] = []
    for line in lines:
        name, _, value = line.partition(":")
        if line and name == "id":
            identifier = value.strip()
        elif line and name == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            yield identifier, "\n".join(data)
            identifier, data = None, []


News = queue.SimpleQueue[Answer]
"""Where clients say that something has come: the answer that it has come for."""


class Clients:
    """The clients of one server. `news` gets an answer whenever it has changed, and once more when
    its thread ends.
    """

    def __init__(self, address: str, seed: int, news: News) -> None:
        self.address = address
        self.seed = seed
        self.news = news
        self.openai = openai.OpenAI(
            base_url=f"{address}/v1",
            api_key="none",
            max_retries=0,
            timeout=SILENCE_LIMIT_S,
            http_client=openai.DefaultHttpxClient(trust_env=False, timeout=SILENCE_LIMIT_S),
        )
        self.threads: list[threading.Thread] = []

    def begin(self, answer: Answer) -> None:
        """Asks for the answer, in a thread of its own."""
        self.start(self.ask, answer)

    def go_on(self, answer: Answer) -> None:
        """Takes the answer up where it was, in a thread of its own."""
        answer.error = ""
        self.start(self.take_up, answer)

    def start(self, work: Callable[[Answer], None], answer: Answer) -> None:
        thread = threading.Thread(target=self.guarded, args=(work, answer), daemon=True)
        self.threads.append(thread)
        thread.start()

    def guarded(self, work: Callable[[Answer], None], answer: Answer) -> None:
        """A lost connection and a refusal are noted in the answer."""
        try:
            work(answer)
        except (openai.OpenAIError, httpx2.HTTPError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        self.news.put(answer)

    def ask(self, answer: Answer) -> None:
        """One chat request, streamed. Log-probabilities are what tells a near-tie from an error."""
        with self.openai.chat.completions.with_streaming_response.create(
            model="default",
            messages=[{"role": "user", "content": answer.prompt}],
            max_tokens=answer.max_tokens,
            temperature=0,
            seed=self.seed,
            logprobs=True,
            top_logprobs=5,
            stream=True,
            extra_body=TO_THE_LENGTH,
        ) as response:
            answer.request_id = response.headers["X-Request-Id"]
            self.news.put(answer)
            self.follow(answer, response.iter_bytes())

    def complete(self, prompt: str) -> str:
        """Has one token put out after this prompt; returns the request's id when it has ended.
        Raises OpenAIError.
        """
        response = self.openai.chat.completions.with_raw_response.create(
            model="default",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=1,
            temperature=0,
            seed=self.seed,
        )
        return response.headers["X-Request-Id"]

    def open_requests(self) -> dict[str, tuple[str, int]]:
        """`GET /v1/requests`: what each open request does, and how many tokens it has, by its id.
        Raises HTTPError.
        """
        response = httpx2.get(
            f"{self.address}/v1/requests", timeout=SILENCE_LIMIT_S, trust_env=False
        )
        response.raise_for_status()
        return {
            entry["id"]: (entry["state"], entry["num_known_tokens"])
            for entry in response.json()["data"]
        }

    def wish(self, answer: Answer, wish: Literal["pause", "resume"]) -> None:
        """`POST /v1/requests/{id}/pause` or `/resume`: by hand. Raises HTTPError."""
        httpx2.post(
            f"{self.address}/v1/requests/{answer.request_id}/{wish}",
            timeout=SILENCE_LIMIT_S,
            trust_env=False,
        ).raise_for_status()

    def take_up(self, answer: Answer) -> None:
        """`GET /v1/requests/{id}/stream` after the last event that came."""
        with httpx2.stream(
            "GET",
            f"{self.address}/v1/requests/{answer.request_id}/stream",
            headers={"Last-Event-ID": str(answer.position)},
            timeout=SILENCE_LIMIT_S,
            trust_env=False,
        ) as response:
            if response.is_error:
                raise ValueError(f"{response.status_code} {response.read().decode()}")
            self.follow(answer, response.iter_bytes())

    def follow(self, answer: Answer, chunks: Iterable[bytes]) -> None:
        """Takes events until the stream ends. Raises ValueError when its last event is missing."""
        for identifier, data in read_events(read_lines(chunks)):
            answer.take(identifier, data)
            self.news.put(answer)
        if not answer.done:
            raise ValueError("the stream was cut")

    def read_again(self, answer: Answer) -> Answer:
        """The whole answer, read from its beginning. Waits for its end."""
        whole = Answer(answer.name, answer.prompt, answer.max_tokens, answer.request_id)
        self.guarded(self.take_up, whole)
        return whole

    def close(self) -> None:
        """Waits for the threads: their server has ended, or their answers have."""
        for thread in self.threads:
            thread.join()
        self.openai.close()
