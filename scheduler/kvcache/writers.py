"""Writer threads: evaluated blocks go to disk beside the engine, within a bound on their bytes.

`offer` never waits. A block that finds no room stays unsaved in its row, and is offered again
later. When the disk is full or fails, saving stops as a whole: what is queued is given up, nothing
more is taken, and a probe at intervals finds out when it may go on. A writer that ends by an error
of ours stops saving too, and then nothing finds out: that lasts until the server starts again.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from scheduler.kvcache.fileformat import Tensor
from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.store import BlockStore, Saved, SaveFailed

StopReason = Literal["disk_full", "io_error", "bug"]


@dataclass(frozen=True, slots=True)
class SavingStopped:
    """Nothing is saved from here on, until `SavingResumed`; which never comes after a `bug`: the
    thread of a writer has ended by an error of ours.
    """

    reason: StopReason
    detail: str


@dataclass(frozen=True, slots=True)
class SavingResumed:
    """A probe came through: blocks are taken again."""

    stopped_ns: int


WriterResult = Saved | SaveFailed | SavingStopped | SavingResumed
Deliver = Callable[[WriterResult], None]
Item = tuple[KeptFile, Mapping[str, Tensor]]


class ItemTooLarge(Exception):
    """A block, state or tail that is larger than all that the writers may hold."""


def item_bytes(tensors: Mapping[str, Tensor]) -> int:
    """What a block costs while it waits."""
    return sum(tensor.num_bytes for tensor in tensors.values())


class Writers:
    """Threads that save what they are offered, in the order in which it was offered.

    `deliver` is called in a writer's thread, once for each offer that was taken, and must not
    block; with several threads a block can be saved before the one that it follows.
    `capacity_bytes` bounds what is queued and being written; it is part of the memory that the
    scheduler counts.
    """

    def __init__(
        self,
        store: BlockStore,
        deliver: Deliver,
        *,
        capacity_bytes: int,
        num_threads: int,
        probe_interval_s: float,
    ) -> None:
        self._store = store
        self._deliver = deliver
        self._capacity_bytes = capacity_bytes
        self._probe_interval_s = probe_interval_s
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._in_hand: dict[int, tuple[KeptFile, int]] = {}
        self._held_bytes = 0
        self._closing = False
        self._stopped_bytes = 0
        self._stopped_ns = 0
        self._stop_reason: StopReason | None = None
        self._probe_at_ns: int | None = None
        self._probing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"writer-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def held_bytes(self) -> int:
        """The bytes that are queued or being written. They are not free before they leave here."""
        with self._changed:
            return self._held_bytes

    @property
    def stopped(self) -> StopReason | None:
        """Why saving has stopped; null while it has not."""
        with self._changed:
            return self._stop_reason

    @property
    def num_queued(self) -> int:
        """How many files no thread has begun with."""
        with self._changed:
            return len(self._queue)

    def offer(self, file: KeptFile, tensors: Mapping[str, Tensor]) -> bool:
        """Takes the block, or says no at once: no room, saving has stopped, or the server ends.

        Raises ItemTooLarge for one that would never fit.
        """
        num_bytes = item_bytes(tensors)
        if num_bytes > self._capacity_bytes:
            raise ItemTooLarge(f"{file.name} has {num_bytes} bytes, room is {self._capacity_bytes}")
        with self._changed:
            full = self._held_bytes + num_bytes > self._capacity_bytes
            if full or self._closing or self._stopped_ns:
                return False
            self._queue.append((file, tensors))
            self._held_bytes += num_bytes
            self._changed.notify()
            return True

    def probe(self) -> None:
        """Tries now whether saving can go on, for instance because blocks were evicted."""
        with self._changed:
            if self._stopped_ns:
                self._probe_at_ns = 0
                self._changed.notify_all()

    def give_up(self, why: str) -> int:
        """Gives up what is queued; what is being written goes on. Returns how many files went."""
        with self._changed:
            given_up = self._clear_queue(why)
            self._changed.notify_all()
        self._deliver_all(given_up)
        return len(given_up)

    def close(self, limit_s: float) -> list[KeptFile]:
        """Waits at most so long until everything taken is saved, gives up the rest and ends the
        threads. Returns what is not known to be saved; a write that hangs is left to itself.
        """
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._queue and not self._in_hand, limit_s)
            unsaved = [file for file, _ in [*self._queue, *self._in_hand.values()]]
            given_up = self._clear_queue("the server ends")
            self._changed.notify_all()
        self._deliver_all(given_up)
        if not unsaved:
            for thread in self._threads:
                thread.join()
        return unsaved

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                file, tensors = item
                num_bytes = item_bytes(tensors)
                result = self._store.save(file, tensors)
                # The arrays are let go before their bytes are called free.
                del item, tensors
                self._done(num_bytes, result)
        finally:
            error = sys.exception()
            if error is not None:
                self._die(f"{type(error).__name__}: {error}")

    def _die(self, detail: str) -> None:
        """Stops saving for good: the next block may meet the same bug. What this thread had in
        hand stays counted as held, since the error still holds it.
        """
        results: list[WriterResult] = []
        with self._changed:
            in_hand = self._in_hand.pop(threading.get_ident(), None)
            if in_hand is not None:
                results.append(SaveFailed(in_hand[0], "given_up", detail, in_hand[1]))
            if self._stop_reason != "bug":
                results.append(SavingStopped("bug", detail))
            self._stop_reason = "bug"
            self._stopped_ns = self._stopped_ns or time.monotonic_ns()
            results += self._clear_queue(detail)
            self._changed.notify_all()
        self._deliver_all(results)

    def _next(self) -> Item | None:
        """Waits for work; takes care of probes meanwhile. Nothing: the thread is to end."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, self._probe_wait_s())
                if self._queue:
                    item = self._queue.popleft()
                    self._in_hand[threading.get_ident()] = (item[0], item_bytes(item[1]))
                    return item
                if self._closing:
                    return None
                if not self._probe_due():
                    continue
                self._probe_at_ns, self._probing = None, True
                num_bytes = self._stopped_bytes
            self._probe(num_bytes)

    def _has_work(self) -> bool:
        return bool(self._queue) or self._closing or self._probe_due()

    def _probe_due(self) -> bool:
        due = self._probe_at_ns is not None and time.monotonic_ns() >= self._probe_at_ns
        return due and not self._probing

    def _probe_wait_s(self) -> float | None:
        if self._probe_at_ns is None or self._probing:
            return None
        return max(0.0, (self._probe_at_ns - time.monotonic_ns()) / 1e9)

    def _done(self, num_bytes: int, result: Saved | SaveFailed) -> None:
        results: list[WriterResult] = [result]
        with self._changed:
            del self._in_hand[threading.get_ident()]
            self._held_bytes -= num_bytes
            if isinstance(result, SaveFailed) and not self._stopped_ns:
                results += self._stop(result)
            self._changed.notify_all()
        self._deliver_all(results)

    def _stop(self, failed: SaveFailed) -> list[WriterResult]:
        """Stops saving if the failure is one of the disk's."""
        if failed.kind not in ("disk_full", "io_error"):
            return []
        self._stop_reason = failed.kind
        self._stopped_ns = time.monotonic_ns()
        self._stopped_bytes = failed.num_bytes
        self._probe_at_ns = self._next_probe_ns()
        return [SavingStopped(failed.kind, failed.detail), *self._clear_queue(failed.detail)]

    def _clear_queue(self, detail: str) -> list[WriterResult]:
        results: list[WriterResult] = []
        while self._queue:
            file, tensors = self._queue.popleft()
            num_bytes = item_bytes(tensors)
            self._held_bytes -= num_bytes
            results.append(SaveFailed(file, "given_up", detail, num_bytes))
        return results

    def _next_probe_ns(self) -> int:
        return time.monotonic_ns() + int(self._probe_interval_s * 1e9)

    def _probe(self, num_bytes: int) -> None:
        error = self._store.probe(num_bytes)
        with self._changed:
            self._probing = False
            if self._stop_reason == "bug":
                return  # Whatever the disk says now.
            if error is not None:
                if self._probe_at_ns is None:  # Nobody asked for another one meanwhile.
                    self._probe_at_ns = self._next_probe_ns()
                return
            stopped_ns, self._stopped_ns, self._probe_at_ns = self._stopped_ns, 0, None
            self._stop_reason = None
        self._deliver(SavingResumed(time.monotonic_ns() - stopped_ns))

    def _deliver_all(self, results: list[WriterResult]) -> None:
        for result in results:
            self._deliver(result)
