"""Text from tokens: what may be shown after each, and what ends it."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.engine.fake_tokenizer import FakeDetokenizer
from scheduler.engine.text import StopMatcher, TextStream

END = 300
STOPS = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=3)


def pieces(text: str, stop: tuple[str, ...] = (), *tail: int) -> list[str]:
    """What is shown after each token of the text's bytes, and at the end."""
    stream = TextStream(FakeDetokenizer(), stop, (END,))
    tokens = (*text.encode(), *tail)
    shown = [stream.add(token) for token in tokens if stream.ended is None]
    return [*shown, stream.finish() if stream.ended is None else ""]


def test_text_is_shown_as_it_comes() -> None:
    assert pieces("abc") == ["a", "b", "c", ""]


def test_beginning_of_a_stop_string_is_held_back() -> None:
    assert pieces("a END", ("ENDE",)) == ["a", " ", "", "", "", "END"]


def test_stop_string_and_what_follows_are_never_shown() -> None:
    assert pieces("one STOP two", ("STOP",)) == ["o", "n", "e", " ", "", "", "", "", ""]


def test_what_was_held_back_is_shown_when_it_turns_out_to_be_none() -> None:
    assert pieces("STAR", ("STOP",)) == ["", "", "STA", "R", ""]


def test_first_of_several_stop_strings_wins() -> None:
    matcher = StopMatcher(("abcdef", "cd"))
    assert matcher.feed("xabcd!") == "xab"
    assert matcher.matched


def test_longest_beginning_is_held_back() -> None:
    matcher = StopMatcher(("aab", "ba"))
    assert matcher.feed("xaa") == "x"
    assert matcher.feed("a") == "a"
    assert matcher.feed("b") == ""
    assert matcher.matched


def test_half_a_character_is_held_back() -> None:
    assert pieces("\u00e9") == ["", "\u00e9", ""]
    stream = TextStream(FakeDetokenizer())
    assert stream.add("\u00e9".encode()[0]) == ""
    assert stream.finish() == "\ufffd"


def test_end_token_ends_the_turn_unseen_and_releases_the_rest() -> None:
    stream = TextStream(FakeDetokenizer(), ("STOP",), (END,))
    assert [stream.add(token) for token in b"xST"] == ["x", "", ""]
    assert stream.add(END) == "ST"
    assert stream.ended == "end_of_turn"
    assert stream.finish() == ""


@given(st.text(alphabet="ab\u00e9", max_size=12), STOPS)
def test_shown_text_is_the_text_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    starts = [start for string in stop if (start := text.find(string)) >= 0]
    # A stop string is seen when its last byte comes: of two that overlap the one that ends first.
    ends = [start + len(string) for string in stop if (start := text.find(string)) >= 0]
    first_end = min(ends, default=len(text))
    cuts = [text.find(string) for string in stop if text.find(string) + len(string) == first_end]
    expected = text[: min(cut for cut in cuts if cut >= 0)] if starts else text
    assert "".join(pieces(text, tuple(stop))) == expected


@given(st.binary(max_size=20), STOPS)
def test_feeding_again_gives_the_same_pieces(raw: bytes, stop: list[str]) -> None:
    def feed() -> list[str]:
        stream = TextStream(FakeDetokenizer(), stop)
        return [stream.add(token) for token in raw if stream.ended is None]

    assert feed() == feed()


@given(st.text(alphabet="ab\u00e9", max_size=12), STOPS)
def test_text_that_was_shown_is_never_taken_back(text: str, stop: list[str]) -> None:
    whole = "".join(pieces(text, tuple(stop)))
    for length in range(len(text.encode())):
        stream = TextStream(FakeDetokenizer(), stop)
        shown = ""
        for token in text.encode()[:length]:
            if stream.ended is None:
                shown += stream.add(token)
        assert whole.startswith(shown)
