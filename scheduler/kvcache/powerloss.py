"""What a power cut may leave of a folder: a layer over the store's file operations that writes them
down, and the states in which the disk can be afterwards. For tests.

A disk keeps less than a program has seen, and in another order. What counts here is what the calls
promise, and nothing that some file system does beyond it (Linux, fsync(2): "Calling fsync() does
not necessarily ensure that the entry in the directory containing the file has also reached disk.
For that an explicit fsync() on a file descriptor for the directory is also needed"):

- bytes that were written are there for certain once their file was flushed. Before, the file may
  be shorter, torn at any sector, or of full length with zeros or something else in any sector;
- a name that was made, renamed or removed is so for certain once its folder was flushed. Before,
  each name is as it was or as it became, whatever the others are: also the two of a rename, only
  that a name which is replaced is never missing;
- a folder that is not there has nothing in it.
"""

import itertools
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal, cast

from scheduler.kvcache.files import OsFiles

SECTOR_BYTES = 512
FILLS = (b"\0", b"\xa5")
"""What a sector may hold that was not written in time."""

Entry = int | Literal["folder", "nothing"]
"""What a path means: a file, by its number, since names come and go; a folder; or nothing."""

State = Mapping[str, bytes | Literal["folder"]]
"""All that is on a disk: paths below the root, each with its file's bytes or as a folder."""


@dataclass(frozen=True, slots=True)
class Wrote:
    """Bytes were appended to a file."""

    file: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Flushed:
    """The bytes of a file are durable."""

    file: int


@dataclass(frozen=True, slots=True)
class Named:
    """A path means this from here on."""

    path: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class FolderFlushed:
    """The names in a folder are durable. The root is the empty path."""

    path: str


@dataclass(frozen=True, slots=True)
class Marked:
    """Something else happened here, such as a commit: the note of a test."""

    note: object


Operation = Wrote | Flushed | Named | FolderFlushed | Marked


