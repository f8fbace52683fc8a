"""The bytes of a block's file: safetensors, with two checksums and the file's own name inside.

A safetensors file (https://huggingface.co/docs/safetensors, "Format") is the length of its header
in 8 little-endian bytes, the header as JSON, and the data of the tensors. Here the JSON begins with
the metadata, and the metadata with `header_xxh3`: the xxh3_128 of everything before the data, taken
with zeros in the checksum's own place. The header holds `data_xxh3` over all that follows it. So no
bit of the file can change unnoticed, and nothing in the header is believed, or given to a parser
that is not ours, before it has been checked.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_128

FORMAT = "fermata-kv-1"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 4 * 2**20
"""A header has about 100 bytes a tensor: enough for tens of thousands of them."""

_START = b'{"__metadata__":{"header_xxh3":"'
_ZEROS = b"0" * 32
_CHECKSUM = slice(LENGTH_BYTES + len(_START), LENGTH_BYTES + len(_START) + len(_ZEROS))
_ALIGNMENT = 8

FIRST_BYTES = _CHECKSUM.stop
"""What every file has at least."""


class Damaged(Exception):
    """The bytes are not those that were written. The text says how it shows."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One evaluated array as bytes: `code` is its number format in safetensors' words (`BF16`).

    `data` is contiguous and holds on to the array's memory.
    """

    code: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def num_bytes(self) -> int:
        """Without the header's share."""
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class Header:
    """What a checked header says: the tensors' names in the order of their data."""

    names: Sequence[str]
    metadata: Mapping[str, str]
    header_bytes: int
    data_bytes: int

    @property
    def data_checksum(self) -> str:
        """The xxh3_128 of the data."""
        return self.metadata["data_xxh3"]


def encode(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, list[memoryview]]:
    """The header, and the data in the order in which it follows."""
    names = sorted(tensors)
    data = [tensors[name].data for name in names]
    header: dict[str, object] = {
        "__metadata__": {
            "header_xxh3": _ZEROS.decode(),
            "data_xxh3": checksum(data),
            "format": FORMAT,
            **metadata,
        }
    }
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.num_bytes
        header[name] = {
            "dtype": tensor.code,
            "shape": tensor.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    assert text.startswith(_START), "the checksum is found by its place"
    text += b" " * (-len(text) % _ALIGNMENT)
    head = bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    head[_CHECKSUM] = xxh3_128(head).hexdigest().encode()
    return bytes(head), data


def checksum(data: Iterable[memoryview | bytes]) -> str:
    """The xxh3_128 of the pieces, one after the other."""
    digest = xxh3_128()
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def header_length(first: bytes, file_bytes: int) -> int:
    """The bytes before the data, from the first `FIRST_BYTES` of a file with this size.

    Raises Damaged when it cannot be one of our files.
    """
    if len(first) < FIRST_BYTES:
        raise Damaged(f"the file has {file_bytes} bytes, less than any header")
    length = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "little")
    if not FIRST_BYTES < length <= min(file_bytes, MAX_HEADER_BYTES):
        raise Damaged(f"a header of {length} bytes in a file of {file_bytes}")
    return length


def decode(head: bytes, file_bytes: int) -> Header:
    """The header of a file with this size, from all bytes before its data.

    Raises Damaged when a bit of them has changed, or when the data is shorter or longer than they
    say.
    """
    zeroed = bytearray(head)
    zeroed[_CHECKSUM] = _ZEROS
    found = head[_CHECKSUM]
    if xxh3_128(zeroed).hexdigest().encode() != found:
        raise Damaged("the header does not have its checksum")
    entries = json.loads(head[LENGTH_BYTES:])
    metadata = entries.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise Damaged(f"the format is {metadata['format']}, not {FORMAT}")
    data_bytes = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if len(head) + data_bytes != file_bytes:
        expected = len(head) + data_bytes
        raise Damaged(f"the file has {file_bytes} bytes, its header speaks of {expected}")
    return Header(tuple(entries), metadata, len(head), data_bytes)
