"""Token ids and log-probabilities as bytes: the compact form of the side tables.

Token ids are unsigned 32-bit integers, little-endian. The log-probabilities of one token are its
own value as float32, the number of alternatives as uint16, and each alternative as its id
(uint32) and value (float32); those of several tokens follow each other.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

# array('I').tobytes() is the stored form only on a little-endian machine with 4-byte integers,
# which all supported platforms are.
assert sys.byteorder == "little"
assert array("I").itemsize == 4

ID_BYTES = 4
_HEAD = struct.Struct("<fH")
_ALTERNATIVE = struct.Struct("<If")
_LENGTH = struct.Struct("<I")
# Stands for a row without log-probabilities, which no length can be: a row has at most 4 GB - 2.
_NONE = 0xFFFFFFFF

Logprobs = tuple[float, tuple[tuple[int, float], ...]]
"""The log-probability of a token and the most likely ones as (token id, log-probability)."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as they are stored."""
    return array("I", ids).tobytes()


def unpack_ids(body: bytes) -> "array[int]":
    """The inverse of `pack_ids`."""
    ids = array("I")
    ids.frombytes(body)
    return ids


def pack_logprobs(tokens: Iterable[Logprobs]) -> bytes:
    """The log-probabilities of consecutive tokens as they are stored."""
    parts: list[bytes] = []
    for chosen, top in tokens:
        parts.append(_HEAD.pack(chosen, len(top)))
        parts.extend(_ALTERNATIVE.pack(token_id, value) for token_id, value in top)
    return b"".join(parts)


def unpack_logprobs(body: bytes) -> list[Logprobs]:
    """The inverse of `pack_logprobs`; values come back as float32 holds them."""
    tokens: list[Logprobs] = []
    at = 0
    while at < len(body):
        chosen, num_top = _HEAD.unpack_from(body, at)
        at += _HEAD.size
        end = at + num_top * _ALTERNATIVE.size
        tokens.append((chosen, tuple(_ALTERNATIVE.iter_unpack(body[at:end]))))
        at = end
    return tokens


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of one decode step: `ids` of all rows in the order of the event's `numbers` (its
    `counts` say how many each has); `logprobs`, when any row asked for them, one packed value
    or None per row.
    """

    ids: bytes
    logprobs: tuple[bytes | None, ...] | None = None

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[int], Iterable[Logprobs] | None]]) -> "StepTokens":
        """From (token ids, log-probabilities or None) for each row of the step."""
        ids = pack_ids(chain.from_iterable(ids for ids, _ in rows))
        if all(logprobs is None for _, logprobs in rows):
            return cls(ids)
        packed = (None if logprobs is None else pack_logprobs(logprobs) for _, logprobs in rows)
        return cls(ids, tuple(packed))

    def rows(self, counts: Sequence[int]) -> Iterator[tuple[bytes, bytes | None]]:
        """The packed ids and log-probabilities of each row."""
        start = 0
        for index, count in enumerate(counts):
            end = start + count * ID_BYTES
            yield self.ids[start:end], self.logprobs[index] if self.logprobs else None
            start = end


def pack_rows(rows: tuple[bytes | None, ...] | None) -> bytes | None:
    """`StepTokens.logprobs` as one value: each row's length and bytes."""
    if rows is None:
        return None
    return b"".join(
        _LENGTH.pack(_NONE) if row is None else _LENGTH.pack(len(row)) + row for row in rows
    )


def unpack_rows(body: bytes | None) -> tuple[bytes | None, ...] | None:
    """The inverse of `pack_rows`."""
    if body is None:
        return None
    rows: list[bytes | None] = []
    at = 0
    while at < len(body):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if length == _NONE:
            rows.append(None)
        else:
            rows.append(body[at : at + length])
            at += length
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class SideRows:
    """What a commit writes beside its events: for each request that it takes the prompt as
    (request_id, packed ids) and the parameters as (request_id, JSON), and for each
    tokens_decoded its tokens, by the index of that event among the facts.
    """

    prompts: Sequence[tuple[str, bytes]] = ()
    parameters: Sequence[tuple[str, bytes]] = ()
    tokens: dict[int, StepTokens] = field(default_factory=dict[int, StepTokens])


NO_ROWS = SideRows()
