"""What blocks and their files are called.

A block's hash says everything that its KV depends on: the domain, all tokens up to its end (through
the hash of the block before it), and what stands in for tokens that are no text. It is an
HMAC-SHA-256 under the key of the installation, so nobody without that key can test whether a known
text was ever computed here.
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler.kvcache.files import Files, OsFiles, write_whole

FORMAT_VERSION = 1
"""Counts the meanings that a block's bytes have had; part of every domain."""

KEY_FILE = "key"
"""In the state folder."""

KEY_BYTES = 32

SUFFIX = ".safetensors"

NO_EXTRAS: Mapping[int, bytes] = {}


class KeyDamaged(Exception):
    """The key file is there and holds no key. The text says what to do."""


@dataclass(frozen=True, slots=True)
class Key:
    """The key of an installation. `made`: it was made just now, so no older block can be named."""

    secret: bytes
    made: bool


def load_key(path: Path, files: Files | None = None) -> Key:
    """Reads the key, or makes it at the first use (32 random bytes, mode 0600, durable).

    Raises KeyDamaged and OSError as `read_key` does, and OSError when it cannot be made. Called
    once, at start, under the state folder's lock.
    """
    if not path.exists():
        secret = secrets.token_bytes(KEY_BYTES)
        write_whole(files or OsFiles(), path, [memoryview(secret)])
        return Key(secret, made=True)
    return Key(read_key(path), made=False)


def read_key(path: Path) -> bytes:
    """The key that is there. Raises KeyDamaged for a file of the wrong length and OSError for one
    that cannot be read.
    """
    secret = path.read_bytes()
    if len(secret) != KEY_BYTES:
        raise KeyDamaged(
            f"{path} has {len(secret)} bytes, a key has {KEY_BYTES}: remove the file, and a new key"
            " is made; saved KV cannot be found again then, and whatever is sent again is new"
        )
    return secret


def domain_digest(model_fingerprint: str, layout_digest: str, block_tokens: int) -> str:
    """64 hex digits for all that must be equal before KV may be shared at all.

    `layout_digest` covers cache classes, heads, sizes, number formats and the bits of quantised
    caches (see `Layout.digest`).
    """
    parts = ("fermata-kv", str(FORMAT_VERSION), model_fingerprint, layout_digest, str(block_tokens))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class BlockNamer:
    """Names the blocks of one domain under one key."""

    secret: bytes
    domain: str

    def name(self, parent: str, token_ids: bytes, extras: Sequence[bytes] = ()) -> str:
        """The hash of a block, 64 hex digits.

        `parent` is the hash of the block before it, or empty for the first one; `token_ids` are
        little-endian uint32; each of `extras` stands in for something that is not in the tokens,
        such as an image. Every part has a fixed length or says its own, so two different blocks
        never give the same message.
        """
        message = b"".join(
            (
                bytes.fromhex(self.domain),
                bytes.fromhex(parent) if parent else bytes(32),
                struct.pack("<I", len(token_ids)),
                token_ids,
                *(struct.pack("<I", len(extra)) + extra for extra in extras),
            )
        )
        return hmac.digest(self.secret, message, "sha256").hex()


class Chain:
    """The block hashes of a growing row of tokens; a block gets its hash when it is full."""

    def __init__(self, namer: BlockNamer, block_tokens: int) -> None:
        assert block_tokens > 0, "a block holds at least one token"
        self._namer = namer
        self._block_tokens = block_tokens
        self._hashes: list[str] = []
        self._rest = b""
        self._extras: dict[int, bytes] = {}

    @property
    def hashes(self) -> Sequence[str]:
        """One hash for each full block, in order."""
        return self._hashes

    @property
    def num_tokens(self) -> int:
        """How many tokens were given, those of the growing block included."""
        return len(self._hashes) * self._block_tokens + len(self._rest) // 4

    def extend(
        self, token_ids: Sequence[int], extras: Mapping[int, bytes] = NO_EXTRAS
    ) -> Sequence[str]:
        """Takes the next tokens and returns the hashes of the blocks that became full.

        `extras` are keyed by position in the whole row, at or after the first of these tokens: the
        digest of an image at its first placeholder. Raises ValueError for a token id that is not a
        uint32.
        """
        before = len(self._hashes)
        first = self.num_tokens
        assert all(position >= first for position in extras), "extras come with their tokens"
        try:
            self._rest += struct.pack(f"<{len(token_ids)}I", *token_ids)
        except struct.error as error:
            raise ValueError(f"a token id is no uint32: {error}") from error
        self._extras.update(extras)
        self._name_full_blocks()
        return self._hashes[before:]

    def _name_full_blocks(self) -> None:
        size = 4 * self._block_tokens
        end = len(self._rest) - len(self._rest) % size
        for offset in range(0, end, size):
            parent = self._hashes[-1] if self._hashes else ""
            extras = self._take_extras() if self._extras else ()
            token_ids = self._rest[offset : offset + size]
            self._hashes.append(self._namer.name(parent, token_ids, extras))
        self._rest = self._rest[end:]

    def _take_extras(self) -> Sequence[bytes]:
        """The extras of the block that is named next, each with its place in the block."""
        start = len(self._hashes) * self._block_tokens
        inside = sorted(p for p in self._extras if p < start + self._block_tokens)
        return [struct.pack("<I", p - start) + self._extras.pop(p) for p in inside]


@dataclass(frozen=True, slots=True)
class BlockFile:
    """The layers of one block that can be cut at a token."""

    domain: str
    hash: str

    @property
    def name(self) -> str:
        """What the file says of itself, so that two swapped files are noticed."""
        return self.hash

    @property
    def path(self) -> str:
        """Relative to the store's folder."""
        return f"{self.domain[:8]}/{self.hash[:2]}/{self.hash}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class StateFile:
    """The state layers at the end of the block with this hash.

    Beside the block and not in it: most blocks have no state; a block that was saved without one
    may get it from a later request; a state can be removed before its block; and a restore reads
    all blocks but only one state.
    """

    domain: str
    hash: str

    @property
    def name(self) -> str:
        """See `BlockFile.name`."""
        return f"{self.hash}.state"

    @property
    def path(self) -> str:
        """See `BlockFile.path`."""
        return f"{self.domain[:8]}/{self.hash[:2]}/{self.hash}.state{SUFFIX}"


@dataclass(frozen=True, slots=True)
class TailFile:
    """What a paused request holds beyond its last full block: private to it, never shared."""

    domain: str
    request_id: str
    position: int

    @property
    def name(self) -> str:
        """See `BlockFile.name`."""
        return f"{self.request_id}-{self.position}"

    @property
    def path(self) -> str:
        """See `BlockFile.path`."""
        return f"{self.domain[:8]}/tails/{self.name}{SUFFIX}"


KeptFile = BlockFile | StateFile | TailFile
