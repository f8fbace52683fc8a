"""Every state in which a power cut can leave disk and journal, and what must be so in each.

The journal is trusted as far as SQLite promises: all up to the last commit of `power` is there, and
of the later ones any number, in order.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, cast
from unittest import mock

from journal import events
from journal.journal import Journal
from scheduler.keptfiles import known_files
from scheduler.kvcache.fake_codec import FakeCodec
from scheduler.kvcache.files import TEMPORARY_SUFFIX
from scheduler.kvcache.naming import SUFFIX, BlockFile, KeptFile, StateFile, TailFile
from scheduler.kvcache.powerloss import (
    Disk,
    Marked,
    Named,
    Operation,
    State,
    Wrote,
    disks_of,
    rebuild,
)
from scheduler.kvcache.readahead import Read
from scheduler.kvcache.store import BlockStore
from scheduler.prefix import STATE_SUFFIX, is_tail, tail_name
from scheduler.recovery import recover_state
from scheduler.request import Phase, Request
from scheduler.state import SchedulerState
from tests.power.server import Begun, Done, PowerJournal, PowerServer, SteadyFiles

MOST_STATES = 2_000
"""More states of a disk after one operation are not gone through one by one."""

NUM_RANDOM = 30
"""Then so many of them are drawn, beside those that differ from an extreme by one thing."""


@dataclass(frozen=True)
class Cut:
    """One way for a power cut to come out, after so many operations and with so many commits."""

    operation: int
    state: State
    num_commits: int


@dataclass
class Cuts:
    """All ways, for what one server did. `num_sampled` counts the operations after which there are
    too many states to look at each.
    """

    history: Sequence[Operation]
    most_states: int = MOST_STATES
    num_states: int = 0
    num_sampled: int = 0
    seen: set[tuple[object, int]] = field(default_factory=set[tuple[object, int]])

    def __iter__(self) -> Iterator[Cut]:
        least = most = 0
        for number, disk in disks_of(self.history):
            last = self.history[number - 1] if number else None
            match last:
                case Marked(Begun(commit)):
                    most = commit
                case Marked(Done(commit, durability)):
                    least = commit if durability == "power" else least
                case _:
                    pass
            for state in self.states(number, disk):
                key = tuple(state.items())
                for num_commits in range(least, most + 1):
                    if (key, num_commits) not in self.seen:
                        self.seen.add((key, num_commits))
                        yield Cut(number, state, num_commits)

    def states(self, number: int, disk: Disk) -> Iterator[State]:
        """The states after one operation, all or some."""
        many = disk.num_states() > self.most_states
        self.num_sampled += many
        for state in disk.some_states(number, NUM_RANDOM) if many else disk.all_states():
            self.num_states += 1
            yield state


class Check:
    """What must be so after a cut of one server's work. Raises AssertionError where it is not."""

    def __init__(self, files: SteadyFiles, journal: PowerJournal) -> None:
        self.journal = journal
        self.key = (files.root / "key").read_bytes()
        self.saved = saved_under(files.history)
        self.recovered = cache(self._recovered)
        self.verdict = cache(self._verdict)

    def _recovered(self, num_commits: int) -> SchedulerState:
        journal = cast("Journal", self.journal.until(num_commits))
        return recover_state(journal)[0]

    def files(self, cut: Cut) -> None:
        """No file is taken for what it is not, and each pin is there. Each file is really read."""
        state = self.recovered(cut.num_commits)
        for path, data in cut.state.items():
            if path.endswith(SUFFIX) and data != "folder":
                assert self.verdict(path, data) != "wrong", "a file has other bytes"
        assert cut.state.get("key") in (None, self.key), "the key is torn"
        for path in (path for request in pinned(state) for path in pins_of(state, request)):
            data = cut.state.get(path, "folder")
            assert data != "folder", "a pin is missing"
            assert self.verdict(path, data) == "whole", "a pin is damaged"
            assert "key" in cut.state, "the key of a pin is missing"

    def _verdict(self, path: str, data: bytes) -> Literal["whole", "bad", "wrong"]:
        """What reading the file gives: what was saved under its name, nothing, or other bytes."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / path
            copy.parent.mkdir(parents=True)
            copy.write_bytes(data)
            found = FakeCodec().read(BlockStore(Path(folder) / "kv"), file_at(self.domain, path))
        if not isinstance(found, Read):
            return "bad"
        return "whole" if data in self.saved[path] else "wrong"

    @property
    def domain(self) -> str:
        """What the blocks' names and their files say."""
        return self.recovered(len(self.journal.calls)).index.domain

    def life(self, cut: Cut, folder: Path, **settings: object) -> None:
        """A server that starts on what is left brings every request to its end, from its pins."""
        rebuild(cut.state, folder)
        memory = self.journal.until(cut.num_commits)
        before = self.recovered(cut.num_commits)
        held = {r.request_id: r.num_known_tokens - 1 for r in pinned(before)}
        sent = {r.request_id: memory.output_tokens(r.request_id)[0] for r in open_requests(before)}
        with mock.patch("scheduler.kvcache.files._run_name", return_value="another process"):
            server = PowerServer(SteadyFiles(folder), memory, 1, **settings)
        streams = {name: server.stream(name) for name in sent}
        for name in sent:
            server.release(streams[name])
        server.run_until_idle()
        server.close()
        for name, stream in streams.items():
            assert stream.end is not None, f"{name} did not end"
            assert stream.end.kind == "finished"
            assert stream.tokens[: len(sent[name])] == list(sent[name])
        found = [r.event for r in memory.read() if r.run_id == server.state.run_id]
        resumed = [e for e in found if isinstance(e, events.RequestResumed)]
        for name, num_tokens in held.items():
            first = next(event for event in resumed if event.request_id == name)
            assert (first.num_cached_tokens, first.num_lost_tokens) == (num_tokens, 0)
        known = known_files(server.state.index)
        left = sorted({*files_below(folder / "kv")} ^ {*known})
        assert not left, f"these are unknown and there, or known and not: {left}"
        for path in known:
            file = file_at(server.state.index.domain, f"kv/{path}")
            assert server.kv.store.verify(file) == known[path]


