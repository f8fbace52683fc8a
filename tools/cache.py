"""`fermata cache info` and `fermata cache clear`: a running server's saved KV."""

import json
import sys
from pathlib import Path

from tools.client import Client, ClientError, client_for

DONE, UNUSABLE = 0, 2

Body = dict[str, object]


def info(state: Path, url: str | None, api_key: str | None, *, as_json: bool) -> int:
    """Prints what is saved. Returns 0, or 2 when no server answers."""
    try:
        answer = client_for(state, url, api_key).get("/v1/cache", "cache")
    except ClientError as error:
        return refused("info", error)
    if as_json:
        print(json.dumps(answer))
        return DONE
    for name, value in lines_of(answer).items():
        print(f"{name:<10} {value}")
    return DONE


def clear(state: Path, url: str | None, api_key: str | None, *, as_json: bool) -> int:
    """Clears the cache and prints what has gone. Returns 0, or 2 when no server answers: the files
    belong to the server, and what removes them is a decision in its journal.
    """
    try:
        client: Client = client_for(state, url, api_key)
        answer = client.post("/v1/cache/clear", "cache.clear")
    except ClientError as error:
        return refused("clear", error)
    if as_json:
        print(json.dumps(answer))
        return DONE
    gone, left = answer["num_cleared_blocks"], answer["num_blocks"]
    size = megabytes(answer["cleared_bytes"])
    print(f"{gone} blocks have gone ({size}), {left} are left", end="")
    print("" if answer["done"] else "; more are going")
    return DONE


def refused(command: str, error: ClientError) -> int:
    """Says why there is no answer."""
    print(f"fermata cache {command}: {error}", file=sys.stderr)
    return UNUSABLE


def lines_of(answer: Body) -> dict[str, str]:
    """The cache in a few lines."""
    if not answer["enabled"]:
        return {"saving": "off (kv.enabled = false)"}
    since = answer["since_start"]
    assert isinstance(since, dict)
    rate = since["hit_rate"]
    stopped = answer["stopped"]
    return {
        "saving": f"stopped: {stopped}" if stopped else "on",
        "blocks": f"{answer['num_blocks']} of {answer['block_tokens']} tokens"
        f" ({answer['num_used_blocks']} in use, {answer['num_other_blocks']} of other models)",
        "on disk": f"{megabytes(answer['disk_bytes'])} of {megabytes(answer['max_bytes'])},"
        f" {megabytes(answer['free_bytes'])} free",
        "in memory": f"{megabytes(answer['memory_bytes'])}"
        f" of {megabytes(answer['max_memory_bytes'])}",
        "writing": megabytes(answer["writing_bytes"]),
        "hits": "nothing was asked yet" if rate is None else f"{rate:.1%} of prompt tokens",
        "tokens": f"{since['num_memory_tokens']} from memory, {since['num_disk_tokens']} from disk,"
        f" {since['num_prefilled_tokens']} prefilled",
        "domain": str(answer["domain"] or "-"),
    }


def megabytes(num_bytes: object) -> str:
    """A size as people read it; a dash for one that is not known."""
    return "-" if num_bytes is None else f"{int(str(num_bytes)) / 1e6:.1f} MB"
