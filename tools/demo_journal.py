"""What the demo reads from the server's journal, while the server writes it and when it is dead."""

from dataclasses import dataclass
from pathlib import Path

from journal import audit, events, tables
from journal.queries import select_rows
from journal.reader import JournalReader
from journal.rows import RequestRow, RunRow
from tools.demo_checks import Output


@dataclass(frozen=True, slots=True)
class Account:
    """What the journal says of a request at some moment. `num_restored_tokens` came from saved KV,
    the row's `num_fed_tokens` were computed.
    """

    row: RequestRow
    num_restored_tokens: int
    num_output_tokens: int


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

    def num_saved_blocks(self, request_id: str) -> int:
        """How many blocks from its beginning on are on disk, with all that was to be saved of
        each.
        """
        with JournalReader.open(self.state) as reader:
            saved = {
                (record.event.hash, record.event.part)
                for record in reader.read()
                if isinstance(record.event, events.BlockSaved)
            }
            found = [record.event for record in reader.events_of(request_id)]
        planned = [
            block
            for event in found
            if isinstance(event, events.BlockSavePlanned)
            for block in event.blocks
        ]
        missing = [block.index for block in planned if (block.hash, block.part) not in saved]
        return min(missing, default=1 + max((block.index for block in planned), default=-1))

    def account(self, request_id: str) -> Account:
        """The sums of a request, over all lives of the server."""
        with JournalReader.open(self.state) as reader:
            found = [record.event for record in reader.events_of(request_id)]
        restored = (e.num_tokens for e in found if isinstance(e, events.ChainRestored))
        num_output_tokens = len(self.output(request_id).token_ids)
        return Account(self.row(request_id), sum(restored), num_output_tokens)

    def num_tokens_at_start(self, request_id: str, after_seq: int) -> int:
        """The tokens that its row was filled with when it first got one after this event."""
        with JournalReader.open(self.state) as reader:
            found = [r.event for r in reader.events_of(request_id) if r.seq > after_seq]
        num_starts = num_tokens = 0
        for event in found:
            num_starts += isinstance(event, events.RequestAdmitted | events.ResumeStarted)
            if num_starts == 1 and isinstance(event, events.ChainRestored):
                num_tokens += event.num_tokens
        return num_tokens

    def model(self) -> events.ModelFacts:
        """The sizes of the served model, as its engine has measured them."""
        with JournalReader.open(self.state) as reader:
            found = [r.event for r in reader.read() if isinstance(r.event, events.EngineReady)]
        return found[-1].model

    def pauses(self) -> list[audit.Pause]:
        """`SELECT * FROM pauses`, in the order in which they began."""
        with JournalReader.open(self.state) as reader:
            return list(audit.pauses(reader))

    def runs(self) -> list[RunRow]:
        """The lives of the server, the newest last."""
        with JournalReader.open(self.state) as reader, reader.transaction() as run:
            return select_rows(run, tables.run, RunRow, "ORDER BY run_id")
