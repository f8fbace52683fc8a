"""What a request asks of sampling and of its answer, beside its tokens. Kept as JSON in
`request_parameters`.
"""

import msgspec


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn. Neutral defaults; `seed` is always set (drawn and journaled when a
    client gave none).
    """

    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    ignore_end_of_turn: bool = False
    logprobs: bool = False
    top_logprobs: int = 0


class RequestParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that engine and API need to go on with a request after a restart, beside its token ids.

    `created` is the Unix time in seconds that answers show. `model` is the served model's name.
    `options` holds what only the dialect of the route reads (stream_options, tools,
    response_format), as it came.
    """

    route: str
    model: str
    created: int
    stream: bool
    sampling: SamplingParameters
    options: dict[str, object] = {}


def encode_parameters(parameters: RequestParameters) -> bytes:
    """The JSON that is stored and digested: keys sorted, so that equal parameters give equal
    bytes.
    """
    plain = msgspec.to_builtins(parameters, str_keys=True)  # Only text keys can be sorted.
    return msgspec.json.encode(plain, order="sorted")


def decode_parameters(body: bytes | str) -> RequestParameters:
    """The inverse of `encode_parameters`. Raises msgspec.ValidationError when the JSON is of
    another shape.
    """
    return msgspec.json.decode(body, type=RequestParameters)
