"""At a start: what is on disk against what the journal knows, in both directions.

What is known and gone has to be said before the first match, and is found by looking at the known
files alone. What is there and not known is removed while the server works. The kv folder belongs to
the server: whatever file is in it and no event speaks of goes, but for what was written meanwhile.
Folders that the store did not make are left alone, and counted.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from scheduler.kvcache.files import TEMPORARY_SUFFIX
from scheduler.kvcache.store import ABSENT, BlockStore

_OURS = re.compile(r"[0-9a-f]{8}(/([0-9a-f]{2}|tails))?")
"""The folders that the store makes."""


@dataclass
class Batch:
    """What was found among some of the known files, or some of the folders' entries.

    `vanished`: known and not on disk. `resized`: in its place is something of another size
    than recorded, or no file: damaged. `stuck`: could not be removed or looked at, with the
    reason. Paths are relative to the store's folder.
    """

    num_kept: int = 0
    kept_bytes: int = 0
    num_temporary: int = 0
    num_swept: int = 0
    swept_bytes: int = 0
    vanished: list[str] = field(default_factory=list[str])
    resized: list[str] = field(default_factory=list[str])
    stuck: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def compare(
    store: BlockStore, known: Mapping[str, int], batch_entries: int = 1000
) -> Iterator[Batch]:
    """Looks at each of the files in `known` (path to size). What cannot be looked at is `stuck`,
    and may still be good when it is read.

    Each batch is the work on at most `batch_entries` files. To be exhausted before the first match.
    """
    folder = str(store.folder)
    paths = iter(known.items())
    while some := list(islice(paths, batch_entries)):
        batch = Batch()
        for path, num_bytes in some:
            try:
                status = os.lstat(f"{folder}/{path}")
            except OSError as error:
                _miss(batch, path, error)
            else:
                _keep(batch, path, status, num_bytes)
        yield batch


def sweep(
    store: BlockStore, known: Mapping[str, int], batch_entries: int = 1000
) -> Iterator[Batch]:
    """Removes what is not in `known`, but for what was written since `store.begin_sweep`, which
    comes before anything is. A folder that cannot be listed is `stuck` (the whole one under the
    name "").

    Each batch is the work on at most `batch_entries` entries, so the caller decides how much is
    done at once.
    """
    batch = Batch()
    for number, (path, entry) in enumerate(_walk(store, ""), 1):
        if path not in known:
            try:
                _sweep(store, batch, path, entry)
            except OSError as error:
                if error.errno not in ABSENT:  # Else the server itself has removed it meanwhile.
                    batch.stuck.append((path, str(error)))
        if number % batch_entries == 0:
            yield batch
            batch = Batch()
    yield batch


Entry = os.DirEntry[str] | OSError
"""What is in a folder; or of one of the store's own folders, why it cannot be listed."""


def _walk(store: BlockStore, inner: str) -> Iterator[tuple[str, Entry]]:
    """All entries but the store's own folders, which are gone into."""
    try:
        entries = list(store.files.list_folder(store.folder / inner))
    except OSError as error:
        if error.errno not in ABSENT:
            yield inner, error
        return
    for entry in entries:
        path = f"{inner}/{entry.name}" if inner else entry.name
        if entry.is_dir(follow_symlinks=False) and _OURS.fullmatch(path):
            yield from _walk(store, path)
        else:
            yield path, entry


def _miss(batch: Batch, path: str, error: OSError) -> None:
    if error.errno in ABSENT:
        batch.vanished.append(path)
    else:
        batch.stuck.append((path, str(error)))


def _keep(batch: Batch, path: str, status: os.stat_result, num_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
        batch.resized.append(path)
    batch.num_kept += 1
    batch.kept_bytes += status.st_size


def _sweep(store: BlockStore, batch: Batch, path: str, entry: Entry) -> None:
    if isinstance(entry, OSError):
        raise entry
    status = entry.stat(follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        batch.stuck.append((path, "a folder that is not the server's"))
    elif store.sweep(path):
        batch.num_temporary += path.endswith(TEMPORARY_SUFFIX)
        batch.num_swept += not path.endswith(TEMPORARY_SUFFIX)
        batch.swept_bytes += status.st_size
