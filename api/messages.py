"""Messages of a conversation: what is taken, and the one form that a chat template gets.

Agents send the same message in several forms (a string, or one text block with cache_control; with
and without item ids), and move them from turn to turn. The template sees one form only, so that a
conversation that grows stays the same prompt with something behind it.
"""

from collections.abc import Iterator
from typing import Annotated, cast

import msgspec

from api.errors import ApiError, invalid, quoted
from api.settings import MAX_MESSAGES

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA_PARTS = (
    "audio",
    "file",
    "image",
    "image_url",
    "input_audio",
    "input_file",
    "input_image",
    "video",
    "video_url",
)


class ContentPart(msgspec.Struct, kw_only=True):
    """One block of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """What an assistant called. `arguments` is JSON text in OpenAI's form."""

    name: str
    arguments: str | dict[str, object] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call in the history."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class Message(msgspec.Struct, kw_only=True):
    """One message as it came."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
CanonicalMessage = dict[str, object]


def canonical_messages(messages: list[Message]) -> list[CanonicalMessage]:
    """The messages in the form that the template gets. All system and developer messages, wherever
    they stand, make the head: many templates refuse a second one.

    Raises ApiError for a role, a block or a content that cannot be rendered.
    """
    head: list[str] = []
    rest: list[CanonicalMessage] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            known = ", ".join(ROLES)
            raise invalid(f"{where}.role", f"unknown role {quoted(message.role)}; known: {known}")
        text = text_of(message.content, f"{where}.content")
        if message.role in ("system", "developer"):
            head += [text] if text else []
        else:
            rest.append(canonical(message, text, where))
    if not rest:
        raise invalid("messages", "there is no message of a user, an assistant or a tool in it")
    return [{"role": "system", "content": "\n\n".join(head)}, *rest] if head else rest


def canonical(message: Message, text: str, where: str) -> CanonicalMessage:
    """One message that is no head, with the fields that templates read."""
    if message.role == "user" and not text:
        raise invalid(f"{where}.content", "the content of a user message is empty")
    result: CanonicalMessage = {"role": message.role, "content": text}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            result[name] = value
    if message.tool_calls:
        result["tool_calls"] = [canonical_call(call) for call in message.tool_calls]
    return result


def canonical_call(call: ToolCall) -> dict[str, object]:
    """A tool call with its arguments as an object, as templates want it; text that is no JSON
    object (a call that a model got wrong) stays as it is.
    """
    arguments: object = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError):
            arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function, **({"id": call.id} if call.id else {})}


def text_of(content: str | list[ContentPart] | None, where: str) -> str:
    """The text of a message's content: a string is the same as one text block."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part for part in texts_of(content, where) if part)


def texts_of(parts: list[ContentPart], where: str) -> Iterator[str]:
    """The text of each block. Raises ApiError for one that has none."""
    for index, part in enumerate(parts):
        if part.type in TEXT_PARTS and part.text is not None:
            yield part.text
        elif part.type == "refusal" and part.refusal is not None:
            yield part.refusal
        else:
            raise no_text(part, f"{where}[{index}]")


def no_text(part: ContentPart, where: str) -> ApiError:
    """The 400 for a block that a text model cannot read."""
    if part.type in MEDIA_PARTS:
        return invalid(
            where, f"this model reads text only, not {part.type}", "unsupported_content_type"
        )
    if part.type in (*TEXT_PARTS, "refusal"):
        return invalid(f"{where}.text", "this field is required", "missing_required_parameter")
    return invalid(f"{where}.type", f"unknown block type {quoted(part.type)}; known: text")


def function_tools(tools: list[object]) -> list[dict[str, object]]:
    """The tools that a template can render. Types other than functions are skipped: agents offer
    tools that only their vendor's own server has.

    Raises ApiError for a function without a name.
    """
    functions: list[dict[str, object]] = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise invalid(f"tools[{index}]", "a tool is an object")
        fields = cast("dict[str, object]", tool)
        if fields.get("type", "function") != "function":
            continue
        function = fields.get("function")
        if not isinstance(function, dict):
            raise invalid(f"tools[{index}].function", "this field is required, as an object")
        name = cast("dict[str, object]", function).get("name")
        if not isinstance(name, str) or not name:
            raise invalid(f"tools[{index}].function.name", "this field is required, as a string")
        functions.append({"type": "function", "function": cast("dict[str, object]", function)})
    return functions
