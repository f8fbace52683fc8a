"""What can go wrong with a journal, one class per thing that a caller does differently."""

from pathlib import Path


class JournalError(Exception):
    """The journal cannot be used; the message names the file and says what to do."""


class JournalLocked(JournalError):
    """Another process writes this journal. Reading it stays possible."""


class JournalTooNew(JournalError):
    """A later release wrote this journal, and this one does not know its schema."""


class JournalFull(JournalError):
    """There is no space for the commit. Nothing of it was written; the same commit can be tried
    again.
    """


class JournalBroken(JournalError):
    """The file could not be written or read, or its contents are damaged. Trying again would be
    pretending: the process has to end.
    """


class UnreadableEvent(JournalError):
    """A stored event is not of the shape that its kind and version have in this release. Where it
    is decoded nobody knows in which file it is: that is named on the way out.
    """

    def __init__(self, message: str, file: Path | None = None) -> None:
        super().__init__(message if file is None else f"{file}: {message}")
        self.file = file
