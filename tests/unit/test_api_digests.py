"""By what a request is known: each part counts, and none of it can be read."""

import json
from typing import Any

import pytest
from starlette.datastructures import Headers

from api.digests import Caller, Digests, digest, digests_of, owner_digest, sent_with
from api.errors import ApiError

SECRET = b"s" * 32
BOTH = {"idempotency-key": "k", "session-id": "s"}
BODY: dict[str, Any] = {"model": "default", "prompt": "once", "max_tokens": 3}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def known(
    headers: dict[str, str] = BOTH,
    *,
    secret: bytes = SECRET,
    route: str = TEXT,
    key: str = "mine",
    body: Any = BODY,
) -> Digests:
    """The digests of a POST."""
    caller = Caller(key.encode(), owner_digest(secret, key.encode()), sees_all=True)
    sent = sent_with(Headers(headers), caller)
    return digests_of(secret, route, sent, json.dumps(body).encode())


def test_each_part_counts() -> None:
    first = known()
    assert first == known(body=BODY | {"stream": True})
    others = [
        known(secret=b"t" * 32),
        known(route=CHAT),
        known(key="another's"),
    ]
    for other in others:
        assert other.content != first.content
        assert other.key != first.key
    assert others[1].owner == first.owner
    assert others[1].session == first.session
    assert others[2].owner != first.owner
    asked_otherwise = known(body=BODY | {"seed": 1})
    assert asked_otherwise.content != first.content
    assert asked_otherwise.key == first.key
    assert known({"idempotency-key": "l"}).key != first.key


def test_what_is_not_said_has_no_digest() -> None:
    bare = known({}, key="")
    assert (bare.session, bare.key, bare.owner) == ("", "", "")
    assert len(bare.content) == 64


@pytest.mark.parametrize("name", ["session-id", "x-claude-code-session-id", "x-session-id"])
def test_agents_name_their_sessions(name: str) -> None:
    one, other = known({name: "one"}), known({name: "other"})
    assert len({one.session, other.session, known({}).session}) == 3
    assert one.content == other.content
    assert known({"session-id": "a"}).session != known({"x-session-id": "a"}).session


def test_parts_cannot_be_moved_into_each_other() -> None:
    assert digest(SECRET, b"ab", b"c") != digest(SECRET, b"a", b"bc")
    assert digest(SECRET, b"a", b"") != digest(SECRET, b"a")


@pytest.mark.parametrize(
    ("key", "is_good"),
    [
        ("k", True),
        ("k" * 256, True),
        (" ~!", True),
        ("", False),
        ("k" * 257, False),
        ("k" * 10_240, False),
        ("kéy", False),
        ("k\ty", False),
    ],
)
def test_keys_are_short_and_printable(key: str, is_good: bool) -> None:
    headers = Headers(raw=[(b"idempotency-key", key.encode("latin-1"))])
    caller = Caller(b"", "", sees_all=True)
    if is_good:
        assert sent_with(headers, caller).key == key.encode()
        return
    with pytest.raises(ApiError) as caught:
        sent_with(headers, caller)
    assert (caught.value.status, caught.value.param) == (400, "Idempotency-Key")
    assert caught.value.headers["x-should-retry"] == "false"
    assert len(caught.value.message) < 200


def test_one_key_is_enough() -> None:
    headers = Headers(raw=[(b"idempotency-key", b"a"), (b"idempotency-key", b"a")])
    with pytest.raises(ApiError, match="more than once"):
        sent_with(headers, Caller(b"", "", sees_all=True))


def test_a_caller_sees_its_own() -> None:
    mine, other = owner_digest(SECRET, b"mine"), owner_digest(SECRET, b"other")
    caller = Caller(b"mine", mine, sees_all=False)
    assert caller.may_see(mine)
    assert not any(caller.may_see(owner) for owner in (other, "", "gone"))
    assert Caller(b"op", other, sees_all=True).may_see("gone")
