"""What a reader shows is a function of tokens and position alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from api.rendering import Progress, ShownToken
from scheduler.engine.base import TokenLogprobs
from scheduler.engine.fake_tokenizer import FakeTokenizer
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.streams import RequestStream, StreamEnd

END_OF_TURN = FakeTokenizer.end_of_turn_ids[0]


def stream_of(
    tokens: list[int], stop: tuple[str, ...] = (), reason: str = "length"
) -> RequestStream:
    """An ended stream with these output tokens, and log-probabilities."""
    sampling = SamplingParameters(seed=1, stop=stop, logprobs=True)
    parameters = RequestParameters(
        route="/v1/completions", model="fake", created=1, stream=True, sampling=sampling
    )
    stream = RequestStream("req_1", parameters, 1)
    stream.tokens = tokens
    stream.logprobs = [TokenLogprobs(-float(i), ((65, -1.0),)) for i in range(len(tokens))]
    stream.end = StreamEnd("finished", reason, "", 1, len(tokens))
    return stream


def read(
    stream: RequestStream, after: int, limits: list[int]
) -> tuple[str, list[ShownToken], list[int]]:
    """All that a reader shows that takes so many tokens at a time, and the ids of its pieces."""
    progress = Progress(stream, FakeTokenizer(), after)
    text, tokens, positions = "", list[ShownToken](), list[int]()
    turn = 0
    while True:
        piece = progress.take(limits[turn % len(limits)])
        turn += 1
        if piece is not None:
            text += piece.text
            tokens += piece.tokens or []
            positions.append(piece.position)
        if not progress.behind:
            return text, tokens, positions


TOKENS = st.text("ab\u00e9\U0001f600", max_size=20).map(lambda text: list(text.encode()))
LIMITS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=40)
@given(TOKENS, st.sampled_from([(), ("aba",), ("ab\u00e9", "bb")]), LIMITS, st.data())
def test_readers_agree_however_they_read(
    tokens: list[int], stop: tuple[str, ...], limits: list[int], data: st.DataObject
) -> None:
    cut = 1
    while cut <= len(tokens) and not any(
        s in bytes(tokens[:cut]).decode(errors="ignore") for s in stop
    ):
        cut += 1
    stream = stream_of(tokens[:cut], stop)
    whole, all_tokens, _ = read(stream, 0, [1])
    after = data.draw(st.integers(0, len(stream.tokens)))
    rest, rest_tokens, positions = read(stream, after, limits)
    before = Progress(stream, FakeTokenizer())
    seen = ""
    for _ in range(after):
        piece = before.take(1)
        seen += piece.text if piece is not None else ""
    assert seen + rest == whole
    assert rest_tokens == all_tokens[after:]
    assert positions == sorted(set(positions))
    assert all(position > after for position in positions)


def test_token_that_ends_the_turn_is_not_shown() -> None:
    text, tokens, positions = read(stream_of([*b"ab", END_OF_TURN], reason="end_of_turn"), 0, [9])
    assert text == "ab"
    assert [token.text for token in tokens] == ["a", "b"]
    assert positions == [3]


def test_what_is_held_back_is_released_at_the_end_only() -> None:
    stream = stream_of([*b"xab"], stop=("abc",))
    end, stream.end = stream.end, None
    progress = Progress(stream, FakeTokenizer())
    first = progress.take(9)
    assert first is not None
    assert first.text == "x"
    assert progress.take(9) is None
    stream.tokens.append(ord("d"))
    assert stream.logprobs is not None
    stream.logprobs.append(TokenLogprobs(float("-inf"), ()))
    stream.end = end
    last = progress.take(9)
    assert last is not None
    assert (last.position, last.text) == (4, "abd")
    assert last.tokens is not None
    assert last.tokens[-1].logprob == -9999.0
    assert [token.offset for token in last.tokens] == [3]
