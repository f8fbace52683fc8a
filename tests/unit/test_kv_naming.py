"""Block hashes, domains, the key and the names of files."""

import hmac
import stat
import struct
from pathlib import Path

import pytest

from scheduler.kvcache.naming import (
    BlockFile,
    BlockNamer,
    Chain,
    KeyDamaged,
    StateFile,
    TailFile,
    domain_digest,
    load_key,
)

SECRET = bytes(range(32))
DOMAIN = "0f" * 32
NAMER = BlockNamer(SECRET, DOMAIN)


def hashes(tokens: list[int], extras: dict[int, bytes] | None = None) -> list[str]:
    chain = Chain(NAMER, 4)
    chain.extend(tokens, extras or {})
    return list(chain.hashes)


def test_the_hash_is_what_the_format_says() -> None:
    tokens = struct.pack("<4I", 1, 2, 3, 2**32 - 1)
    first = NAMER.name("", tokens)
    message = bytes.fromhex(DOMAIN) + bytes(32) + struct.pack("<I", 16) + tokens
    assert first == hmac.new(SECRET, message, "sha256").hexdigest()
    second = NAMER.name(first, tokens, (b"image",))
    message = bytes.fromhex(DOMAIN) + bytes.fromhex(first) + struct.pack("<I", 16) + tokens
    message += struct.pack("<I", 5) + b"image"
    assert second == hmac.new(SECRET, message, "sha256").hexdigest()


def test_a_hash_depends_on_all_that_comes_before_it() -> None:
    tokens = list(range(12))
    known = hashes(tokens)
    assert len(known) == len(set(known)) == 3
    for changed in range(12):
        other = hashes([*tokens[:changed], 99, *tokens[changed + 1 :]])
        assert [a == b for a, b in zip(known, other, strict=True)] == [
            block < changed // 4 for block in range(3)
        ]


def test_a_hash_depends_on_key_and_domain() -> None:
    tokens = struct.pack("<4I", 1, 2, 3, 4)
    others = (BlockNamer(bytes(32), DOMAIN), BlockNamer(SECRET, "f0" * 32))
    assert len({namer.name("", tokens) for namer in (NAMER, *others)}) == 3


@pytest.mark.parametrize("sizes", [[1] * 13, [3, 3, 3, 4], [13], [4, 4, 4, 1], [5, 0, 8]])
def test_a_chain_grows_as_if_it_had_been_known_at_once(sizes: list[int]) -> None:
    tokens = list(range(13))
    chain = Chain(NAMER, 4)
    new: list[str] = []
    given = 0
    for size in sizes:
        new += chain.extend(tokens[given : given + size])
        given += size
        assert chain.num_tokens == given
    assert new == list(chain.hashes) == hashes(tokens)


def test_an_image_changes_the_block_of_its_first_placeholder_and_the_later_ones() -> None:
    plain, seen = hashes(list(range(12))), hashes(list(range(12)), {5: b"image"})
    assert [a == b for a, b in zip(plain, seen, strict=True)] == [True, False, False]
    assert seen != hashes(list(range(12)), {5: b"other"})
    assert seen != hashes(list(range(12)), {6: b"image"})
    chain = Chain(NAMER, 4)
    for token in range(12):
        chain.extend([token], {5: b"image"} if token == 5 else {})
    assert list(chain.hashes) == seen


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_is_a_uint32(token: int) -> None:
    with pytest.raises(ValueError, match="token id"):
        Chain(NAMER, 4).extend([1, token])


def test_a_domain_is_of_one_model_layout_and_block_size() -> None:
    domains = {
        domain_digest("model", "layout", 256),
        domain_digest("other", "layout", 256),
        domain_digest("model", "other", 256),
        domain_digest("model", "layout", 128),
        domain_digest("modell", "ayout", 256),
    }
    assert len(domains) == 5
    assert all(len(domain) == 64 for domain in domains)


def test_files_lie_where_the_documents_say() -> None:
    name = "ab" * 32
    assert BlockFile(DOMAIN, name).path == f"0f0f0f0f/ab/{name}.safetensors"
    assert StateFile(DOMAIN, name).path == f"0f0f0f0f/ab/{name}.state.safetensors"
    tail = TailFile(DOMAIN, "req_1", 700)
    assert tail.path == "0f0f0f0f/tails/req_1-700.safetensors"
    names = {BlockFile(DOMAIN, name).name, StateFile(DOMAIN, name).name, tail.name}
    assert len(names) == 3


def test_the_key_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = load_key(path)
    assert key.made
    assert len(key.secret) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = load_key(path)
    assert (again.secret, again.made) == (key.secret, False)
    assert list(tmp_path.iterdir()) == [path]


def test_a_lost_key_is_replaced_by_another(tmp_path: Path) -> None:
    secret = load_key(tmp_path / "key").secret
    (tmp_path / "key").unlink()
    other = load_key(tmp_path / "key")
    assert other.made
    assert other.secret != secret


@pytest.mark.parametrize("content", [b"", bytes(31), bytes(33)])
def test_a_damaged_key_is_not_used(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(KeyDamaged, match=f"{len(content)} bytes.*remove the file"):
        load_key(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == content
