"""What a model is to the server: its description, which needs no weights, and its engine.

`describe` reads tokenizer, configuration and the headers of the weight files, so that requests can
be counted, judged and queued while the weights load; `make_engine` makes the engine that loads
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from journal.events import ModelFacts
from scheduler.engine.base import Engine
from scheduler.engine.text import Detokenizer


class Tokenizer(Protocol):
    """Between text and token ids. Used from one thread at a time.

    `detokenizer` is a fresh streaming detokenizer at each access. `end_of_turn_ids` end an answer
    and are not shown.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_turn_ids(self) -> Sequence[int]: ...

    @property
    def detokenizer(self) -> Detokenizer: ...

    def encode(self, text: str) -> list[int]: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **options: object,
    ) -> str:
        """The prompt's text by the model's chat template. Raises ValueError for messages that the
        template refuses.
        """
        ...


class ModelError(Exception):
    """A model that cannot be served: missing, broken or unknown. One line that says what to do."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model before its weights are there. `facts` are estimates from its files; `blas` names the
    matrix library that the engine will compute with; `device_bytes` is the most memory that its
    device can well use, null where that is the machine's.
    """

    name: str
    tokenizer: Tokenizer
    facts: ModelFacts
    blas: str
    device_bytes: int | None = None


class ModelSource(Protocol):
    """Where a model comes from. `resolve` in `scheduler/engine/models.py` makes one by name."""

    @property
    def caches(self) -> Literal["mlx", "fake"]:
        """What its engine's caches are made of, which decides how they are saved."""
        ...

    def describe(self) -> ModelDescription:
        """Takes up to seconds, and is called in a thread of its own. Raises ModelError."""
        ...

    def make_engine(self, description: ModelDescription, nonce: int) -> Engine:
        """The engine, not yet started. `nonce` is drawn per engine life and journaled."""
        ...
