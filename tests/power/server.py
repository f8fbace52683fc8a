"""A server in one thread over files whose operations are written down, and over a journal that says
what a power cut leaves of it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from unittest import mock

from journal import events
from journal.database import Durability
from journal.events import Decision, Fact, Record
from journal.journal import Journal
from journal.memory import MemoryJournal
from journal.tokens import NO_ROWS, SideRows
from scheduler.engine.fake import FakeEngine, FakeSource
from scheduler.kvcache.fake_codec import FakeCodec
from scheduler.kvcache.fileformat import Tensor
from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.powerloss import RecordingFiles
from scheduler.kvcache.store import Saved, SaveFailed
from scheduler.kvcache.writers import WriterResult, Writers
from scheduler.kvstore import KvStore
from scheduler.loop import Loop
from scheduler.recovery import recover
from scheduler.run import server_started
from scheduler.sensors import Sensors
from scheduler.settings import Settings
from scheduler.streams import RequestStream
from tests.loop_driver import LoopDriver, settings_of

BLOCK_TOKENS = 64
WAIT_S = 20


@dataclass(frozen=True)
class Begun:
    """A commit that may be in the journal from here on; the records are folded up to `seq`."""

    number: int


@dataclass(frozen=True)
class Done:
    """A commit that has returned."""

    number: int
    durability: Durability


class PowerJournal(MemoryJournal):
    """Notes its commits among the operations on files, and can be cut off after any of them."""

    def __init__(self, files: RecordingFiles) -> None:
        super().__init__()
        self.files = files
        self.calls: list[tuple[int, int, Sequence[Fact], Sequence[Decision], SideRows]] = []

    def commit(
        self,
        step: int,
        at_ns: int,
        facts: Sequence[Fact],
        decisions: Sequence[Decision],
        side: SideRows = NO_ROWS,
        *,
        durability: Durability = "process",
    ) -> list[Record]:
        number = len(self.calls) + 1
        self.calls.append((step, at_ns, facts, decisions, side))
        self.files.mark(Begun(number))
        records = super().commit(step, at_ns, facts, decisions, side, durability=durability)
        self.files.mark(Done(number, durability))
        return records

    def until(self, number: int) -> MemoryJournal:
        """The journal as it was after so many commits."""
        kept = MemoryJournal()
        for step, at_ns, facts, decisions, side in self.calls[:number]:
            if isinstance(facts[0], events.ServerStarted):
                kept.reopen()
            kept.commit(step, at_ns, facts, decisions, side)
        kept.reopen()
        return kept


class SteadyFiles(RecordingFiles):
    """Files on a disk whose free space does not change."""

    def free_bytes(self, folder: Path) -> int:
        super().free_bytes(folder)
        return 10**12


class PowerServer(LoopDriver):
    """See the module's text. Each turn waits for the writers, so that a run is always the same."""

    def __init__(
        self, files: RecordingFiles, memory: MemoryJournal, nonce: int = 0, **overrides: object
    ) -> None:
        self.files = files
        self.memory = memory
        self.folder = None
        self.settings = power_settings(**overrides)
        self.nonce = nonce
        self.num_requests = 0
        self.offers = Offers()
        self.open()

    def open(self) -> None:
        self.nonce += 1
        self.journal = cast("Journal", self.memory)
        recovered = recover(self.journal, self.settings.requests.max_lingering)
        self.state, self.hub, self.known = recovered.state, recovered.hub, recovered.known
        self.snapshot_seq = recovered.snapshot_seq
        self.sensors = Sensors(self.known, self.settings.scheduler.max_inbox)
        self.loop = Loop(self.settings, self.journal, recovered, self.sensors, self.wait_for_space)
        description = FakeSource(self.settings.fake).describe()
        self.engine = FakeEngine(description.facts, self.nonce, self.settings.fake, threaded=False)
        self.kv = KvStore(
            self.files.root,
            self.settings.kv,
            FakeCodec(),
            block_tokens=BLOCK_TOKENS,
            fingerprint=description.facts.fingerprint,
            deliver=self.sensors.deliver_fact,
            files=self.files,
        )
        self.offers.watch(self.kv.writers, self.kv.written)
        self.swept = threading.Event()
        end_sweep = self.kv.store.end_sweep

        def ended() -> None:
            end_sweep()
            self.swept.set()

        self.kv.store.end_sweep = ended
        started = server_started(self.settings, description, self.nonce)
        self.loop.begin(started, self.engine, self.kv)
        assert self.swept.wait(WAIT_S)

    def turn(self) -> bool:
        worked = self.engine.work()
        self.offers.wait()
        return self.loop.step() or worked

    def hold(self, stream: RequestStream) -> None:
        """Holds a request, and returns when it is."""
        self.sensors.wish(events.HoldRequested(request_id=stream.request_id))
        self.run_until(lambda: self.request(stream).phase.value == "paused")

    def release(self, stream: RequestStream) -> None:
        """Lets a held request go on."""
        self.sensors.wish(events.ReleaseRequested(request_id=stream.request_id))

    def clear(self) -> None:
        """Sends away all blocks that may go."""
        self.sensors.wish(events.ClearRequested(by="test"))

    def run_until_output(self, stream: RequestStream, num_tokens: int) -> None:
        """Turns until a request has put so much out."""
        self.run_until(lambda: len(stream.tokens) >= num_tokens)

    def kill(self) -> None:
        """The process is gone, and another one begins."""
        self.close()
        self.journal.close()
        with mock.patch("scheduler.kvcache.files._run_name", return_value=f"process {self.nonce}"):
            self.open()

    def cancel(self, stream: RequestStream) -> None:
        """Ends a request by hand."""
        self.sensors.wish(events.CancelRequested(request_id=stream.request_id))

    def close(self) -> None:
        """Ends the threads."""
        self.engine.stop()
        self.kv.close(WAIT_S)


class Offers:
    """Which files the writers have taken and not answered."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.num_open = 0

    def watch(self, writers: Writers, deliver: Callable[[WriterResult], None]) -> None:
        """Follows these writers, whose results go to `deliver`."""
        self.num_open = 0
        offer = writers.offer

        def offered(file: KeptFile, tensors: Mapping[str, Tensor]) -> bool:
            with self.changed:
                self.num_open += 1
            if offer(file, tensors):
                return True
            self.answered()
            return False

        def delivered(result: WriterResult) -> None:
            deliver(result)
            if isinstance(result, Saved | SaveFailed):
                self.answered()

        writers.offer = offered
        writers._deliver = delivered  # pyright: ignore[reportPrivateUsage]

    def answered(self) -> None:
        with self.changed:
            self.num_open -= 1
            self.changed.notify_all()

    def wait(self) -> None:
        """Returns when all are answered."""
        with self.changed:
            assert self.changed.wait_for(lambda: not self.num_open, WAIT_S)


def power_settings(**overrides: object) -> Settings:
    """A small server that saves its KV, with one writer."""
    kv = {"block_tokens": BLOCK_TOKENS, "reserve_bytes": 0, "memory_bytes": 0, "num_writers": 1}
    named = {f"kv__{name}": value for name, value in kv.items()}
    return settings_of(**(named | {"fake__turn_tokens": 0} | overrides))
