"""`fermata cache verify`: every file of saved KV, read whole, against its checksum and the journal.

It only reads, so it may run beside the server. What the server removes meanwhile is no finding: a
block counts only if the journal still knows it after its file was found bad. Nor is a file unknown
that the journal learned of meanwhile, or that has gone.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from journal import audit
from journal.audit import BlockFigures, Pin
from journal.errors import JournalError
from journal.files import journal_file
from journal.reader import JournalReader
from scheduler.kvcache.naming import BlockFile, KeptFile, StateFile, TailFile
from scheduler.kvcache.store import BlockStore, ReadFailed

SOUND, FINDINGS, UNUSABLE = 0, 1, 2


@dataclass
class Report:
    """What was read. `unknown` are files that the journal does not know: the next start of the
    server removes them.
    """

    num_files: int = 0
    num_bytes: int = 0
    findings: list[str] = field(default_factory=list[str])
    unknown: list[str] = field(default_factory=list[str])


def run(state: Path, *, as_json: bool) -> int:
    """Prints findings, one line each, and a last line that counts. Returns the exit status."""
    try:
        with JournalReader.open(state) as reader:
            report = verify(reader, BlockStore(journal_file(state).parent / "kv"))
    except JournalError as error:
        print(f"fermata cache verify: {error}", file=sys.stderr)
        return UNUSABLE
    for finding in report.findings:
        print(finding)
    if as_json:
        print(json.dumps(vars(report)))
    else:
        print(
            f"{report.num_files} files read ({report.num_bytes / 1e6:.1f} MB),"
            f" {len(report.unknown)} unknown files, {len(report.findings)} findings"
        )
    return FINDINGS if report.findings else SOUND


def verify(reader: JournalReader, store: BlockStore) -> Report:
    """Reads every file that the journal knows to be on disk."""
    report = Report()
    for file, num_bytes in known_files(reader):
        if num_bytes is None:
            continue
        found = store.verify(file)
        report.num_files += not (isinstance(found, ReadFailed) and found.kind == "missing")
        report.num_bytes += 0 if isinstance(found, ReadFailed) else found
        wrong = finding_of(found, num_bytes)
        if wrong is not None and still_there(reader, file):
            report.findings.append(f"{file.path}: {wrong}")
    found_now = set(paths_in(store.folder))
    known = {file.path for file, _ in known_files(reader)}
    report.unknown = sorted(p for p in found_now - known if (store.folder / p).is_file())
    return report


KnownFile = tuple[KeptFile, int | None]
"""A file with its recorded size; without one while it is being written."""


def known_files(reader: JournalReader) -> Iterator[KnownFile]:
    """Blocks and states, and what held requests have behind their blocks."""
    for block in audit.blocks(reader):
        yield from files_of(block)
    for pin in audit.pins(reader):
        yield from tail_of(pin)


def files_of(block: BlockFigures) -> Iterator[KnownFile]:
    """The files of a block."""
    num_bytes = None if block.saved_at is None else block.block_bytes
    yield BlockFile(block.domain, block.hash), num_bytes
    if block.state_bytes:
        yield StateFile(block.domain, block.hash), block.state_bytes


def tail_of(pin: Pin) -> Iterator[KnownFile]:
    """The file of a held request, if it has one."""
    if pin.tail_bytes:
        yield TailFile(pin.domain, pin.request_id, pin.num_tokens), pin.tail_bytes


def finding_of(found: int | ReadFailed, num_bytes: int) -> str | None:
    """What is wrong with a file, if anything is."""
    if isinstance(found, ReadFailed):
        return f"{found.kind}: {found.detail}"
    return None if found == num_bytes else f"it has {found} bytes, the journal says {num_bytes}"


def still_there(reader: JournalReader, file: KeptFile) -> bool:
    """Whether the journal still says that the file is there."""
    if isinstance(file, TailFile):
        known = [known for pin in audit.pins(reader) for known, _ in tail_of(pin)]
    else:
        block = audit.block(reader, file.hash)
        known = [] if block is None else [known for known, _ in files_of(block)]
    return file in known


def paths_in(folder: Path) -> Iterator[str]:
    """All files below the folder, relative to it."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.relative_to(folder).as_posix()
