"""`fermata journal backup`."""

import sys
from pathlib import Path

from journal.backup import BackupUnsound, back_up
from journal.errors import JournalError

DONE, UNSOUND, UNUSABLE = 0, 1, 2


def run(path: Path, file: Path, *, force: bool) -> int:
    """Makes a backup, and says what is in it. Returns 0, 1 for a journal that is not sound, and 2
    when it cannot be read or the backup cannot be written; then there is no new file.
    """
    try:
        backup = back_up(path, file, replace=force)
    except BackupUnsound as error:
        print("\n".join(error.findings))
        return _refused(error, UNSOUND)
    except JournalError as error:
        return _refused(error, UNUSABLE)
    print(
        f"{backup.file}: {backup.num_events} events (seq {backup.first_seq} to {backup.last_seq}), "
        f"{backup.num_bytes / 1e6:.1f} MB, verified"
    )
    return DONE


def _refused(error: JournalError, status: int) -> int:
    print(f"fermata journal backup: {error}", file=sys.stderr)
    return status
