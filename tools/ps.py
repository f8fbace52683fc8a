"""`fermata ps`: the requests of a running server, as a table."""

import json
import sys
from pathlib import Path

from tools.client import ClientError, client_for
from tools.text_table import text_table

COLUMNS = ("request", "state", "prompt", "cached", "output", "of", "age", "note")
RIGHT = frozenset(("prompt", "cached", "output", "of", "age"))


def run(state: Path, url: str | None, api_key: str | None, *, as_json: bool) -> int:
    """Prints the open requests and returns the exit status: 0, or 2 when no server answers."""
    try:
        answer = client_for(state, url, api_key).get("/v1/requests", "list")
    except ClientError as error:
        print(f"fermata ps: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(answer))
        return 0
    entries = answer.get("data")
    rows = [row_of(entry) for entry in entries] if isinstance(entries, list) else []
    print("\n".join(text_table(COLUMNS, rows, RIGHT)))
    return 0


def row_of(entry: dict[str, object]) -> tuple[str, ...]:
    """One request as texts, in the order of COLUMNS."""
    note = entry.get("held_reason") or ("solo" if entry.get("solo") else "")
    return (
        str(entry["id"]),
        str(entry["state"]),
        str(entry["num_prompt_tokens"]),
        str(entry["num_cached_tokens"]),
        str(entry["num_output_tokens"]),
        str(entry["max_tokens"]),
        age(entry["age_ms"]),
        str(note),
    )


def age(milliseconds: object) -> str:
    """An age as people say it."""
    seconds = int(str(milliseconds)) // 1000
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
