"""Feeds tokens to the model: chunks of one row's known tokens, and decode steps of several rows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from scheduler.engine import attention
from scheduler.engine.rows import Row
from scheduler.engine.sampling import Draws, draw

ROW_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What mlx and model code raise when a row's work goes wrong: the row fails, the engine goes on.
An AssertionError is not among them: it is a defect of the engine and ends its thread.
"""

REBUILD_TOKENS = 512
"""How many tokens at once a row is fed whose caches were lost to another row's failure."""


@dataclass(eq=False)
class Step:
    """A launched decode step: for each group of rows the draws, lazy until `wait`.

    `error` is what broke the launch off; `wait` raises it.
    """

    batch: int
    rows: list[Row]
    launched_ns: int
    groups: list[Draws] = field(default_factory=list[Draws])
    error: Exception | None = None

    def wait(self) -> None:
        """Until the step is computed. Raises one of ROW_ERRORS when it could not be."""
        if self.error is not None:
            raise self.error
        mx.eval([array for draws in self.groups for array in draws.arrays()])


class Decoder:
    """The model, and the view through which rows are decoded together.

    With `one_row_only` the rows of a step are computed one after the other: what a model gets
    that fails the seam's self-test.
    """

    def __init__(self, model: Any, one_row_only: bool) -> None:
        self._model = model
        self._one_row_only = one_row_only
        self._view: attention.RaggedBatch | None = None
        self._view_rows: list[Row] = []
        self._last: tuple[list[Row], Draws] | None = None
        self.num_fed_tokens = 0

    def make_caches(self) -> attention.Caches:
        """Empty caches for one row."""
        return make_prompt_cache(self._model)

    def feed(self, row: Row, start: int, length: int) -> None:
        """Feeds the row its tokens `start` to `start + length` and evaluates its caches."""
        assert row.cached == start, f"row {row.number} holds {row.cached} tokens, not {start}"
        assert start + length < len(row.tokens), f"the last token of row {row.number} is pending"
        self._model(mx.array(row.tokens[start : start + length])[None], cache=row.caches)
        mx.eval([cache.state for cache in row.caches])
        row.cached += length
        self.num_fed_tokens += length

    def launch(self, batch: int, rows: Sequence[Row]) -> Step:
        """Starts one decode step of these rows and returns at once. What goes wrong while the
        step is put together is kept in it.
        """
        step = Step(batch, list(rows), time.monotonic_ns())
        alone = self._one_row_only or len(rows) == 1
        try:
            for group in [[row] for row in rows] if alone else [step.rows]:
                step.groups.append(self._forward(group))
        except ROW_ERRORS as error:
            step.error = error
        return step

    def dissolve(self) -> None:
        """Gives the rows that are decoded together their own state back."""
        mx.eval(self._leave_view())

    def take_out(self, row: Row) -> None:
        """Gives the row its own state back, evaluated, if it was decoded with others last."""
        if row in self._view_rows:
            self.dissolve()

    def forget(self, row: Row) -> None:
        """Lets go of all arrays of the row. No step with it may still be computing."""
        self.take_out(row)
        row.release()

    def restore(self, row: Row) -> None:
        """Brings a row whose step broke off back to the boundary before it: all known tokens but
        the last are cached. Where the caches cannot be cut, they are made again.
        """
        self._view, self._view_rows, self._last = None, [], None
        boundary = len(row.tokens) - 1
        row.settle()
        if attention.can_cut(row.caches):
            attention.cut(row.caches, boundary)
            row.cached = boundary
        else:
            self._rebuild(row, boundary)

    def _rebuild(self, row: Row, boundary: int) -> None:
        row.caches, row.cached = self.make_caches(), 0
        while row.cached < boundary:
            self.feed(row, row.cached, min(REBUILD_TOKENS, boundary - row.cached))

    def _forward(self, rows: list[Row]) -> Draws:
        inputs = self._inputs(rows)
        logits = self._model(inputs[:, None], cache=self._layers(rows))[:, -1, :]
        draws = draw(logits, [row.sampler for row in rows])
        for index, row in enumerate(rows):
            row.pending = draws.tokens[index : index + 1]
            row.cached += 1
        mx.async_eval(draws.arrays())
        self._last = (rows, draws)
        return draws

    def _inputs(self, rows: list[Row]) -> mx.array:
        """The rows' pending tokens, shape (rows,); in one array after a step of the same rows."""
        if self._last is not None and self._last[0] == rows:
            return self._last[1].tokens
        return mx.concatenate([row.pending_array() for row in rows])

    def _layers(self, rows: list[Row]) -> list[Any]:
        if self._view_rows != rows:
            mx.async_eval(self._leave_view())
            if len(rows) > 1:
                self._view = attention.RaggedBatch([row.caches for row in rows])
                self._view_rows = rows
        return rows[0].caches if self._view is None else self._view.layers

    def _leave_view(self) -> list[mx.array]:
        """Puts an end to the view; returns the arrays that the rows got back, still lazy."""
        given_back = [] if self._view is None else self._view.dissolve()
        self._view, self._view_rows = None, []
        return given_back