class RecordingFiles(OsFiles):
    """The operating system's files below `root`, and `history`, which says what was done to them.

    A change is noted while nobody else makes one. A flush is only noted: what is durable is for the
    history to say.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.history: list[Operation] = []
        self._numbers = itertools.count(1)
        self._by_name: dict[str, int] = {}
        self._by_descriptor: dict[int, int] = {}
        self._lock = threading.Lock()

    def mark(self, note: object) -> None:
        """Notes something that is no operation on a file, in order with those that are."""
        self._note(Marked(note))

    def make_one_folder(self, folder: Path) -> None:
        with self._lock:
            super().make_one_folder(folder)
            self.history.append(Named(self._name(folder), "folder"))

    def create(self, path: Path) -> int:
        with self._lock:
            descriptor = super().create(path)
            number = next(self._numbers)
            self._by_descriptor[descriptor] = self._by_name[self._name(path)] = number
            self.history.append(Named(self._name(path), number))
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        with self._lock:
            num_bytes = super().write(descriptor, buffers)
            written = b"".join(buffers)[:num_bytes]
            self.history.append(Wrote(self._by_descriptor[descriptor], written))
        return num_bytes

    def flush(self, descriptor: int) -> None:
        self._note(Flushed(self._by_descriptor[descriptor]))

    def rename(self, old: Path, new: Path) -> None:
        with self._lock:
            super().rename(old, new)
            number = self._by_name.pop(self._name(old))
            self._by_name[self._name(new)] = number
            self.history.append(Named(self._name(new), number))
            self.history.append(Named(self._name(old), "nothing"))

    def flush_folder(self, folder: Path) -> None:
        self._note(FolderFlushed(self._name(folder)))

    def unlink(self, path: Path) -> None:
        with self._lock:
            super().unlink(path)
            self._by_name.pop(self._name(path), None)
            self.history.append(Named(self._name(path), "nothing"))

    def remove_folder(self, folder: Path) -> None:
        with self._lock:
            super().remove_folder(folder)
            self.history.append(Named(self._name(folder), "nothing"))

    def _name(self, path: Path) -> str:
        name = path.relative_to(self.root).as_posix()
        return "" if name == "." else name

    def _note(self, operation: Operation) -> None:
        with self._lock:
            self.history.append(operation)


@dataclass(frozen=True, slots=True)
class PathIs:
    """How one uncertain path came out."""

    path: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class FileIs:
    """How one uncertain file came out."""

    file: int
    data: bytes


Choice = Sequence[PathIs | FileIs]
"""All that one path or file may come to: first what was durable, last what the program had done."""


@dataclass
class Disk:
    """What is certain of a disk, and what is not, after some operations. `written` are all bytes of
    each file, `certain` how many of them are durable; `meanings` what each path may mean, the
    durable meaning first.
    """

    written: dict[int, bytes] = field(default_factory=dict[int, bytes])
    certain: dict[int, int] = field(default_factory=dict[int, int])
    meanings: dict[str, list[Entry]] = field(default_factory=dict[str, list[Entry]])

    def apply(self, operation: Operation) -> None:
        """One more operation."""
        match operation:
            case Wrote(file, data):
                self.written[file] = self.written.get(file, b"") + data
            case Flushed(file):
                self.certain[file] = len(self.written.get(file, b""))
            case Named(path, entry):
                self.meanings.setdefault(path, ["nothing"]).append(entry)
            case FolderFlushed(folder):
                for path, entries in self.meanings.items():
                    if path.rpartition("/")[0] == folder:
                        del entries[:-1]
            case Marked():
                pass

    def choices(self) -> list[Choice]:
        """All that is uncertain."""
        found: list[Choice] = []
        meant: dict[int, None] = {}
        for path, entries in self.meanings.items():
            different = dict.fromkeys(entries)
            meant |= dict.fromkeys(entry for entry in different if isinstance(entry, int))
            if len(different) > 1:
                found.append([PathIs(path, entry) for entry in different])
        for file in meant:
            versions = torn_versions(self.written.get(file, b""), self.certain.get(file, 0))
            if len(versions) > 1:
                found.append([FileIs(file, data) for data in versions])
        return found

    def state(self, chosen: Choice) -> State:
        """The disk when what is uncertain came out like this."""
        paths = {choice.path: choice.entry for choice in chosen if isinstance(choice, PathIs)}
        files = {choice.file: choice.data for choice in chosen if isinstance(choice, FileIs)}
        state: dict[str, bytes | Literal["folder"]] = {}
        for path, entries in sorted(self.meanings.items()):
            entry = paths.get(path, entries[-1])
            folder = path.rpartition("/")[0]
            if folder and state.get(folder) != "folder":
                continue
            if isinstance(entry, int):
                state[path] = files.get(entry, self.written.get(entry, b""))
            elif entry == "folder":
                state[path] = entry
        return state

    def num_states(self) -> int:
        """In how many ways it can come out; some of them are the same state."""
        return prod(len(choice) for choice in self.choices())

    def all_states(self) -> Iterator[State]:
        """Each of them."""
        for chosen in itertools.product(*self.choices()):
            yield self.state(chosen)

    def some_states(self, seed: int, num_random: int) -> Iterator[State]:
        """That which lost most and that which lost nothing, all that differ from one of them by a
        single path or file, and so many random ones.
        """
        choices = self.choices()
        dice = random.Random(seed)
        for end in (0, -1):
            usual = [choice[end] for choice in choices]
            yield self.state(usual)
            for at, choice in enumerate(choices):
                for other in choice:
                    yield self.state([*usual[:at], other, *usual[at + 1 :]])
        for _ in range(num_random):
            yield self.state([dice.choice(choice) for choice in choices])


def torn_versions(data: bytes, num_certain: int) -> list[bytes]:
    """What a file may hold of which so many bytes are durable: nothing more than these first, all
    of it last.
    """
    cuts = [*range(num_certain, len(data), SECTOR_BYTES), len(data)]
    versions = [data[:cut] for cut in cuts]
    for fill in FILLS:
        for start, end in itertools.pairwise(cuts):
            versions.append(data[:start] + fill * (len(data) - start))
            versions.append(data[:start] + fill * (end - start) + data[end:])
    return [*(version for version in dict.fromkeys(versions) if version != data), data]


def disks_of(history: Sequence[Operation]) -> Iterator[tuple[int, Disk]]:
    """The disk before the first operation and after each, with their number. It is one object that
    changes.
    """
    disk = Disk()
    yield 0, disk
    for number, operation in enumerate(history, 1):
        disk.apply(operation)
        yield number, disk


def rebuild(state: State, root: Path) -> None:
    """Makes the files and folders of a state below `root`, which is there and empty."""
    for path, data in sorted(state.items(), key=lambda item: cast("str", item[0])):
        if data == "folder":
            (root / path).mkdir(mode=0o700)
        else:
            (root / path).write_bytes(data)
            (root / path).chmod(0o600)
