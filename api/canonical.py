"""The one form of a body in which a request that is sent again is known.

After a cut an agent sends the same question, and not the same bytes: keys in another order, another
value of `stream`, a string where a list of one text block was, cache_control at another message,
items with other ids. The canonical form leaves all of that out, and nothing else.
"""

from typing import cast

import msgspec

from api.messages import TEXT_PARTS
from api.settings import MAX_CANONICAL_VALUES

LEFT_OUT = (
    "stream",
    "stream_options",
    "metadata",
    "client_metadata",
    "prompt_cache_key",
    "user",
    "cache_control",
)
"""Fields that say how the answer is sent, whose it is or what of it to keep, and not what is asked.
"""

ITEMS = ("messages", "input")
"""Fields whose items may carry ids that their client made up."""

A_TOOLS_OWN = ("arguments", "parameters", "input_schema", "schema")
"""What stands under these names was named by a tool's author, and is looked at by nobody here."""

AS_IT_CAME = b"bytes:"
CANONICAL = b"canonical:"


def canonical_body(body: bytes) -> bytes:
    """The canonical form of a body that was checked. Tokenizer's thread.

    One of more than MAX_CANONICAL_VALUES values, or with a value that only a scan can pass over (a
    number out of range in a field that nobody reads), is known by its bytes alone.
    """
    if most_values(body) > MAX_CANONICAL_VALUES:
        return AS_IT_CAME + body
    try:
        fields = msgspec.json.decode(body, type=dict[str, object])
        kept = {name: field_of(name, fields[name]) for name in fields if name not in LEFT_OUT}
        return CANONICAL + msgspec.json.encode(kept, order="sorted")
    except (msgspec.DecodeError, RecursionError):
        return AS_IT_CAME + body


def most_values(body: bytes) -> int:
    """How many values the JSON has at most: each follows one of these."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def field_of(name: str, value: object) -> object:
    """One field of the body."""
    if name in ITEMS and isinstance(value, list):
        return [item_of(item) for item in cast("list[object]", value)]
    return plain(value)


def item_of(item: object) -> object:
    """One message, without its id."""
    kept = plain(item)
    return without_id(cast("dict[str, object]", kept)) if isinstance(kept, dict) else kept


def plain(value: object) -> object:
    """The value without cache_control, and with each text that is alone as a string."""
    if isinstance(value, list):
        return [plain(inner) for inner in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, object]", value)
    kept = {
        name: fields[name] if name in A_TOOLS_OWN else plain(fields[name])
        for name in fields
        if name != "cache_control"
    }
    if "content" in kept:
        kept["content"] = content_of(kept["content"])
    return kept


def content_of(content: object) -> object:
    """A list of one text block is the same as its string; blocks of text have no ids."""
    if not isinstance(content, list):
        return content
    parts = [text_part(part) for part in cast("list[object]", content)]
    if len(parts) == 1 and isinstance(parts[0], dict):
        only = cast("dict[str, object]", parts[0])
        if only.keys() == {"type", "text"} and only["type"] in TEXT_PARTS:
            return only["text"]
    return parts


def text_part(part: object) -> object:
    """A block of text without its id; any other as it is: what it has an id for, nobody knows."""
    if not isinstance(part, dict):
        return part
    fields = cast("dict[str, object]", part)
    return without_id(fields) if fields.get("type") in TEXT_PARTS else fields


def without_id(fields: dict[str, object]) -> dict[str, object]:
    """Without the id. One that refers to another item by its id keeps it: it says nothing else."""
    if fields.get("type") == "item_reference":
        return fields
    return {name: fields[name] for name in fields if name != "id"}
