"""Writers that are held back, that meet a full disk, and that are told to end."""

import errno
import queue
import threading
from pathlib import Path

import pytest

from scheduler.kvcache.store import BlockStore, Saved, SaveFailed
from scheduler.kvcache.writers import (
    ItemTooLarge,
    SavingResumed,
    SavingStopped,
    WriterResult,
    Writers,
)
from tests.kvcache.faults import FaultyFiles
from tests.kvcache.pieces import block, files_below, piece

NEVER_S = 3600.0
ITEM_BYTES = 1000


class Office:
    """Writers over a store with faults, and what they delivered."""

    def __init__(
        self,
        folder: Path,
        *,
        capacity: int = 4,
        num_threads: int = 1,
        quota_bytes: int | None = None,
        probe_interval_s: float = NEVER_S,
    ) -> None:
        self.files = FaultyFiles(quota_bytes=quota_bytes)
        self.results: queue.SimpleQueue[WriterResult] = queue.SimpleQueue()
        self.writers = Writers(
            BlockStore(folder, self.files),
            self.results.put,
            capacity_bytes=capacity * ITEM_BYTES,
            num_threads=num_threads,
            probe_interval_s=probe_interval_s,
        )

    def offer(self, *numbers: int) -> list[bool]:
        return [self.writers.offer(block(number), piece(ITEM_BYTES)) for number in numbers]

    def take(self, count: int) -> list[WriterResult]:
        return [self.results.get(timeout=20) for _ in range(count)]

    def hold(self) -> None:
        self.files.may_write.clear()

    def let_go(self) -> None:
        self.files.may_write.set()


def test_what_is_taken_is_saved_and_said(tmp_path: Path) -> None:
    office = Office(tmp_path)
    assert office.offer(1, 2, 3) == [True] * 3
    saved = office.take(3)
    assert [result.file for result in saved if isinstance(result, Saved)] == [
        block(1),
        block(2),
        block(3),
    ]
    assert all(isinstance(result, Saved) and result.duration_ns > 0 for result in saved)
    assert office.writers.held_bytes == 0
    assert office.writers.close(NEVER_S) == []
    assert files_below(tmp_path) == sorted(block(number).path for number in (1, 2, 3))


def test_writers_that_are_held_back_hold_no_more_than_their_bound(tmp_path: Path) -> None:
    office = Office(tmp_path, capacity=4)
    office.hold()
    assert office.offer(*range(10)) == [True] * 4 + [False] * 6
    assert office.writers.held_bytes == 4 * ITEM_BYTES
    assert office.results.empty()
    office.let_go()
    office.take(4)
    assert office.writers.held_bytes == 0
    assert office.offer(*range(4, 8)) == [True] * 4
    office.take(4)
    assert office.writers.close(NEVER_S) == []
    assert len(files_below(tmp_path)) == 8


def test_bytes_being_written_are_held(tmp_path: Path) -> None:
    office = Office(tmp_path, capacity=1)
    office.hold()
    assert office.offer(1, 2) == [True, False]
    assert office.writers.held_bytes == ITEM_BYTES
    office.let_go()
    office.writers.close(NEVER_S)


def test_what_could_never_fit_is_an_error(tmp_path: Path) -> None:
    office = Office(tmp_path, capacity=1)
    with pytest.raises(ItemTooLarge, match="1001 bytes, room is 1000"):
        office.writers.offer(block(1), piece(ITEM_BYTES + 1))
    assert office.writers.close(NEVER_S) == []


def test_several_threads_save_everything_once(tmp_path: Path) -> None:
    office = Office(tmp_path, capacity=50, num_threads=4)
    assert office.offer(*range(50)) == [True] * 50
    saved = [result.file.path for result in office.take(50) if isinstance(result, Saved)]
    assert sorted(saved) == files_below(tmp_path)
    assert office.writers.close(NEVER_S) == []


