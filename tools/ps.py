"""`fermata ps`: the requests of a running server, as a table, and its memory."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, cast

from tools.client import ClientError, client_for
from tools.request_ids import shortest
from tools.text_table import text_table

COLUMNS = ("request", "state", "cached", "output", "memory", "held", "age", "waits for")
RIGHT = frozenset(("cached", "output", "memory", "held", "age"))


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
    found = answer.get("data")
    entries = cast("list[dict[str, Any]]", found) if isinstance(found, list) else []
    names = shortest(str(entry["id"]) for entry in entries)
    rows = [row_of(entry, names) for entry in entries]
    lines = [*text_table(COLUMNS, rows, RIGHT), *memory_lines(answer.get("memory"))]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(line[:width] for line in lines))
    return 0


def row_of(entry: dict[str, Any], names: dict[str, str]) -> tuple[str, ...]:
    """One request as texts, in the order of COLUMNS. `cached` of a held one is what disk has."""
    cached = entry["num_cached_tokens"] or entry["num_saved_tokens"]
    return (
        names[entry["id"]],
        entry["state"],
        f"{cached}/{entry['num_known_tokens']}",
        f"{entry['num_output_tokens']}/{entry['max_tokens']}",
        size(entry["row_bytes"]),
        age(entry["held_ms"]) if entry["num_pauses"] else "",
        age(entry["age_ms"]),
        waits_for(entry, names),
    )


def waits_for(entry: dict[str, Any], names: dict[str, str]) -> str:
    """Why it does not go on, with the other request if there is one, and for how long it has had no
    client.
    """
    texts = [wait_text(entry, names), orphan_text(entry)]
    return "; ".join(text for text in texts if text)


def wait_text(entry: dict[str, Any], names: dict[str, str]) -> str:
    """Why it does not go on; empty where that is the lack of a client alone."""
    wait = entry["wait"]
    if wait is not None and wait["reason"] == "client":
        return ""
    if wait is None:
        return "runs alone" if entry["solo"] else ""
    other = names.get(wait["request_id"])
    return wait["text"] if other is None else f"{wait['text']}: {other}"


def orphan_text(entry: dict[str, Any]) -> str:
    """For how long it has had no client, and why; empty when it has one."""
    if entry["orphaned_by"] is None:
        return ""
    why = "since the server's start" if entry["orphaned_by"] == "restart" else "it was lost"
    return f"no client for {age(entry['orphaned_ms'])}: {why}"


def memory_lines(memory: object) -> list[str]:
    """Memory in a line, where it has a ceiling."""
    if not isinstance(memory, dict):
        return []
    shown = cast("dict[str, Any]", memory)
    ceiling = shown["ceiling_bytes"]
    if ceiling is None:
        return []
    level = "" if shown["level"] == "normal" else f", over the {shown['level']} mark"
    return ["", f"memory: {size(shown['usage_bytes'])} of {size(ceiling)}{level}"]


def size(num_bytes: int) -> str:
    """A size as people say it: three digits at most before its unit."""
    for unit, unit_bytes in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f}{unit}"
    return f"{num_bytes}B" if num_bytes else ""


def age(milliseconds: int) -> str:
    """An age as people say it."""
    seconds = milliseconds // 1000
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
