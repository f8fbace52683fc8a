"""Messages in all their forms, and the one form that a template gets."""

from typing import Any

import msgspec
import pytest

from api.errors import ApiError
from api.messages import Message, canonical_messages, function_tools

USER: dict[str, Any] = {"role": "user", "content": "go on"}


def canonical(*messages: dict[str, Any]) -> list[dict[str, object]]:
    """What the template gets for these."""
    return canonical_messages(msgspec.convert(list(messages), list[Message]))


def call(arguments: object) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    function = {"name": "read", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "call_1", "function": function}]}


def test_all_forms_of_a_message_are_one() -> None:
    block = {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}}
    forms = [
        USER,
        {"role": "user", "content": [block]},
        {"role": "user", "content": [{"type": "input_text", "text": "go on"}], "id": "item_7"},
        {"role": "user", "content": [block, {"type": "text", "text": ""}], "name": None},
    ]
    assert [canonical(form) for form in forms] == [[USER]] * len(forms)


def test_blocks_become_lines() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert canonical({"role": "user", "content": blocks})[0]["content"] == "a\nb"


def test_system_and_developer_messages_make_the_head_wherever_they_stand() -> None:
    messages = canonical(
        {"role": "developer", "content": "first"},
        USER,
        {"role": "system", "content": [{"type": "text", "text": "second"}]},
        {"role": "system", "content": ""},
    )
    assert messages == [{"role": "system", "content": "first\n\nsecond"}, USER]


def test_arguments_of_a_call_become_an_object() -> None:
    message = canonical(USER, call('{"path": "a"}'))[1]
    function = {"name": "read", "arguments": {"path": "a"}}
    assert message["tool_calls"] == [{"type": "function", "function": function, "id": "call_1"}]


@pytest.mark.parametrize("arguments", ["{", "[1]", '"a"', "[" * 100_000])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str) -> None:
    calls: Any = canonical(USER, call(arguments))[1]["tool_calls"]
    assert calls[0]["function"]["arguments"] == arguments


def test_results_of_tools_keep_their_call_and_may_be_empty() -> None:
    result = {"role": "tool", "content": "", "tool_call_id": "call_1"}
    assert canonical(USER, result)[1] == result


def test_tools_of_other_types_are_skipped() -> None:
    function = {"name": "read", "parameters": {"type": "object"}}
    tools = [
        {"type": "web_search"},
        {"type": "function", "function": function, "cache_control": {}},
        {"type": "namespace", "tools": []},
    ]
    assert function_tools(tools) == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (7, "tools[0]"),
        ({"type": "function", "function": "read"}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({"function": {"name": ""}}, "tools[0].function.name"),
    ],
)
def test_broken_tool_is_named(tool: object, param: str) -> None:
    with pytest.raises(ApiError) as raised:
        function_tools([tool])
    assert raised.value.param == param
