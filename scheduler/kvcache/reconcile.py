"""At a start: what is on disk against what the journal knows, in both directions.

The kv folder belongs to the server: whatever file is in it and no event speaks of is removed.
Folders that the store did not make are left alone, and counted.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from scheduler.kvcache.files import TEMPORARY_SUFFIX
from scheduler.kvcache.store import ABSENT, BlockStore

_OURS = re.compile(r"[0-9a-f]{8}(/([0-9a-f]{2}|tails))?")
"""The folders that the store makes."""


@dataclass
class Batch:
    """What was found in some of the entries, or among some of the known files at the end.

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


def reconcile(
    store: BlockStore, known: Mapping[str, int], batch_entries: int = 1000
) -> Iterator[Batch]:
    """Compares the folder with `known` (path to size) and removes what is not known. A folder that
    cannot be listed is `stuck` (the whole one under the name ""), and what was known in it is
    `vanished`.

    Each batch is the work on at most `batch_entries` entries or known files, so the caller decides
    how much is done at once. To be exhausted before anything is saved: a file that is just being
    written is not known either.
    """
    seen: set[str] = set()
    batch = Batch()
    for number, (path, entry) in enumerate(_walk(store, ""), 1):
        try:
            if path in known:
                seen.add(path)
                _keep(batch, path, entry, known[path])
            else:
                _sweep(store, batch, path, entry)
        except OSError as error:
            batch.stuck.append((path, str(error)))
        if number % batch_entries == 0:
            yield batch
            batch = Batch()
    yield batch
    missing = [path for path in known if path not in seen]
    for start in range(0, len(missing), batch_entries):
        yield Batch(vanished=missing[start : start + batch_entries])


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


def _keep(batch: Batch, path: str, entry: Entry, num_bytes: int) -> None:
    status = _status(entry)
    if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
        batch.resized.append(path)
    batch.num_kept += 1
    batch.kept_bytes += status.st_size


def _sweep(store: BlockStore, batch: Batch, path: str, entry: Entry) -> None:
    status = _status(entry)
    if stat.S_ISDIR(status.st_mode):
        batch.stuck.append((path, "a folder that is not the server's"))
        return
    store.files.unlink(store.folder / path)
    batch.num_temporary += path.endswith(TEMPORARY_SUFFIX)
    batch.num_swept += not path.endswith(TEMPORARY_SUFFIX)
    batch.swept_bytes += status.st_size


def _status(entry: Entry) -> os.stat_result:
    if isinstance(entry, OSError):
        raise entry
    return entry.stat(follow_symlinks=False)
