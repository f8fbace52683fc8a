"""Bodies: read up to the limit, and decoded into a route's class, or refused by the field's name.

Fields that a class does not have are skipped without being built, so a large body of nonsense costs
a scan and no memory.
"""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import TypeVar, cast

import msgspec
from fastapi import Request

from api.errors import ApiError, ClientLeft, from_validation, invalid
from api.settings import BODY_WAIT_S, MAX_EXPLAINED_BYTES

OUT_OF_RANGE = "Number out of range"

T = TypeVar("T", bound=msgspec.Struct)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body of a POST.

    Raises ApiError for one over the limit (by its announced length, before a byte of it is kept)
    and for one that does not come, and ClientLeft when the connection ends within it.
    """
    announced = request.headers.get("content-length", "0")
    if not announced.isascii() or not announced.isdecimal():
        raise invalid("Content-Length", "this header is no whole number")
    if int(announced) > limit_bytes:
        raise too_large(limit_bytes)
    try:
        async with asyncio.timeout(BODY_WAIT_S):
            return await collect(request, limit_bytes)
    except TimeoutError as error:
        raise ApiError(
            408, "The body did not come in time.", code="body_timeout", param="body"
        ) from error


async def collect(request: Request, limit_bytes: int) -> bytes:
    """The parts of the body, put together."""
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise too_large(limit_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def too_large(limit_bytes: int) -> ApiError:
    """The 413, with the limit."""
    return ApiError(
        413,
        f"The body is larger than this server's limit of {limit_bytes} bytes "
        "(server.body_limit_bytes).",
        code="body_too_large",
        param="body",
    )


def decode_body(body: bytes, kind: type[T]) -> tuple[T, list[str]]:
    """The body as this class, and the names of the fields that the class does not have.

    Raises ApiError with the path of the first field that is wrong.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        value = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        number = why_no_number(body) if OUT_OF_RANGE in str(error) else None
        raise number or from_validation(error) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise why_malformed(body, str(error)) from error
    known = set(kind.__struct_fields__)
    return value, [name for name in fields if name not in known]


def why_malformed(body: bytes, reason: str) -> ApiError:
    """The 400 for a body that is no JSON, with the field in which a client's text broke it."""
    path = path_of_bad_text(body)
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return invalid(path, f"invalid UTF-8 at byte {error.start} of the body", "invalid_utf8")
    if path is not None:
        return invalid(path, "this text holds half of a surrogate pair", "invalid_utf8")
    message = f"The body is no valid JSON: {reason[0].lower()}{reason[1:]}"
    return why_no_number(body) or invalid(None, message, "malformed_json")


def why_no_number(body: bytes) -> ApiError | None:
    """The 400 for a number that JSON does not have (NaN, Infinity) or that is out of range; null
    when that is not what is wrong.
    """
    for path, leaf in leaves(lenient(body)):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return invalid(path, "this is no finite number")
    return None


def path_of_bad_text(body: bytes) -> str | None:
    """The first field whose text holds half a character: a byte that is no UTF-8, or a lone
    surrogate.
    """
    for path, leaf in leaves(lenient(body)):
        if isinstance(leaf, str) and any("\ud800" <= letter <= "\udfff" for letter in leaf):
            return path
    return None


def lenient(body: bytes) -> object:
    """The JSON as Python reads it, which takes more than the standard; null when it can't, and
    for a body so large that a better message is not worth the time.
    """
    if len(body) > MAX_EXPLAINED_BYTES:
        return None
    try:
        return json.loads(body.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None


def leaves(root: object) -> Iterator[tuple[str, object]]:
    """Each value that is no container, with its path, in the order of the text."""
    stack: list[tuple[str, object]] = [("", root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            fields = cast("dict[str, object]", value)
            prefix = f"{path}." if path else ""
            stack += [(prefix + name, inner) for name, inner in reversed(fields.items())]
        elif isinstance(value, list):
            items = cast("list[object]", value)
            stack += [(f"{path}[{i}]", items[i]) for i in reversed(range(len(items)))]
        else:
            yield path, value
