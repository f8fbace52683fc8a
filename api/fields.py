"""The fields that both OpenAI routes share, their ranges, and what they become for the engine."""

import secrets
from typing import Annotated

import msgspec

from api.errors import invalid
from api.settings import (
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_TOKENS_ASKED,
)
from scheduler.engine.model import Tokenizer
from scheduler.parameters import SamplingParameters

SEED_BITS = 53
"""A drawn seed is a whole number that JavaScript and jq can still read exactly."""

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS_ASKED)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0, le=10)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """`include_usage`: a last chunk with the token counts."""

    include_usage: bool | None = None


class SharedFields(msgspec.Struct, kw_only=True):
    """What a body of either route may say besides its prompt. Null is the same as not given."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def check_shared(fields: SharedFields) -> None:
    """Raises ApiError for what the types cannot say and the model has no part in."""
    if fields.n not in (None, 1):
        raise invalid("n", "only one answer per request is served here; n must be 1")
    stop_strings(fields.stop)
    if fields.logit_bias is not None and len(fields.logit_bias) > MAX_LOGIT_BIASES:
        raise invalid("logit_bias", f"at most {MAX_LOGIT_BIASES} entries are allowed")


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings, none of them empty. Raises ApiError for too many or too long ones."""
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = [stop]
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid("stop", f"at most {MAX_STOP_STRINGS} strings are allowed, got {len(stop)}")
    for index, string in enumerate(stop):
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise invalid(
                f"stop[{index}]",
                f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters, got {len(string)}",
            )
    return tuple(stop)


def token_biases(biases: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    """`logit_bias` by token id. Raises ApiError for a key that is no token of the model."""
    by_id: dict[int, float] = {}
    for key, bias in (biases or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise invalid(
                "logit_bias", f"a key is no token id of this model (0 to {vocab_size - 1})"
            )
        by_id[int(key)] = bias
    return by_id


def sampling_of(
    fields: SharedFields, tokenizer: Tokenizer, *, logprobs: bool, top_logprobs: int
) -> SamplingParameters:
    """How the answer's tokens are drawn. Without a temperature the most likely token is taken.

    Raises ApiError for a bias of a token that the model does not have.
    """
    neutral = SamplingParameters(seed=0)
    top_k = fields.top_k if fields.top_k is not None else neutral.top_k
    return SamplingParameters(
        seed=secrets.randbits(SEED_BITS) if fields.seed is None else fields.seed,
        temperature=or_else(fields.temperature, neutral.temperature),
        top_p=or_else(fields.top_p, neutral.top_p),
        top_k=max(top_k, 0),
        min_p=or_else(fields.min_p, neutral.min_p),
        repetition_penalty=or_else(fields.repetition_penalty, neutral.repetition_penalty),
        presence_penalty=or_else(fields.presence_penalty, neutral.presence_penalty),
        frequency_penalty=or_else(fields.frequency_penalty, neutral.frequency_penalty),
        logit_bias=token_biases(fields.logit_bias, tokenizer.vocab_size),
        stop=stop_strings(fields.stop),
        ignore_end_of_turn=bool(fields.ignore_eos),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )


def or_else(value: float | None, neutral: float) -> float:
    """The value that was given, or the neutral one."""
    return neutral if value is None else value
