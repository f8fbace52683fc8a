"""The model's tokenizer, with its chat template: loaded without the weights.

mlx-lm's wrapper does the work. Importing it imports mlx, so the BLAS is chosen before.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from scheduler.engine.model import ModelError
from scheduler.engine.text import Detokenizer


class ModelTokenizer:
    """See scheduler/engine/model.py, `Tokenizer`. Wraps mlx-lm's `TokenizerWrapper`."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._backend = wrapper.backend_tokenizer
        self.end_of_turn_ids: Sequence[int] = tuple(sorted(wrapper.eos_token_ids))

    @property
    def vocab_size(self) -> int:
        """How many tokens it knows, special ones included."""
        return len(self._wrapper)

    @property
    def detokenizer(self) -> Detokenizer:
        """A fresh streaming detokenizer."""
        return self._wrapper.detokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, special tokens in it included and none added. Unlike `encode` of
        the tokenizers package this lets other threads run.
        """
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **options: object,
    ) -> str:
        """The prompt's text by the model's chat template. Raises ValueError for messages that the
        template refuses, and for a model without a template.
        """
        try:
            return self._wrapper.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **options,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error


def load(folder: Path, end_of_turn_ids: Sequence[int] | None) -> ModelTokenizer:
    """The tokenizer of a model's folder. Raises ModelError when its files are broken."""
    from mlx_lm.tokenizer_utils import load as load_wrapper

    try:
        wrapper = load_wrapper(folder, eos_token_ids=end_of_turn_ids)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    return ModelTokenizer(wrapper)
