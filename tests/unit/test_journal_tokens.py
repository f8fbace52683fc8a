"""The packed forms of token ids and log-probabilities."""

from hypothesis import given, settings
from hypothesis import strategies as st

from journal.tokens import (
    StepTokens,
    pack_ids,
    pack_logprobs,
    pack_rows,
    unpack_ids,
    unpack_logprobs,
    unpack_rows,
)

ids = st.integers(0, 2**32 - 1)
values = st.floats(width=32, allow_nan=False)
token = st.tuples(values, st.lists(st.tuples(ids, values), max_size=5).map(tuple))
packed_row = st.none() | st.binary(max_size=20)


def test_ids_are_32_bits_little_endian() -> None:
    assert pack_ids([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"


@settings(max_examples=30)
@given(st.lists(ids))
def test_ids_come_back(tokens: list[int]) -> None:
    assert unpack_ids(pack_ids(tokens)).tolist() == tokens


@settings(max_examples=30)
@given(st.lists(token, max_size=5))
def test_log_probabilities_come_back_as_float32(tokens: list[tuple[float, tuple]]) -> None:
    assert unpack_logprobs(pack_logprobs(tokens)) == tokens


@settings(max_examples=30)
@given(st.lists(packed_row, max_size=5).map(tuple))
def test_rows_come_back(rows: tuple[bytes | None, ...]) -> None:
    assert unpack_rows(pack_rows(rows)) == rows
    assert unpack_rows(pack_rows(None)) is None


def test_a_step_is_cut_by_its_counts() -> None:
    logprobs = [(-1.0, ((7, -1.0),))]
    step = StepTokens.of([([1, 2], None), ([], None), ([7], logprobs)])
    assert list(step.rows([2, 0, 1])) == [
        (pack_ids([1, 2]), None),
        (b"", None),
        (pack_ids([7]), pack_logprobs(logprobs)),
    ]


def test_a_step_without_log_probabilities_stores_none() -> None:
    assert StepTokens.of([([1], None), ([2], None)]).logprobs is None