def saved_under(history: Sequence[Operation]) -> dict[str, set[bytes]]:
    """All that a program meant to be under each path at some time."""
    written: dict[int, bytes] = {}
    for operation in history:
        if isinstance(operation, Wrote):
            written[operation.file] = written.get(operation.file, b"") + operation.data
    saved: dict[str, set[bytes]] = {}
    for operation in history:
        match operation:
            case Named(path, int() as file) if not path.endswith(TEMPORARY_SUFFIX):
                saved.setdefault(path, set()).add(written[file])
            case _:
                pass
    return saved


def open_requests(state: SchedulerState) -> list[Request]:
    return list(state.requests.values())


def pinned(state: SchedulerState) -> list[Request]:
    """The requests that are held with all that they are on disk."""
    held = (Phase.PAUSED, Phase.RESUMING)
    return [
        request
        for request in state.requests.values()
        if request.phase in held and request.saved_tokens >= 0
    ]


def pins_of(state: SchedulerState, request: Request) -> Iterator[str]:
    """The paths of the files that a held request goes on from."""
    domain = state.index.domain
    for name in request.pins:
        yield f"kv/{BlockFile(domain, name).path}"
    if request.tail_bytes:
        tail = TailFile(domain, request.request_id, request.saved_tokens)
        assert tail_name(request.request_id, request.saved_tokens) in state.index.tails
        yield f"kv/{tail.path}"


def file_at(domain: str, path: str) -> KeptFile:
    """The file of a path below the state folder."""
    name = path.rpartition("/")[2].removesuffix(SUFFIX)
    if is_tail(name):
        request_id, _, position = name.rpartition("-")
        return TailFile(domain, request_id, int(position))
    if name.endswith(STATE_SUFFIX):
        return StateFile(domain, name.removesuffix(STATE_SUFFIX))
    return BlockFile(domain, name)


def files_below(folder: Path) -> list[str]:
    """All files below a folder, by their paths in it."""
    found = (path for path in folder.rglob("*") if not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)
