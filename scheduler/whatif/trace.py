"""Requests from a trace: JSON lines as they are published of real services. Each has `timestamp`
(milliseconds), `input_length` and `output_length` (tokens) and `hash_ids`, one for each 512 tokens
of the prompt that begins; equal ids are equal prefixes. Other fields are left alone.

A trace says nothing of what a server runs on: that is a known model on a known machine, or what
the journal of a server tells.
"""

from array import array
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from journal.events import ModelFacts
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.simulation.hardware import Hardware
from scheduler.simulation.models import EIGHT_BIT_BYTES, FOUR_BIT_BYTES, workstation
from scheduler.streams import Arrival
from scheduler.whatif.recorded import FAKE, drawn
from scheduler.whatif.rerun import Coming

BLOCK_TOKENS = 512
NS_PER_MS = 1_000_000
ID_PREFIX = "req_"

MAX_TIMESTAMP_MS = 10**13
"""In the year 2286, when it counts from 1970."""

MAX_SPAN_MS = 366 * 86_400_000
"""A request that comes so long after the first one has its time in another unit."""

MAX_LINE_BYTES = 4_000_000
"""A line with more is none of a request."""

MODELS = {"hybrid-27b": FOUR_BIT_BYTES, "hybrid-27b-8bit": EIGHT_BIT_BYTES}
"""The bytes of their weights, on a workstation; see scheduler/simulation/models.py."""


class BadTrace(Exception):
    """The trace cannot be used. One line, with the number of the line at fault."""


class Row(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def why_wrong(self) -> str | None:
        """What cannot be, if there is something."""
        if not 0 <= self.timestamp <= MAX_TIMESTAMP_MS:
            return f"timestamp is negative, or more than {MAX_TIMESTAMP_MS} ms"
        if self.input_length < 1 or self.output_length < 0:
            return "input_length is less than 1, or output_length negative"
        num_blocks = -(-self.input_length // BLOCK_TOKENS)
        if len(self.hash_ids) != num_blocks:
            return (
                f"{len(self.hash_ids)} hash_ids; {self.input_length} tokens begin"
                f" {num_blocks} blocks of {BLOCK_TOKENS}"
            )
        return None


def hardware_named(name: str) -> Hardware:
    """A known model on a workstation. Raises BadTrace for an unknown name."""
    if name not in MODELS:
        raise BadTrace(f"--model {name}: known are {', '.join(MODELS)}")
    return workstation(MODELS[name])


def rows_of(file: Path, limit: int | None = None) -> Iterator[tuple[int, Row]]:
    """The first so many rows with the numbers of their lines, read as they are wanted. Raises
    BadTrace for a file that cannot be read and for a line that is no request.
    """
    try:
        with file.open("rb") as lines:
            bounded = iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b"")
            filled = ((n, line) for n, line in enumerate(bounded, 1) if line.strip())
            for number, line in islice(filled, limit):
                yield number, row_of(f"{file}: line {number}", line)
    except OSError as error:
        raise BadTrace(f"{file}: cannot be read ({error.strerror})") from error


def row_of(place: str, line: bytes) -> Row:
    """One row."""
    if len(line) > MAX_LINE_BYTES:
        raise BadTrace(f"{place}: longer than {MAX_LINE_BYTES} bytes")
    try:
        row = msgspec.json.decode(line, type=Row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadTrace(f"{place}: {error}") from error
    wrong = row.why_wrong()
    if wrong is not None:
        raise BadTrace(f"{place}: {wrong}")
    return row


def check_trace(file: Path, limit: int | None, model: ModelFacts) -> int:
    """How many requests there are. Raises BadTrace for none, for a line that is no request, for one
    that comes before the line above it or much too late, and for one that the model's context does
    not hold.
    """
    num_rows, before, first = 0, 0.0, None
    for number, row in rows_of(file, limit):
        place = f"{file}: line {number}"
        num_tokens = row.input_length + max(1, row.output_length)
        if num_tokens > model.context_tokens:
            most = model.context_tokens
            raise BadTrace(f"{place}: {num_tokens} tokens; {model.name} has room for {most}")
        if row.timestamp < before:
            raise BadTrace(f"{place}: its timestamp is before that of the line above; sort them")
        first = row.timestamp if first is None else first
        if row.timestamp - first > MAX_SPAN_MS:
            raise BadTrace(f"{place}: more than {MAX_SPAN_MS} ms after the first: is it in ms?")
        num_rows, before = num_rows + 1, row.timestamp
    if not num_rows:
        raise BadTrace(f"{file}: there is no request in it")
    return num_rows


def coming_of_trace(file: Path, limit: int | None = None) -> Iterator[Coming]:
    """The requests of a trace that was checked, the first of them at once."""
    began_ms: float | None = None
    for number, row in rows_of(file, limit):
        began_ms = row.timestamp if began_ms is None else began_ms
        at_ns = round((row.timestamp - began_ms) * NS_PER_MS)
        yield Coming(at_ns, partial(arrival_of_row, number, row), max(1, row.output_length))


def arrival_of_row(number: int, row: Row) -> Arrival:
    """The request of one line."""
    sampling = SamplingParameters(seed=number, ignore_end_of_turn=True)
    parameters = RequestParameters(
        route="completions", model=FAKE, created=1, stream=True, sampling=sampling
    )
    name = f"{ID_PREFIX}{number:026}"
    max_tokens = max(1, row.output_length)
    return Arrival(name, None, "completions", True, prompt_of_row(row), max_tokens, parameters)


def line_of(request_id: str) -> int:
    """The line that a request comes from."""
    return int(request_id.removeprefix(ID_PREFIX))


def prompt_of_row(row: Row) -> "array[int]":
    """Tokens that are equal where ids are."""
    tokens = array("I")
    for name in row.hash_ids:
        tokens.extend(drawn(str(name), BLOCK_TOKENS))
    del tokens[row.input_length :]
    return tokens
