"""Whatever is committed, the file, its in-memory twin and a rebuild say the same."""

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from journal import tables
from journal.journal import Journal
from journal.memory import MemoryJournal
from journal.queries import find_request, select_rows
from journal.rows import AdoptionRow, OrphanRow, PauseRow, PinRow, SampleRow
from journal.tokens import Logprobs
from tests import journal_steps
from tests.client_steps import (
    OnRestart,
    adopts,
    arrival,
    attached,
    gone,
    orphan_limits,
    released,
    started,
)
from tests.journal_steps import KV_DOMAIN, SECOND_NS, request_id
from tests.pause_steps import HoldingSteps, sample

token_ids = st.integers(0, 2**32 - 1)


class Twins(RuleBasedStateMachine):
    """Does the same to both, and kills the file's process now and then."""

    folder: Path

    @initialize(gather_steps=st.integers(1, 6))
    def begin(self, gather_steps: int) -> None:
        self.gather_steps = gather_steps
        for file in self.folder.iterdir():
            file.unlink()
        self.file = HoldingSteps(self.open())
        self.memory = HoldingSteps(MemoryJournal())
        self.pausing: list[int] = []
        self.paused: list[int] = []
        self.num_requests = 2
        self.outputs: dict[int, list[int]] = {1: [], 2: []}
        self.both = (self.file, self.memory)
        self.lost: set[int] = set()
        self.joined: set[int] = set()
        for steps in self.both:
            steps.know(started())
            steps.ready(KV_DOMAIN)
            steps.receive(1)
            steps.receive(2)
            steps.join(1, 2)

    def open(self) -> Journal:
        return Journal.open(self.folder, gather_steps=self.gather_steps)

    @rule(prompt=st.lists(token_ids, min_size=1, max_size=4))
    def receive(self, prompt: list[int]) -> None:
        self.num_requests += 1
        for steps in self.both:
            steps.receive(self.num_requests, prompt)

    @precondition(lambda self: self.waiting())
    @rule()
    def join(self) -> None:
        number = self.waiting()[0]
        self.outputs[number] = []
        for steps in self.both:
            steps.join(number)

    @precondition(lambda self: self.file.batch)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        tokens = {number: data.draw(st.lists(token_ids, max_size=2)) for number in self.file.batch}
        logprobs: dict[int, list[Logprobs]] = {
            number: [(-1.0, ((token, -1.0),)) for token in tokens[number]]
            for number in self.file.batch
            if number % 2
        }
        for number, new in tokens.items():
            self.outputs[number] += new
        for steps in self.both:
            steps.decode(tokens, logprobs)

    @precondition(lambda self: self.file.batch)
    @rule(data=st.data(), token=token_ids)
    def finish(self, data: st.DataObject, token: int) -> None:
        number = data.draw(st.sampled_from(self.file.batch))
        self.outputs[number].append(token)
        for steps in self.both:
            steps.finish(number, [token], len(self.outputs[number]))

    @precondition(lambda self: self.file.batch)
    @rule(data=st.data())
    def begin_pause(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.file.batch))
        self.pausing.append(number)
        for steps in self.both:
            steps.begin_pause(number)

    @precondition(lambda self: self.pausing)
    @rule(token=token_ids)
    def end_pause(self, token: int) -> None:
        """The step under way brings a token before the row is gone."""
        number = self.pausing.pop()
        self.paused.append(number)
        self.outputs[number].append(token)
        for steps in self.both:
            steps.late_token(number, token)
            steps.end_pause(number, [])

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        number = self.paused.pop(0)
        for steps in self.both:
            steps.resume(number, 0, steps.to_prefill[number])
            steps.join_again(number)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A client leaves, perhaps one whose request has ended."""
        number = data.draw(st.integers(1, self.num_requests))
        self.lost.add(number)
        for steps in self.both:
            steps.know(gone(number))

    @precondition(lambda self: self.lost)
    @rule(is_back=st.booleans())
    def find(self, is_back: bool) -> None:
        """It comes back, or another one sends its request again."""
        number = self.lost.pop()
        if is_back:
            for steps in self.both:
                steps.know(attached(number), released(number))
            return
        self.num_requests += 1
        self.joined.add(self.num_requests)
        for steps in self.both:
            steps.commit([arrival(self.num_requests)], adopts(self.num_requests, number))

    @rule(active_bytes=st.integers(0, 10**12))
    def sample(self, active_bytes: int) -> None:
        for steps in self.both:
            steps.know(sample(active_bytes))

    @rule(on_restart=st.sampled_from(["resume", "hold", "cancel"]), looks_after=st.booleans())
    def kill(self, on_restart: OnRestart, looks_after: bool) -> None:
        self.file.journal.close()
        self.file.journal = self.open()
        self.memory.journal.reopen()
        rows = (*self.file.batch, *self.pausing)
        self.pausing = []
        for steps in self.both:
            steps.batch = ()
            steps.know(started(orphan_limits(on_restart) if looks_after else None))
            steps.ready(KV_DOMAIN)
            if rows:
                steps.join(*rows)

    @rule()
    def gather(self) -> None:
        self.file.journal.gather()

    @rule(share=st.floats(0.1, 1))
    def compact(self, share: float) -> None:
        records = list(self.file.journal.read())
        step = records[int(share * (len(records) - 1))].step
        through_seq = [record.seq for record in records if record.step == step][-1]
        for steps in self.both:
            steps.journal.begin_compaction(through_seq, 1, {"through": through_seq})
            while not steps.journal.advance_compaction():
                pass

    @invariant()
    def same_records(self) -> None:
        assert list(self.file.journal.read()) == list(self.memory.journal.read())

    @invariant()
    def same_tokens(self) -> None:
        for number in range(1, self.num_requests + 1):
            name = request_id(number)
            has_prompt = self.file.journal.prompt_tokens(name) is not None
            assert has_prompt == (number not in self.joined)
            one, other = self.file.journal, self.memory.journal
            assert one.prompt_tokens(name) == other.prompt_tokens(name)
            assert one.output_tokens(name) == other.output_tokens(name)
            assert one.output_tokens(name)[0].tolist() == self.outputs.get(number, [])

    @invariant()
    def same_rows(self) -> None:
        run = journal_steps.run_of(self.file.journal)
        for number, row in self.memory.journal.requests.items():
            assert find_request(run, request_id(number)) == row
        memory = self.memory.journal
        pauses = select_rows(run, tables.pause, PauseRow, "")
        assert {row.pause_seq: row for row in pauses} == memory.pauses
        pins = select_rows(run, tables.pin, PinRow, "")
        assert {row.number: row for row in pins} == memory.pins
        samples = select_rows(run, tables.memory_sample, SampleRow, "")
        assert {row.seq: row for row in samples} == memory.samples
        orphans = select_rows(run, tables.orphan, OrphanRow, "")
        assert {(row.lost_seq, row.number): row for row in orphans} == memory.orphans
        adoptions = select_rows(run, tables.adoption, AdoptionRow, "")
        assert {row.seq: row for row in adoptions} == memory.adoptions

    def waiting(self) -> list[int]:
        """Requests that have had no row yet, by number."""
        known = self.outputs.keys() | self.joined
        return [number for number in range(1, self.num_requests + 1) if number not in known]

    def teardown(self) -> None:
        assert self.file.journal.verify() == []
        purged_ns = self.file.journal.last_at_ns + SECOND_NS
        assert self.file.journal.purge(purged_ns, 0) == self.memory.journal.purge(purged_ns, 0)
        assert self.file.journal.verify() == []
        self.file.journal.close()


def test_the_file_its_twin_and_a_rebuild_agree(tmp_path: Path) -> None:
    Twins.folder = tmp_path
    limits = settings(
        max_examples=10,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    # Raises an AssertionError with the steps that lead to a difference.
    run_state_machine_as_test(Twins, settings=limits)
    assert Twins.folder == tmp_path
