"""The model's tokenizer, with its chat template: loaded without the weights.

mlx-lm's wrapper does the work. Importing it imports mlx, so the BLAS is chosen before.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError

from scheduler.engine.fields import Fields, first_line
from scheduler.engine.model import ModelError
from scheduler.engine.text import Detokenizer

LOAD_ERRORS = (
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What transformers and huggingface_hub raise for files that they cannot use."""


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


def check_kind(config: Fields) -> None:
    """Looks whether mlx-lm knows the model's type, before transformers warns of it at length.
    Raises ModelError.
    """
    from mlx_lm.utils import MODEL_REMAPPING

    kind = str(config.values["model_type"])
    module = MODEL_REMAPPING.get(kind, kind)
    known = module.isidentifier() and importlib.util.find_spec(f"mlx_lm.models.{module}")
    if not known and not config.values.get("model_file"):
        raise ModelError(f"{config.path}: mlx-lm knows no model_type {kind!r}: serve another model")


def load(folder: Path, end_of_turn_ids: Sequence[int] | None) -> ModelTokenizer:
    """The tokenizer of a model's folder. Raises ModelError when its files are broken."""
    from mlx_lm.tokenizer_utils import load as load_wrapper

    try:
        wrapper = load_wrapper(folder, eos_token_ids=end_of_turn_ids)
    except LOAD_ERRORS as error:
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded ({first_line(error)}): "
            "fetch the model again"
        ) from error
    return ModelTokenizer(wrapper)
