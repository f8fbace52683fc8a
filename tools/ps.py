"""`fermata ps`: the requests of a running server, as a table."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.client import ClientError, client_for

COLUMNS = ("request", "state", "prompt", "cached", "output", "of", "age", "note")
RIGHT = frozenset(("prompt", "cached", "output", "of", "age"))


def run(state: Path, url: str | None, api_key: str | None, *, as_json: bool) -> int:
    """Prints the open requests and returns the exit status: 0, or 2 when no server answers."""
    try:
        answer = client_for(state, url, api_key).get("/v1/requests")
    except ClientError as error:
        print(f"fermata ps: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(answer))
        return 0
    entries = answer.get("data")
    print(
        "\n".join(table([row_of(entry) for entry in entries] if isinstance(entries, list) else []))
    )
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


def table(rows: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS) -> list[str]:
    """Lines with columns as wide as what stands in them; numbers are flush right."""
    shown = [columns, *rows]
    widths = [max(len(row[index]) for row in shown) for index in range(len(columns))]
    return ["  ".join(cells(row, widths, columns)).rstrip() for row in shown]


def cells(row: Sequence[str], widths: Sequence[int], columns: Sequence[str]) -> list[str]:
    """The texts of one row, filled up to the widths of their columns."""
    return [
        text.rjust(width) if column in RIGHT else text.ljust(width)
        for text, width, column in zip(row, widths, columns, strict=True)
    ]
