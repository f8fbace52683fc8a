"""What can go wrong with a journal, one class per thing that a caller does differently."""


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
    """A stored event is not of the shape that its kind and version have in this release."""
