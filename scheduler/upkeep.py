"""What the journal needs now and then, in portions that are short enough to lie between two steps:
tokens of ended requests are purged, and a journal that has grown too old or too large is shortened.

Purging goes on under load, a bounded number of requests at a time. Shortening waits until no
request is in the engine: it reads much, and nobody should feel it.
"""

import time
from itertools import islice

import msgspec
import structlog

from journal.errors import JournalFull
from journal.journal import Journal
from scheduler.evolve import fold
from scheduler.settings import Settings
from scheduler.state import STATE_VERSION, SchedulerState

NS_PER_S = 10**9
NS_PER_DAY = 86_400 * NS_PER_S
PORTION_EVENTS = 2_000
"""Events folded between two steps: some 20 ms."""

PORTION_PAUSE_S = 0.005
BUSY_PAUSE_S = 1.0
"""Between two portions, so that an arrival is looked at first; and between two while rows run."""

log = structlog.get_logger(__name__)


class Upkeep:
    """See the module's text. Used by the loop's thread only."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self.journal = journal
        self.limits = settings.journal
        self.retention_ns = settings.requests.retention_s * NS_PER_S
        self.due_ns = time.monotonic_ns()
        self.carried: SchedulerState | None = None
        self.through_seq = 0
        self.is_writing = False

    def wait_s(self) -> float:
        """How long the loop may wait, if nothing else happens."""
        if self.carried is not None or self.is_writing:
            return PORTION_PAUSE_S
        return max(0, self.due_ns - time.monotonic_ns()) / NS_PER_S

    def work(self, now_ns: int, *, idle: bool) -> None:
        """One portion of what is due. `now_ns` is the time of the journal; `idle`: no request is
        in the engine.
        """
        try:
            if time.monotonic_ns() >= self.due_ns:
                self.begin(now_ns, idle=idle)
            elif self.carried is not None and idle:
                self.fold_portion(self.carried)
            elif self.is_writing and idle:
                self.is_writing = not self.journal.advance_compaction()
        except JournalFull:
            self.carried, self.is_writing = None, False
            log.warning("no space for the journal's upkeep: it is tried again later")

    def begin(self, now_ns: int, *, idle: bool) -> None:
        """Purges, and looks whether the journal should be shortened."""
        if self.journal.purge(now_ns, self.retention_ns):
            pause_s = PORTION_PAUSE_S if idle else BUSY_PAUSE_S
            self.due_ns = time.monotonic_ns() + int(pause_s * NS_PER_S)
            return
        self.due_ns = time.monotonic_ns() + self.limits.upkeep_s * NS_PER_S
        if idle and self.carried is None and not self.is_writing:
            keep_ns = self.limits.keep_days * NS_PER_DAY
            point = self.journal.compaction_point(now_ns, keep_ns, self.limits.keep_bytes)
            if point is not None:
                self.carried, self.through_seq = SchedulerState(), point

    def fold_portion(self, carried: SchedulerState) -> None:
        """Goes on folding up to the point; from there on the journal writes its successor."""
        records = self.journal.read(after_seq=carried.seq, until_seq=self.through_seq)
        fold(carried, islice(records, PORTION_EVENTS))
        if carried.seq == self.through_seq:
            self.carried = None
            state = msgspec.to_builtins(carried, str_keys=True)
            self.journal.begin_compaction(self.through_seq, STATE_VERSION, state)
            self.is_writing = True
