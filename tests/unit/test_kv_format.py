"""The bytes of a file: no bit of them may change unnoticed."""

import json

import pytest

from scheduler.kvcache.fileformat import (
    FIRST_BYTES,
    MAX_HEADER_BYTES,
    Damaged,
    Header,
    Tensor,
    checksum,
    decode,
    encode,
    header_length,
)
from tests.kvcache.pieces import piece

METADATA = {"name": "x"}


def whole_file() -> bytes:
    head, data = encode(piece(), METADATA)
    return head + b"".join(data)


def check(content: bytes) -> Header:
    """What a reader does. Raises Damaged."""
    length = header_length(content[:FIRST_BYTES], len(content))
    header = decode(content[:length], len(content))
    if checksum([content[length:]]) != header.data_checksum:
        raise Damaged("data")
    return header


def test_a_file_is_safetensors() -> None:
    content = whole_file()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header["0.keys"] == {
        "dtype": "U8",
        "shape": [1, 1, 61, 1],
        "data_offsets": [0, 61],
    }
    assert header["0.nothing"]["data_offsets"] == [61, 61]
    assert header["0.values"]["data_offsets"] == [61, 64]
    assert header["__metadata__"]["name"] == "x"
    assert content[8 + length :] == bytes(piece()["0.keys"].data) + b"val"


def test_a_whole_file_is_accepted() -> None:
    header = check(whole_file())
    assert list(header.names) == ["0.keys", "0.nothing", "0.values"]
    assert header.header_bytes + header.data_bytes == len(whole_file())


def test_a_file_without_tensors_is_accepted() -> None:
    head, data = encode({}, METADATA)
    assert data == []
    assert check(head).data_bytes == 0


def test_no_bit_may_flip() -> None:
    content = whole_file()
    accepted: list[int] = []
    for bit in range(len(content) * 8):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            check(bytes(damaged))
        except Damaged:
            continue
        accepted.append(bit)
    assert accepted == []


def test_no_byte_may_be_missing_or_too_many() -> None:
    content = whole_file()
    for length in [*range(len(content)), len(content) + 1]:
        with pytest.raises(Damaged):
            check((content + b"\0")[:length])


def test_a_header_is_never_larger_than_its_bound() -> None:
    first = (MAX_HEADER_BYTES - 7).to_bytes(8, "little") + bytes(FIRST_BYTES)
    with pytest.raises(Damaged, match="a header of"):
        header_length(first, 2**40)


def test_two_tensors_that_changed_places_are_noticed() -> None:
    tensors = {name: Tensor("U8", (1,), memoryview(name.encode())) for name in "ab"}
    head, data = encode(tensors, METADATA)
    with pytest.raises(Damaged):
        check(head + b"".join(reversed(data)))
