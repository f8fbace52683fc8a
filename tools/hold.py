"""`fermata pause` and `fermata resume`: one request of a running server is held, or goes on."""

import json
import sys
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from tools.client import Client, ClientError, client_for
from tools.request_ids import UnknownRequest, is_whole, meant


def run(
    wish: Literal["pause", "resume"],
    given: str,
    state: Path,
    url: str | None,
    api_key: str | None,
    *,
    as_json: bool,
) -> int:
    """Prints how far the request has come and returns the exit status: 0, or 2 when no server
    answers, no request is meant, or it has ended.
    """
    try:
        client = client_for(state, url, api_key)
        request_id = whole_id(client, given)
        answer = client.post(f"/v1/requests/{quote(request_id, safe='')}/{wish}", "request")
    except (ClientError, UnknownRequest) as error:
        print(f"fermata {wish}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(answer) if as_json else line_of(answer))
    return 0


def whole_id(client: Client, given: str) -> str:
    """The id that is meant. Raises ClientError and UnknownRequest."""
    if is_whole(given):
        return given
    entries = client.get("/v1/requests", "list").get("data")
    ids = [str(entry["id"]) for entry in entries] if isinstance(entries, list) else []
    return meant(given, ids)


def line_of(answer: dict[str, object]) -> str:
    """The request's phase, and what it waits for."""
    wait = answer.get("wait")
    text = f": {wait['text']}" if isinstance(wait, dict) else ""
    return f"{answer['id']} is {answer['state']}{text}"
