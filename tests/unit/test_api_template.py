"""What templates do is found out by rendering: the suffix that opens an answer, and whether the
thinking of earlier answers stays.
"""

from array import array
from collections.abc import Mapping, Sequence

import pytest
from jinja2 import Environment

from api.prompt import chat_prompt
from api.template import ThinkingHabit, count_suffix_tokens, suffix_of, thinking_habit
from scheduler.engine.fake_tokenizer import FIRST_SPECIAL, SPECIALS, FakeTokenizer

TURN = "<|im_start|>{{ m.role }}\n{{ TEXT }}<|im_end|>\n"
KEEPS = "{% for m in messages %}" + TURN.replace("TEXT", "m.content") + "{% endfor %}"
STRIPS = (
    "{% for m in messages %}"
    + TURN.replace("TEXT", "m.content.split('</think>')[-1].lstrip()")
    + "{% endfor %}"
)
# As Qwen3 has it: thinking stays behind the last message of a user.
STRIPS_BEFORE_USER = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if loop.index0 > ns.last %}"
    + TURN.replace("TEXT", "m.content")
    + "{% else %}"
    + TURN.replace("TEXT", "m.content.split('</think>')[-1].lstrip()")
    + "{% endif %}{% endfor %}"
)
OPENS = "<|im_start|>assistant\n"
THINKS = OPENS + "<think>\n"
DOES_NOT_THINK = OPENS + "<think>\n\n</think>\n\n"
TOOLS: list[dict[str, object]] = [{"type": "function", "function": {"name": "look"}}]


class TemplateTokenizer(FakeTokenizer):
    """The fake tokenizer with a template; `thinks`: it has a token that opens a thought."""

    def __init__(self, turns: str, opening: str, *, thinks: bool = False) -> None:
        self.template = Environment(autoescape=False).from_string(turns)
        self.opening = opening
        self.thinks = thinks

    def encode(self, text: str) -> list[int]:
        if self.thinks and text == "<think>":
            return [FIRST_SPECIAL + len(SPECIALS)]
        return super().encode(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **options: object,
    ) -> str:
        del tools, options  # the templates here read neither
        text = self.template.render(messages=list(messages))
        return text + self.opening if add_generation_prompt else text


class Refusing(FakeTokenizer):
    """A template that knows no tools."""

    def render_chat(self, *_: object, **__: object) -> str:
        raise ValueError("no such role")


def messages_of(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("turns", "habit"),
    [
        (KEEPS, ThinkingHabit(strips_before_user=False, strips_before_tool=False)),
        (STRIPS, ThinkingHabit(strips_before_user=True, strips_before_tool=True)),
        (STRIPS_BEFORE_USER, ThinkingHabit(strips_before_user=True, strips_before_tool=False)),
    ],
)
def test_a_template_shows_what_it_does_with_thinking(turns: str, habit: ThinkingHabit) -> None:
    assert thinking_habit(TemplateTokenizer(turns, OPENS)) == habit


def test_a_template_that_refuses_the_probe_strips_nothing() -> None:
    habit = ThinkingHabit(strips_before_user=False, strips_before_tool=False)
    assert thinking_habit(Refusing()) == habit


@pytest.mark.parametrize(
    ("turns", "opening", "thinks", "tools", "kept"),
    [
        (KEEPS, THINKS, True, [], True),
        (STRIPS, THINKS, False, [], False),
        (STRIPS, DOES_NOT_THINK, True, [], True),
        (STRIPS, OPENS, True, [], False),
        (STRIPS, OPENS, False, [], True),
        (STRIPS, THINKS, False, TOOLS, False),
        (STRIPS_BEFORE_USER, THINKS, False, TOOLS, True),
        (STRIPS_BEFORE_USER, THINKS, False, [], False),
    ],
)
def test_an_answer_is_kept_unless_its_thinking_will_be_stripped(
    turns: str, opening: str, thinks: bool, tools: list[dict[str, object]], kept: bool
) -> None:
    tokenizer = TemplateTokenizer(turns, opening, thinks=thinks)
    assert chat_prompt(tokenizer, messages_of("hello"), tools).keep_output is kept


@pytest.mark.parametrize("text", ["hello", "a long question. " * 100, "<|im_start|>" * 90])
@pytest.mark.parametrize("opening", [OPENS, THINKS, ""])
def test_the_suffix_is_counted_in_tokens(text: str, opening: str) -> None:
    tokenizer = TemplateTokenizer(KEEPS, opening)
    prompt = chat_prompt(tokenizer, messages_of(text), [])
    assert prompt.num_suffix_tokens == len(tokenizer.encode(opening))
    assert len(prompt.token_ids) > prompt.num_suffix_tokens


def test_the_suffix_begins_where_both_renderings_part() -> None:
    assert suffix_of("abc-open", "abc") == "-open"
    assert suffix_of("abc-open", "abc-closed") == "open"
    assert suffix_of("abc", "abc") == ""


def test_a_suffix_whose_tokens_are_not_at_the_end_is_not_counted() -> None:
    tokenizer = FakeTokenizer()
    assert count_suffix_tokens(tokenizer, "abcdef", "def", array("I", [*b"abcdef"])) == 3
    assert count_suffix_tokens(tokenizer, "abcdef", "def", array("I", [*b"abcdeX"])) == 0
