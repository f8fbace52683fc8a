"""The output tokens of open requests: one row per decode step first, then gathered by request.

What is not gathered yet is also kept in memory, by request: gathering reads nothing back, and the
output of a request is at hand when it is asked for.
"""

from journal.crashpoints import reach
from journal.database import Run
from journal.events import TokensDecoded
from journal.queries import Output, gathered_output, step_tokens
from journal.rows import RequestRow
from journal.statements import INSERT_STEP_TOKENS, INSERT_TOKEN_IDS
from journal.tokens import ID_BYTES, StepTokens, pack_rows


class Ungathered(Output):
    """The tokens of one open request that are in step rows only. `first_index` tokens are
    gathered before them.
    """

    def __init__(self, request_id: str, first_index: int = 0) -> None:
        super().__init__()
        self.request_id = request_id
        self.first_index = first_index

    def columns(self) -> tuple[object, ...]:
        """The row of `token_ids` that gathers them."""
        logprobs = None if self.logprobs is None else bytes(self.logprobs)
        ids = bytes(self.ids)
        return (self.request_id, "output", self.first_index, ids, logprobs)

    def gathered(self) -> None:
        """Marks them as gathered."""
        self.first_index += self.num_tokens
        self.ids.clear()
        self.logprobs = None


class Outputs:
    """The writer's side of `step_tokens` and the outputs in `token_ids`."""

    def __init__(self, run: Run, gather_steps: int) -> None:
        self._run = run
        self._gather_steps = gather_steps
        self._ungathered: dict[int, Ungathered] = {}
        self._num_step_rows = 0

    def load(self, requests: dict[int, RequestRow]) -> None:
        """Starts from the file. `requests` are the open ones."""
        self._ungathered = {}
        self._num_step_rows = 0
        query = (
            "SELECT r.number, r.request_id, max(t.first_index + length(t.ids) / ?)"
            " FROM request r JOIN token_ids t USING (request_id)"
            " WHERE r.outcome IS NULL AND t.part = 'output' GROUP BY r.number"
        )
        for number, request_id, first_index in self._run(query, (ID_BYTES,)):
            self._ungathered[number] = Ungathered(request_id, first_index)
        for event, tokens in step_tokens(self._run):
            self._num_step_rows += 1
            self._add(event, tokens, requests)

    def write_step(
        self, seq: int, event: TokensDecoded, tokens: StepTokens, requests: dict[int, RequestRow]
    ) -> None:
        """Writes the row of one decode step, within the transaction of its event."""
        assert len(tokens.ids) == ID_BYTES * sum(event.counts), "tokens and counts differ"
        for number, count in zip(event.numbers, event.counts, strict=True):
            assert not count or number in requests, f"tokens for request {number}, which has ended"
        self._run(INSERT_STEP_TOKENS, (seq, tokens.ids, pack_rows(tokens.logprobs)))
        self._num_step_rows += 1
        self._add(event, tokens, requests)

    def _add(
        self, event: TokensDecoded, tokens: StepTokens, requests: dict[int, RequestRow]
    ) -> None:
        rows = tokens.rows(event.counts)
        for number, (ids, logprobs) in zip(event.numbers, rows, strict=True):
            row = requests.get(number) if ids else None
            if row is None:
                continue
            output = self._ungathered.get(number)
            if output is None:
                output = self._ungathered[number] = Ungathered(row.request_id)
            output.add(ids, logprobs)

    def end(self, number: int) -> None:
        """Gathers the whole output of a request that ended into one row."""
        last = self._ungathered.pop(number, None)
        if last is None:
            return
        if last.first_index:
            whole = Ungathered(last.request_id)
            stored = gathered_output(self._run, last.request_id)
            for part in (stored, last):
                logprobs = None if part.logprobs is None else bytes(part.logprobs)
                whole.add(bytes(part.ids), logprobs)
            delete = "DELETE FROM token_ids WHERE request_id = ? AND part = 'output'"
            self._run(delete, (last.request_id,))
            last = whole
        self._run(INSERT_TOKEN_IDS, last.columns())

    def gather_when_due(self) -> None:
        """Gathers when there are many step rows, or when no request needs them any more."""
        if self._num_step_rows >= self._gather_steps:
            self.gather()
        elif self._num_step_rows and not self._ungathered:
            self._remove_step_rows()

    def gather(self) -> None:
        """Gathers what is in step rows, by request, and removes them."""
        reach("journal.gather.before")
        outputs = [output for output in self._ungathered.values() if output.ids]
        if outputs:
            self._run(INSERT_TOKEN_IDS, [output.columns() for output in outputs])
        for output in outputs:
            output.gathered()
        reach("journal.gather.within")
        self._remove_step_rows()
        reach("journal.gather.after")

    def _remove_step_rows(self) -> None:
        if self._num_step_rows:
            self._run("DELETE FROM step_tokens")
            self._num_step_rows = 0

    def counts(self) -> dict[int, int]:
        """How many tokens each open request has, by its number; one without any may be missing."""
        outputs = self._ungathered.items()
        return {number: output.first_index + output.num_tokens for number, output in outputs}

    def read(self, request_id: str, number: int | None) -> Output:
        """The output of a request so far. `number` is that of an open request."""
        output = gathered_output(self._run, request_id)
        last = None if number is None else self._ungathered.get(number)
        if last is not None and last.ids:
            logprobs = None if last.logprobs is None else bytes(last.logprobs)
            output.add(bytes(last.ids), logprobs)
        return output
