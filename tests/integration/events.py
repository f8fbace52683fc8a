"""Server-sent events as they came over the wire, and the strictest reading of their JSON."""

import json
from dataclasses import dataclass
from typing import Any

import httpx
from openai import BaseModel
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

KINDS: dict[str, type[BaseModel]] = {
    "chat.completion": ChatCompletion,
    "chat.completion.chunk": ChatCompletionChunk,
    "text_completion": Completion,
    "model": Model,
}

OUR_FIELDS = {"model": {"max_model_len"}}
"""Fields that we document and OpenAI's models do not have."""


@dataclass(frozen=True)
class Event:
    """One event: `position` is its id, `data` its JSON or the text `[DONE]`."""

    position: int | None
    data: Any

    @property
    def text(self) -> str:
        """What it shows, on either route."""
        if self.data == "[DONE]" or not self.data.get("choices"):
            return ""
        choice = self.data["choices"][0]
        return choice["text"] if "text" in choice else choice["delta"].get("content") or ""

    @property
    def is_heartbeat(self) -> bool:
        """Whether it says nothing and has no id."""
        return self.position is None and self.text == ""


def parse_event(block: str) -> Event:
    """One event from its lines. There are no lines but `id:` and `data:`, in this order."""
    lines = block.split("\n")
    position = int(lines.pop(0).removeprefix("id: ")) if lines[0].startswith("id: ") else None
    assert len(lines) == 1
    assert lines[0].startswith("data: ")
    body = lines[0].removeprefix("data: ")
    return Event(position, body if body == "[DONE]" else json.loads(body))


def parse_stream(text: str) -> list[Event]:
    """All events of a whole stream, each read strictly."""
    assert text.endswith("\n\n")
    events = [parse_event(block) for block in text.removesuffix("\n\n").split("\n\n")]
    for event in events:
        if event.data != "[DONE]" and "error" not in event.data:
            check_object(event.data)
    return events


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Event]:
    """The events of a streamed answer."""
    answer = client.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parse_stream(answer.text)


def check_object(data: dict[str, Any]) -> None:
    """The object is what OpenAI's model of its kind says, with the exact types and nothing else."""
    kind = data["object"]
    assert_known_only(KINDS[kind].model_validate(without_nulls(data), strict=True), kind)


def without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's model of a completion has no null finish reason, which its own streams have in all
    events but the last.
    """
    if data["object"] != "text_completion":
        return data
    choices = [
        choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in data["choices"]
    ]
    return data | {"choices": choices}


def assert_known_only(model: BaseModel, kind: str) -> None:
    """No field is one that the model does not know, at any depth."""
    extra = set(model.model_extra or {}) - OUR_FIELDS.get(kind, set())
    assert not extra, f"{type(model).__name__} has no {extra}"
    for value in model.__dict__.values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, BaseModel):
                assert_known_only(inner, kind)
