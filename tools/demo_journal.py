"""What the demo reads from the server's journal, while the server writes it and when it is dead."""

from pathlib import Path

from journal import tables
from journal.queries import select_rows
from journal.reader import JournalReader
from journal.rows import RequestRow, RunRow
from tools.demo_checks import Output


class DemoJournal:
    """Opened for each question, so that nothing holds the journal between two of them."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def row(self, request_id: str) -> RequestRow:
        """What the journal says of this request."""
        with JournalReader.open(self.state) as reader:
            row = reader.request(request_id)
        assert row is not None, f"{request_id} was answered, and the journal does not know it"
        return row

    def output(self, request_id: str) -> Output:
        """Its output tokens so far, with the likeliest tokens at each."""
        with JournalReader.open(self.state) as reader:
            token_ids, logprobs = reader.output_tokens(request_id)
        pairs = zip(token_ids, logprobs, strict=True) if logprobs else ()
        top = [{token: value, **dict(likeliest)} for token, (value, likeliest) in pairs]
        return Output(tuple(token_ids), top)

    def runs(self) -> list[RunRow]:
        """The lives of the server, the newest last."""
        with JournalReader.open(self.state) as reader, reader.transaction() as run:
            return select_rows(run, tables.run, RunRow, "ORDER BY run_id")
