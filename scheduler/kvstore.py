"""Saved KV as the loop and the engine meet it: the engine's port, and the loop's hand on the
files.

The engine's thread cuts blocks and fills rows; writers save; a thread reads ahead; one more looks
at the files at the start and at the free space now and then. What comes of it reaches the loop as
facts. The loop alone removes files, after the commit that says so.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from journal import events
from journal.crashpoints import reach
from journal.events import Fact, PlannedBlock
from scheduler.effects import RemoveFiles
from scheduler.engine.base import Caches, RestoreRow, SaveTail
from scheduler.engine.model import ModelError
from scheduler.keptfiles import (
    file_of,
    lost,
    not_saved,
    save_failed,
    saved,
    stop_failure,
    tail_failure,
    tail_file,
    tail_not_saved,
    tail_saved,
)
from scheduler.kvcache.codec import BlockCodec, UnsupportedCache
from scheduler.kvcache.fileformat import Tensor
from scheduler.kvcache.files import Files
from scheduler.kvcache.leftovers import Leftovers
from scheduler.kvcache.naming import (
    KEY_FILE,
    BlockFile,
    BlockNamer,
    KeptFile,
    StateFile,
    TailFile,
    domain_digest,
    load_key,
)
from scheduler.kvcache.pointed_files import default_files
from scheduler.kvcache.readahead import Read
from scheduler.kvcache.reconcile import Batch, compare, sweep
from scheduler.kvcache.store import BlockStore, ReadFailed, Saved, SaveFailed
from scheduler.kvcache.tier import MemoryTier
from scheduler.kvcache.writers import (
    ItemTooLarge,
    SavingResumed,
    SavingStopped,
    WriterResult,
    Writers,
)
from scheduler.prefix import STATE_SUFFIX
from scheduler.restoring import Restore
from scheduler.settings import KvSettings

log = structlog.get_logger(__name__)


class KvStore:
    """See the module's text. Made before the model is loaded; `describe` says what its blocks are
    called. `files` are the operating system's, unless a test gives others.
    """

    def __init__(
        self,
        state_folder: Path,
        settings: KvSettings,
        codec: BlockCodec,
        *,
        block_tokens: int,
        fingerprint: str,
        deliver: Callable[[Fact], None],
        files: Files | None = None,
    ) -> None:
        self.settings = settings
        self.codec = codec
        self.block_tokens = block_tokens
        self.fingerprint = fingerprint
        self.deliver = deliver
        files = files or default_files()
        self.secret = load_key(state_folder / KEY_FILE, files).secret
        self.store = BlockStore(state_folder / "kv", files, settings.reserve_bytes)
        self.leftovers = Leftovers(self.store)
        self.tier = MemoryTier(settings.memory_bytes, codec.size_of)
        self.writers = Writers(
            self.store,
            self.written,
            capacity_bytes=2 * settings.writing_bytes,
            num_threads=settings.num_writers,
            probe_interval_s=settings.probe_s,
        )
        self.domain = ""
        self.tails: dict[TailFile, SaveTail] = {}
        self.closing = threading.Event()
        self.compared = threading.Event()
        self.keeper: threading.Thread | None = None
        self.reported_bytes: int | None = None
        self.unmeasured = ""
        self.stopped_detail: str | None = None

    # The engine's thread

    def describe(self, caches: Caches, num_tokens: int) -> str:
        """See `KvPort.describe`."""
        try:
            layout = self.codec.describe(caches, num_tokens)
        except UnsupportedCache as error:
            raise ModelError(
                f"the KV of this model cannot be saved: {error};"
                " it can be served without saving (kv.enabled = false)"
            ) from error
        self.domain = domain_digest(self.fingerprint, layout, self.block_tokens)
        self.compared.wait()
        return self.domain

    def save(self, caches: Caches, blocks: Sequence[PlannedBlock]) -> None:
        """See `KvPort.save`."""
        num_taken = 0
        try:
            for planned in blocks:
                self.hand_over(planned, self.cut(caches, planned))
                num_taken += 1
        finally:
            self.refuse(blocks[num_taken:])

    def cut(self, caches: Caches, planned: PlannedBlock) -> Any:
        """The evaluated copy of one block, or of the state at its end."""
        end = (planned.index + 1) * self.block_tokens
        if planned.part == "block":
            return self.codec.cut_block(caches, end - self.block_tokens, self.block_tokens)
        return self.codec.cut_state(caches, end)

    def hand_over(self, planned: PlannedBlock, block: Any) -> None:
        """Memory keeps the block, and a writer takes it, or the loop hears that none did."""
        file = file_of(self.domain, planned.hash, is_state=planned.part == "state")
        if self.settings.memory_bytes:
            self.tier.put(file, block)
        self.leftovers.keep(file)
        try:
            taken = self.writers.offer(file, self.codec.tensors(block))
        except ItemTooLarge as error:
            # It would never be taken: a row must not end for it.
            self.deliver(not_saved(planned, "not_taken", str(error)))
            return
        if not taken:
            # While saving has stopped the block is as good as one that was given up: it is tried
            # again when saving goes on.
            stopped = self.writers.stopped
            self.deliver(not_saved(planned, "given_up" if stopped else "not_taken"))

    def refuse(self, blocks: Sequence[PlannedBlock]) -> None:
        """See `KvPort.refuse`."""
        for planned in blocks:
            self.deliver(not_saved(planned, "not_taken"))

    def save_tail(self, caches: Caches, command: SaveTail, end: int) -> None:
        """See `KvPort.save_tail`."""
        if end == command.tail_start and not self.codec.has_state:
            self.deliver(tail_saved(command, end, 0, 0))
            return
        answered = False
        try:
            tensors = self.codec.tensors(self.codec.cut_tail(caches, command.tail_start, end))
            self.hand_over_tail(command, TailFile(self.domain, command.request_id, end), tensors)
            answered = True
        finally:
            if not answered:
                self.refuse_tail(command, "it cannot be cut out of its row")

    def hand_over_tail(
        self, command: SaveTail, file: TailFile, tensors: Mapping[str, Tensor]
    ) -> None:
        """A writer takes the tail, or the loop hears that none did. Memory never keeps it: nobody
        but its own request can use it.
        """
        if file in self.tails:
            self.refuse_tail(command, "an older one of this name is still being written")
            return
        self.leftovers.keep(file)
        self.tails[file] = command
        try:
            taken = self.writers.offer(file, tensors)
        except ItemTooLarge as error:
            del self.tails[file]
            self.refuse_tail(command, str(error))
            return
        if not taken:
            del self.tails[file]
            stopped = self.writers.stopped
            detail = "saving has stopped" if stopped else "the writers have no room for it"
            self.deliver(tail_not_saved(command, stop_failure(stopped), detail))

    def refuse_tail(self, command: SaveTail, reason: str) -> None:
        """See `KvPort.refuse_tail`."""
        self.deliver(tail_not_saved(command, "not_taken", reason))

    def restore(
        self,
        caches: Caches,
        command: RestoreRow,
        num_room_tokens: int,
        ready: Callable[[], None],
    ) -> Restore:
        """See `KvPort.restore`."""
        return Restore(
            command,
            lambda: self.codec.filler(caches, num_room_tokens),
            fetch=self.fetch,
            used=self.used,
            files=lambda name, is_state: file_of(self.domain, name, is_state=is_state),
            domain=self.domain,
            has_state=self.codec.has_state,
            block_tokens=self.block_tokens,
            ready=ready,
            end_thread=self.codec.end_thread,
            announce=self.announce,
            examine=self.examine,
        )

    def fetch(self, file: KeptFile) -> Read | ReadFailed:
        """A block from memory or from its file. In a reader's thread, and in the engine's."""
        block = self.tier.get(file)
        if block is not None:
            return Read(file, block, "memory", 0, self.codec.size_of(block))
        return self.codec.read(self.store, file)

    def announce(self, file: KeptFile) -> int:
        """What is not in memory will be read soon. In a reader's thread."""
        return 0 if file in self.tier else self.store.read_soon(file)

    def examine(self, file: KeptFile) -> ReadFailed | None:
        """Looks at a file of a chain in which another one was bad. What has none is lost also where
        memory has it: the core counts neither any more. In a reader's thread.
        """
        failed = self.store.glance(file)
        if failed is not None and failed.kind != "io_error":
            self.tier.discard(file)
        return failed

    def used(self, found: Read) -> None:
        """Memory keeps what a row was filled from."""
        if self.settings.memory_bytes:
            self.tier.put(found.file, found.block)

    # Writers' threads

    def written(self, result: WriterResult) -> None:
        """What came of an offer, as a fact. Tails belong to a pause, and are no block."""
        match result:
            case Saved(file=TailFile() as file):
                command = self.tails.pop(file)
                num_bytes, duration_ns = result.file_bytes, result.duration_ns
                self.deliver(tail_saved(command, file.position, num_bytes, duration_ns))
            case SaveFailed(file=TailFile() as file):
                reason = tail_failure(result, self.writers.stopped)
                self.deliver(tail_not_saved(self.tails.pop(file), reason, result.detail))
            case Saved():
                self.deliver(saved(result))
            case SaveFailed():
                self.deliver(save_failed(result))
            case SavingStopped():
                if result.reason == "bug":
                    log.error("a writer of blocks has a bug: no KV is saved", error=result.detail)
                self.stopped_detail = result.detail
                self.deliver(events.SavingStopped(reason=result.reason, detail=result.detail))
            case SavingResumed():
                self.stopped_detail = None
                self.deliver(events.SavingResumed(stopped_ns=result.stopped_ns))

    # The loop's thread

    def names(self) -> tuple[BlockNamer, int]:
        """What names blocks, and their tokens; once the model is loaded."""
        assert self.domain, "the model is described first"
        return BlockNamer(self.secret, self.domain), self.block_tokens

    def begin(self, known: Mapping[str, int]) -> None:
        """Starts looking after the files. `known` maps the paths of those that the journal knows
        to their sizes.
        """
        self.store.begin_sweep()
        self.keeper = threading.Thread(
            target=self.look_after, args=(known,), name="fermata-kv", daemon=True
        )
        self.keeper.start()

    def remove(self, effect: RemoveFiles) -> None:
        """Unlinks files whose eviction is committed; memory lets go of them too."""
        domain = effect.domain
        files: list[KeptFile] = [BlockFile(domain, name) for name in effect.hashes]
        files += [StateFile(domain, name) for name in effect.states]
        files += [tail_file(domain, name) for name in effect.tails]
        for file in files:
            self.tier.discard(file)
            self.leftovers.remove(file)

    def shrink(self, names: Iterable[str]) -> None:
        """Memory lets go of these: hashes, and hashes with `.state` behind them."""
        for name in names:
            is_state = name.endswith(STATE_SUFFIX)
            bare = name.removesuffix(STATE_SUFFIX)
            self.tier.discard(file_of(self.domain, bare, is_state=is_state))

    def close(self, limit_s: float) -> None:
        """Ends the threads. The journal will not hear of what is saved from here on: what is queued
        is given up, and what is being written is waited for at most so long, so that it is not left
        half written.
        """
        reach("stop.files.before")
        self.closing.set()
        num_unsaved = self.writers.give_up("the server ends")
        num_unsaved += len(self.writers.close(limit_s))
        if num_unsaved:
            log.warning("blocks were not saved before the stop", count=num_unsaved)
        if self.keeper is not None:
            self.keeper.join()
        reach("stop.files.after")

    # The keeper's thread

    def look_after(self, known: Mapping[str, int]) -> None:
        """Says which known files are gone, removes unknown ones while the server goes on, then
        measures free space until the end.
        """
        try:
            self.reconcile(compare(self.store, known))
            reach("recovery.compared")
        finally:
            self.compared.set()
        try:
            self.reconcile(sweep(self.store, known))
            reach("recovery.swept")
        finally:
            self.store.end_sweep()
        while not self.closing.is_set():
            self.leftovers.try_again()
            self.measure(0, 0)
            self.closing.wait(self.settings.measure_s)

    def reconcile(self, batches: Iterable[Batch]) -> None:
        """Does the work batch by batch, until the server ends."""
        try:
            for batch in batches:
                self.reconciled(batch)
                if self.closing.is_set():
                    return
        except OSError as error:
            log.warning("the folder of saved KV cannot be read", error=str(error))

    def measure(self, num_swept: int, swept_bytes: int) -> None:
        """Reports the free space, if it can be read and is another one: a server that does nothing
        writes nothing.
        """
        try:
            free_bytes = self.store.free_bytes()
        except OSError as error:
            if str(error) != self.unmeasured:  # A disk that stays broken must not fill the log.
                self.unmeasured = str(error)
                log.warning("the free space for saved KV cannot be read", error=self.unmeasured)
            return
        self.unmeasured = ""
        if not num_swept and not has_changed(self.reported_bytes, free_bytes):
            return
        self.reported_bytes = free_bytes
        self.deliver(
            events.StoreMeasured(
                free_bytes=free_bytes, num_swept=num_swept, swept_bytes=swept_bytes
            )
        )

    def reconciled(self, batch: Batch) -> None:
        """Blocks that are not as the journal knows them, and what was swept."""
        if batch.vanished:
            self.deliver(lost(batch.vanished, "missing"))
        if batch.resized:
            self.deliver(lost(batch.resized, "corrupt"))
        if batch.num_swept or batch.num_temporary:
            self.measure(batch.num_swept + batch.num_temporary, batch.swept_bytes)


def has_changed(reported_bytes: int | None, free_bytes: int) -> bool:
    """Whether the free space differs by more than one percent from what was reported."""
    return reported_bytes is None or abs(free_bytes - reported_bytes) * 100 > reported_bytes
