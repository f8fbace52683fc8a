"""Who asks, and what: as digests, by which a request that is sent again is known.

They are HMAC-SHA-256 under the key of the installation, so what the journal keeps of a key or of a
question cannot be tested against a guess without that key.
"""

import hmac
import struct
from dataclasses import dataclass

from starlette.datastructures import Headers

from api.canonical import canonical_body
from api.errors import ApiError, invalid
from api.settings import MAX_KEY_CHARACTERS

SESSION_HEADERS = ("session-id", "x-claude-code-session-id", "x-session-id")
"""In which agents say whose conversation it is: Codex, Claude Code, opencode."""

KEY_HEADER = "Idempotency-Key"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request: its API key, empty for none, and whether it may see what others sent."""

    api_key: bytes
    owner_digest: str
    sees_all: bool

    def may_see(self, owner_digest: str) -> bool:
        """Whether a request of this owner is this caller's to see and to touch."""
        return self.sees_all or owner_digest == self.owner_digest


@dataclass(frozen=True, slots=True)
class Sent:
    """What the headers of a POST say of it. Empty where they say nothing."""

    caller: Caller
    session: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Digests:
    """Those of `request_received` (journal/facts.py)."""

    content: str
    session: str
    key: str
    owner: str


def digest(secret: bytes, *parts: bytes) -> str:
    """64 hex digits over these parts. Each says its length, so two lists never give one message."""
    found = hmac.new(secret, digestmod="sha256")
    for part in parts:
        found.update(struct.pack("<Q", len(part)))
        found.update(part)
    return found.hexdigest()


def owner_digest(secret: bytes, api_key: bytes) -> str:
    """The digest of an API key; empty for none."""
    return digest(secret, b"owner", api_key) if api_key else ""


def sent_with(headers: Headers, caller: Caller) -> Sent:
    """What the headers say. Raises ApiError for a key that cannot be used."""
    return Sent(caller, session_of(headers), key_of(headers))


def session_of(headers: Headers) -> bytes:
    """The first of the session headers that is there, with its name."""
    for name in SESSION_HEADERS:
        value = headers.get(name)
        if value:
            return f"{name}:{value}".encode()
    return b""


def key_of(headers: Headers) -> bytes:
    """The Idempotency-Key. Raises ApiError for one that is empty, too long, or given twice, and for
    characters that are not printable ASCII.
    """
    given = headers.getlist(KEY_HEADER)
    if not given:
        return b""
    if len(given) > 1:
        raise bad_key("it is given more than once")
    key = given[0]
    if not 1 <= len(key) <= MAX_KEY_CHARACTERS:
        raise bad_key(f"a key has 1 to {MAX_KEY_CHARACTERS} characters, got {len(key)}")
    if not (key.isascii() and key.isprintable()):
        raise bad_key("a key is of printable ASCII characters")
    return key.encode()


def bad_key(message: str) -> ApiError:
    """The 400 for a key that cannot be used."""
    error = invalid(KEY_HEADER, message, "invalid_idempotency_key")
    error.headers["x-should-retry"] = "false"
    return error


def digests_of(secret: bytes, route: str, sent: Sent, body: bytes) -> Digests:
    """The digests of one POST. Tokenizer's thread."""
    scope = (route.encode(), sent.caller.api_key)
    return Digests(
        content=digest(secret, b"content", *scope, canonical_body(body)),
        session=digest(secret, b"session", sent.session) if sent.session else "",
        key=digest(secret, b"key", *scope, sent.key) if sent.key else "",
        owner=sent.caller.owner_digest,
    )
