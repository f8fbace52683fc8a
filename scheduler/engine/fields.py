"""Typed reading of a model's configuration, which anybody may have written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from scheduler.engine.model import ModelError

MAX_SHOWN = 60
"""Characters of a wrong value that a message shows at most."""

NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""No model does without these; a configuration may leave one out, but not make it null."""


@dataclass(frozen=True)
class Fields:
    """One object of a configuration. `path` is its file, for messages. All methods raise ModelError
    that names the key.
    """

    path: Path
    values: Mapping[str, Any]

    def check(self) -> None:
        """Looks at what every model needs, whether or not it is read here."""
        for key in NEEDED:
            if key in self.values and self.values[key] is None:
                raise self.wrong(key, "a positive whole number")
            self.count(key)

    def count(self, *keys: str, default: int = 0) -> int:
        """The first of the keys that is there and not null, a positive whole number. Zero is how
        some configurations say that they have none.
        """
        for key in keys:
            value = self.values.get(key)
            if value is None or (value == 0 and type(value) is int and key not in NEEDED):
                continue
            if type(value) is not int or value < 1:
                raise self.wrong(key, "a positive whole number")
            return value
        return default

    def words(self, key: str) -> list[str]:
        """A list of words; empty when it is not there."""
        value = self.values.get(key) or []
        if not isinstance(value, list):
            raise self.wrong(key, "a list of words")
        words = cast("list[object]", value)
        if not all(isinstance(word, str) for word in words):
            raise self.wrong(key, "a list of words")
        return cast("list[str]", words)

    def token_ids(self, key: str) -> list[int] | None:
        """One token id or a list of them; null when it is not there."""
        value = self.values.get(key)
        if value is None:
            return None
        found = cast("list[object]", value) if isinstance(value, list) else [value]
        if not all(type(token) is int and token >= 0 for token in found):
            raise self.wrong(key, "a token id or a list of them")
        return cast("list[int]", found)

    def inner(self, key: str) -> "Fields | None":
        """An object inside of this one; null when it is not there or empty."""
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(self.path, cast("dict[str, Any]", value))

    def wrong(self, key: str, wanted: str) -> ModelError:
        """What to raise for a value of the wrong type."""
        shown = repr(self.values.get(key))[:MAX_SHOWN]
        return ModelError(
            f"{self.path}: {key} is {shown}, not {wanted}: correct it or fetch the model again"
        )


def first_line(error: BaseException) -> str:
    """A library's message as one line: the error's name and its first line."""
    name = type(error).__name__
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    text = next((line for line in lines if line), "")
    return f"{name}: {text}" if text else name
