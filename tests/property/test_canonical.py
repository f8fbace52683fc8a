"""The same question in other bytes is the same; another question is another."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import canonical
from api.canonical import LEFT_OUT, canonical_body

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
MARK = {"type": "ephemeral", "ttl": "5m"}

CONTENTS = st.one_of(
    WORDS,
    st.lists(st.builds(lambda text: {"type": "text", "text": text}, WORDS), min_size=1, max_size=3),
)
CALLS = st.builds(
    lambda name, text: {
        "id": f"call_{name}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps({"cache_control": text, "id": name})},
    },
    WORDS,
    WORDS,
)
MESSAGES = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant"]),
        CONTENTS,
    ),
    st.builds(
        lambda calls: {"role": "assistant", "tool_calls": calls}, st.lists(CALLS, min_size=1)
    ),
    st.builds(
        lambda content, name: {"role": "tool", "tool_call_id": name, "content": content},
        CONTENTS,
        WORDS,
    ),
)
TOOLS = st.builds(
    lambda name, inner: {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {inner: {"type": "string"}, "cache_control": {"enum": [name]}},
            },
        },
    },
    WORDS,
    WORDS,
)
BODIES = st.fixed_dictionaries(
    {"model": WORDS, "messages": st.lists(MESSAGES, min_size=1, max_size=4)},
    optional={
        "tools": st.lists(TOOLS, min_size=1, max_size=2),
        "temperature": st.floats(0, 2),
        "max_tokens": st.integers(1, 1000),
        "seed": st.integers(0, 2**53),
        "stop": st.lists(WORDS, min_size=1, max_size=2),
        "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.integers(-9, 9), min_size=1),
        "unknown": st.dictionaries(WORDS, st.integers(), max_size=2),
    },
)


def said_otherwise(value: Any, chance: random.Random) -> Any:
    """The same value: keys in another order, cache_control anywhere, a text alone as a block."""
    if isinstance(value, list):
        return [said_otherwise(inner, chance) for inner in value]
    if not isinstance(value, dict):
        return value
    fields = list(value.items())
    chance.shuffle(fields)
    changed: dict[str, Any] = {}
    for name, inner in fields:
        is_own = name in canonical.A_TOOLS_OWN
        changed[name] = shuffled(inner, chance) if is_own else said_otherwise(inner, chance)
        if name == "content" and isinstance(inner, str) and chance.random() < 0.5:
            changed[name] = [{"text": inner, "type": "text"} | marks(chance)]
    return changed | ({} if "properties" in value else marks(chance))


def shuffled(value: Any, chance: random.Random) -> Any:
    """The same value with its keys in another order, at any depth."""
    if not isinstance(value, dict):
        return value
    fields = list(value.items())
    chance.shuffle(fields)
    return {name: shuffled(inner, chance) for name, inner in fields}


def marks(chance: random.Random) -> dict[str, Any]:
    """A mark for a cache, or none."""
    return {"cache_control": MARK} if chance.random() < 0.3 else {}


def sent_again(body: dict[str, Any], chance: random.Random) -> bytes:
    """The question as an agent might send it again."""
    again = said_otherwise(body, chance)
    for message in again["messages"]:
        if chance.random() < 0.5:
            message["id"] = f"msg_{chance.random()}"
    for name in LEFT_OUT:
        if chance.random() < 0.5:
            again[name] = chance.choice([True, False, {"a": chance.random()}])
    return json.dumps(
        again, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1])
    ).encode()


@given(BODIES, st.randoms(use_true_random=False))
def test_a_question_that_is_sent_again_is_the_same(
    body: dict[str, Any], chance: random.Random
) -> None:
    expected = canonical_body(json.dumps(body).encode())
    assert expected.startswith(canonical.CANONICAL)
    assert canonical_body(sent_again(body, chance)) == expected


def changes(value: Any) -> Iterator[Any]:
    """The value with one thing changed in it, for each thing that there is."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name != "cache_control":
                yield {other: value[other] for other in value if other != name}
            for changed in changes(inner):
                yield value | {name: changed}
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield value[:i] + value[i + 1 :]
            for changed in changes(inner):
                yield [*value[:i], changed, *value[i + 1 :]]
        yield [*value, "one more"]
    elif isinstance(value, str):
        yield value + "x"
    else:
        yield value + 1


@given(BODIES)
def test_a_question_with_anything_changed_is_another(body: dict[str, Any]) -> None:
    expected = canonical_body(json.dumps(body).encode())
    for changed in changes(body):
        assert canonical_body(json.dumps(changed).encode()) != expected, changed


def form(**fields: Any) -> bytes:
    return canonical_body(json.dumps(fields).encode())


def test_only_one_block_of_text_is_a_string() -> None:
    one = form(messages=[{"role": "user", "content": "a"}])
    block = {"type": "text", "text": "a"}
    assert one == form(messages=[{"role": "user", "content": [block | {"id": "b1"}]}])
    assert one == form(messages=[{"role": "user", "content": [block | {"type": "input_text"}]}])
    for content in (
        [],
        [block, block],
        [block | {"detail": 1}],
        [{"type": "refusal", "refusal": "a"}],
        [{"type": "image", "text": "a"}],
    ):
        assert one != form(messages=[{"role": "user", "content": content}])


def test_items_have_no_ids_and_calls_do() -> None:
    assert form(input=[{"id": "1", "type": "message"}]) == form(input=[{"type": "message"}])
    assert form(input=[{"id": "1", "type": "item_reference"}]) != form(
        input=[{"id": "2", "type": "item_reference"}]
    )
    calls = [[{"role": "assistant", "tool_calls": [{"id": name}]}] for name in ("a", "b")]
    assert form(messages=calls[0]) != form(messages=calls[1])
    assert form(messages="a") != form(messages=["a"])


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1e999, "b": 1}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": [' + b"0," * canonical.MAX_CANONICAL_VALUES + b"0]}",
    ],
)
def test_what_is_not_built_is_known_by_its_bytes(body: bytes) -> None:
    assert canonical_body(body) == canonical.AS_IT_CAME + body