@pytest.mark.parametrize(
    ("error", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EIO, "io_error")]
)
def test_a_failing_disk_stops_saving(error: int, reason: str, tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.files.fail("flush", 0, error)
    office.hold()
    office.offer(1, 2, 3)
    office.let_go()
    first, stopped, *rest = office.take(4)
    assert isinstance(first, SaveFailed)
    assert (first.file, first.kind) == (block(1), reason)
    assert isinstance(stopped, SavingStopped)
    assert stopped.reason == reason
    assert [(r.file, r.kind) for r in rest if isinstance(r, SaveFailed)] == [
        (block(2), "given_up"),
        (block(3), "given_up"),
    ]
    assert office.writers.stopped
    assert office.writers.held_bytes == 0
    assert office.offer(4) == [False]
    assert office.writers.close(NEVER_S) == []


def test_saving_returns_when_space_does(tmp_path: Path) -> None:
    office = Office(tmp_path, quota_bytes=2 * ITEM_BYTES)
    office.offer(1, 2)
    results = office.take(3)
    assert [type(result) for result in results] == [Saved, SaveFailed, SavingStopped]
    office.files.heal()
    office.writers.probe()
    (resumed,) = office.take(1)
    assert isinstance(resumed, SavingResumed)
    assert resumed.stopped_ns > 0
    assert not office.writers.stopped
    assert office.offer(2) == [True]
    assert [type(result) for result in office.take(1)] == [Saved]
    assert office.writers.close(NEVER_S) == []
    assert files_below(tmp_path) == [block(1).path, block(2).path]


def test_a_probe_that_fails_changes_nothing(tmp_path: Path) -> None:
    """The probe is as large as what failed: a little space is not enough."""
    office = Office(tmp_path, quota_bytes=ITEM_BYTES)
    office.offer(1)
    office.take(2)
    probed = threading.Semaphore(0)

    def free_bytes(folder: Path) -> int:
        probed.release()
        return ITEM_BYTES

    office.files.free_bytes = free_bytes
    for _ in range(2):
        office.writers.probe()
        assert probed.acquire(timeout=20)
    assert office.writers.close(NEVER_S) == []
    assert office.writers.stopped
    assert office.results.empty()


def test_probes_come_by_themselves(tmp_path: Path) -> None:
    office = Office(tmp_path, probe_interval_s=0.001)
    office.files.fail("write", 1, errno.EIO)
    office.offer(1)
    results = office.take(3)
    assert [type(result) for result in results] == [SaveFailed, SavingStopped, SavingResumed]
    assert office.writers.close(NEVER_S) == []


def test_what_is_given_up_is_never_begun(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.hold()
    office.offer(1, 2, 3)
    while office.writers.num_queued > 2:
        pass
    assert office.writers.give_up("enough") == 2
    assert [(r.file, r.kind, r.detail) for r in office.take(2) if isinstance(r, SaveFailed)] == [
        (block(2), "given_up", "enough"),
        (block(3), "given_up", "enough"),
    ]
    assert (office.writers.num_queued, office.writers.held_bytes) == (0, ITEM_BYTES)
    office.let_go()
    assert [type(result) for result in office.take(1)] == [Saved]
    assert office.writers.close(NEVER_S) == []
    assert files_below(tmp_path) == [block(1).path]


def test_a_name_that_is_taken_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / block(1).path / "inner").mkdir(parents=True)
    office = Office(tmp_path)
    office.offer(1, 2)
    failed, saved = office.take(2)
    assert isinstance(failed, SaveFailed)
    assert failed.kind == "obstructed"
    assert isinstance(saved, Saved)
    assert office.writers.close(NEVER_S) == []


def test_a_stop_waits_for_what_was_taken(tmp_path: Path) -> None:
    office = Office(tmp_path, capacity=3)
    office.hold()
    office.offer(1, 2, 3)
    closed: list[int] = []
    thread = threading.Thread(target=lambda: closed.append(len(office.writers.close(NEVER_S))))
    thread.start()
    office.let_go()
    thread.join(20)
    assert closed == [0]
    assert [type(result) for result in office.take(3)] == [Saved] * 3
    assert office.offer(4) == [False]


def test_a_stop_does_not_wait_for_ever(tmp_path: Path) -> None:
    office = Office(tmp_path, capacity=3)
    office.hold()
    office.offer(1, 2, 3)
    unsaved = office.writers.close(limit_s=0)
    assert sorted(file.path for file in unsaved) == [block(n).path for n in (1, 2, 3)]
    given_up = [result for result in office.take(2) if isinstance(result, SaveFailed)]
    assert all(result.kind == "given_up" for result in given_up)
    office.let_go()
    assert isinstance(office.results.get(timeout=20), Saved | SaveFailed)


class Defect:
    """The next flush raises what no disk raises, and ends a writer's thread."""

    def __init__(self, office: Office) -> None:
        self._files = office.files
        self._dying: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
        office.files.flush = self

    def __call__(self, descriptor: int) -> None:  # noqa: ARG002
        del self._files.flush
        self._dying.put(threading.current_thread())
        raise RuntimeError("a defect")

    def wait(self) -> None:
        """Returns when the thread has ended."""
        self._dying.get(timeout=20).join(20)


def probes_of(office: Office) -> threading.Semaphore:
    """What is released at each probe from here on."""
    probed = threading.Semaphore(0)
    free_bytes = office.files.free_bytes

    def note(folder: Path) -> int:
        probed.release()
        return free_bytes(folder)

    office.files.free_bytes = note
    return probed


BUG = SavingStopped("bug", "RuntimeError: a defect")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_dies_stops_saving_for_good(tmp_path: Path) -> None:
    """Also when another one finds that the disk is fine."""
    office = Office(tmp_path, num_threads=2)
    defect = Defect(office)
    office.offer(1)
    failed, stopped = office.take(2)
    assert isinstance(failed, SaveFailed)
    assert (failed.file, failed.kind) == (block(1), "given_up")
    assert stopped == BUG
    defect.wait()
    assert office.writers.held_bytes == ITEM_BYTES
    probed = probes_of(office)
    office.writers.probe()
    assert probed.acquire(timeout=20)
    assert office.writers.close(NEVER_S) == [], "a stop does not wait for the dead"
    assert office.writers.stopped
    assert office.offer(2) == [False]
    assert office.results.empty()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_waits_is_given_up_when_a_writer_dies(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.hold()
    defect = Defect(office)
    office.offer(1, 2, 3)
    office.let_go()
    first, stopped, *rest = office.take(4)
    defect.wait()
    assert stopped == BUG
    assert [(r.file, r.kind) for r in (first, *rest) if isinstance(r, SaveFailed)] == [
        (block(number), "given_up") for number in (1, 2, 3)
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_a_probe_stops_saving_for_good(tmp_path: Path) -> None:
    """The disk was at fault before; now it is something that no probe finds the end of."""
    office = Office(tmp_path, num_threads=2)
    office.files.fail("write", 1, errno.EIO)
    office.offer(1)
    office.take(2)
    defect = Defect(office)
    office.writers.probe()
    assert office.take(1) == [BUG]
    defect.wait()
    assert office.writers.close(NEVER_S) == []
    assert office.writers.stopped
    assert office.results.empty()
