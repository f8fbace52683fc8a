"""An event survives the journal's columns, and nothing else does."""

import msgspec
import pytest

from journal.codec import decode_event, encode_event
from journal.errors import UnreadableEvent
from journal.events import (
    KINDS,
    AnyEvent,
    CapacityNumbers,
    ClientGone,
    RequestRejected,
    RowEnd,
    ServerStopping,
    StateCarried,
    TokensDecoded,
)
from tests.journal_steps import request_id, server_started

REJECTED = RequestRejected(
    request_id=request_id(1),
    reason="context_length_exceeded",
    numbers=CapacityNumbers(
        prompt_tokens=1,
        max_tokens=2,
        required_bytes=3,
        capacity_bytes=None,
        weights_bytes=5,
        kv_bytes_per_token=6,
        max_context_tokens=7,
    ),
    num_waiting=0,
)
DECODED = TokensDecoded(
    batch=1,
    numbers=(4, 3),
    counts=(1, 0),
    ended=(RowEnd(number=4, reason="length"),),
    duration_ns=9,
)
CARRIED = StateCarried(state_version=1, through_seq=7, state={"requests": {"1": {"seq": 3}}})


@pytest.mark.parametrize(
    "event", [server_started(), REJECTED, DECODED, CARRIED], ids=lambda e: type(e).__name__
)
def test_an_event_comes_back_equal(event: AnyEvent) -> None:
    columns = encode_event(event)
    assert decode_event(*columns) == event
    assert KINDS[columns.kind] is type(event)


def test_the_body_is_sorted_json_without_the_columns() -> None:
    kind, name, version, body = encode_event(REJECTED)
    assert (kind, name, version) == ("request_rejected", request_id(1), 1)
    assert body.startswith('{"num_waiting":0,"numbers":{"capacity_bytes":null,')
    assert "request_id" not in body
    assert "kind" not in msgspec.json.decode(body)
    decoded = encode_event(DECODED)
    assert decoded.request_id is None
    assert decoded.body == (
        '{"batch":1,"counts":[1,0],"duration_ns":9,'
        '"ended":[{"number":4,"reason":"length"}],"numbers":[4,3]}'
    )


@pytest.mark.parametrize(
    ("kind", "name", "version", "body", "message"),
    [
        ("client_left", "r", 1, "{}", "unknown kind"),
        ("client_gone", "r", 2, "{}", "version 2, this release reads 1"),
        ("client_gone", None, 1, "{}", "belongs in its column"),
        ("client_gone", "r", 1, '{"request_id":"r"}', "belongs in its column"),
        ("server_stopping", "r", 1, '{"reason":"signal"}', "belongs in its column"),
        ("server_stopping", None, 1, "{}", "missing required field `reason`"),
        ("server_stopping", None, 1, '{"reason":1}', "Expected `str`, got `int`"),
        ("server_stopping", None, 1, '{"reason":"signal","note":1}', "unknown field `note`"),
        ("server_stopping", None, 1, '{"reason":', "truncated"),
        ("server_stopping", None, 1, "[]", "Expected `object`"),
    ],
)
def test_anything_else_is_refused(
    kind: str, name: str | None, version: int, body: str, message: str
) -> None:
    with pytest.raises(UnreadableEvent, match=message):
        decode_event(kind, name, version, body)


def test_an_event_without_fields_of_its_own() -> None:
    assert encode_event(ClientGone(request_id="r")).body == "{}"
    assert decode_event("client_gone", "r", 1, "{}") == ClientGone(request_id="r")
    stopping = ServerStopping(reason="signal")
    assert decode_event(*encode_event(stopping)) == stopping
