"""Named points at which a process may end, for tests and `fermata crash`.

Production code says that it has come to a point by `reach`, which does nothing unless a hook is
installed. Nothing here reads the environment or a setting: only who starts a process to end it
there installs one.
"""

from collections.abc import Callable, Iterable

from journal.events import KINDS, kind_of

Hook = Callable[[str], None]

_hooks: list[Hook] = []
"""The hook, if any: a list, so that nobody has to rebind a global."""


def reach(name: str) -> None:
    """The process has come to this point. Called from every thread, and often."""
    if _hooks:
        _hooks[0](name)


def reach_kinds(prefix: str, things: Iterable[object]) -> None:
    """The process has come to a point that there is for each kind of event or effect. A point's
    name is the prefix with the kind behind it.
    """
    if _hooks:
        for thing in things:
            _hooks[0](prefix + kind_of(type(thing).__name__))


def is_armed() -> bool:
    """Whether a hook is installed."""
    return bool(_hooks)


def install(hook: Hook) -> None:
    """Has this called at each point, in the thread that comes there, until `remove`. What it raises
    is raised there. Called before anything is opened.
    """
    assert not _hooks, "one hook at a time"
    _hooks.append(hook)


def remove() -> None:
    """Has nothing called any more."""
    _hooks.clear()


# A compaction writes it into the journal's successor: no step of a server has it.
_UNCOMMITTED = ("state_carried",)

_WHEN = {"before": "is about to be", "after": "has been"}


def _event_points() -> dict[str, str]:
    return {
        f"commit.{when}.{kind}": f"a step with {kind} {words} committed"
        for kind in KINDS
        if kind not in _UNCOMMITTED
        for when, words in _WHEN.items()
    }


EFFECTS = (
    "accept_request",
    "drop_row",
    "end_request",
    "join_request",
    "reclaim_memory",
    "reject_request",
    "remove_files",
    "restore_row",
    "run_chunk",
    "save_blocks",
    "save_tail",
    "send_tokens",
    "set_batch",
    "shrink_tier",
    "start_row",
)


def _effect_points() -> dict[str, str]:
    return {f"effect.after.{kind}": f"the effect {kind} has been performed" for kind in EFFECTS}


_WRITTEN = {
    "block": "the file of a block",
    "state": "the file of a state",
    "tail": "the tail of a held request",
    "key": "the key of saved KV",
    "probe": "the file by which a disk is tried",
}
_WRITTEN_BY = {
    "create": "created under another name",
    "write": "written by a piece",
    "flush": "flushed",
    "rename": "given its name",
}
_READ = ("block", "state", "tail")
_FOLDERS = {
    "blocks": "a folder of blocks and states",
    "tails": "the folder of tails",
    "parent": "a folder in which folders are made",
}


def _file_points() -> dict[str, str]:
    """Around each operation that leaves something behind, or that may wait for a disk. Closing a
    file and listing a folder do neither.
    """
    points: dict[str, str] = {}
    for when, words in _WHEN.items():
        for what, thing in _WRITTEN.items():
            for operation, done in _WRITTEN_BY.items():
                points[f"file.{operation}.{when}.{what}"] = f"{thing} {words} {done}"
        for what in ("block", "state", "tail", "probe", "unknown"):
            thing = _WRITTEN.get(what, "a file that nobody knows")
            points[f"file.unlink.{when}.{what}"] = f"{thing} {words} removed"
        for what in _READ:
            points[f"file.open.{when}.{what}"] = f"{_WRITTEN[what]} {words} opened to be read"
            points[f"file.read.{when}.{what}"] = f"a piece of {_WRITTEN[what]} {words} read"
        for what, thing in _FOLDERS.items():
            points[f"file.flush_folder.{when}.{what}"] = f"{thing} {words} flushed"
        points[f"file.make_folder.{when}"] = f"a folder of the store {words} made"
    return points


_JOURNAL = {
    "journal.open.locked": "the journal is locked, and not opened yet",
    "journal.open.connected": "the journal's file is open, and of this release's schema",
    "journal.open.done": "the journal is open, and nothing in it is nobody's",
    "journal.begin.after": "a transaction has begun",
    "journal.commit.before.process": "all of a transaction is written, and not committed",
    "journal.commit.after.process": "a transaction is committed",
    "journal.commit.before.power": "the same, for one that the death of the machine spares",
    "journal.commit.after.power": "the same, for one that the death of the machine spares",
    "journal.write.events": "in a step's transaction its events are written, and nothing else",
    "journal.write.side": "in a step's transaction tokens and prompts are written as well",
    "journal.write.changes": "in a step's transaction the projections are written as well",
    "journal.gather.before": "the tokens of many steps are about to be put together",
    "journal.gather.within": "they are put together, and the rows of the steps are still there",
    "journal.gather.after": "they are put together, in a transaction that goes on",
    "journal.checkpoint.before": "the log is about to be copied into the file",
    "journal.checkpoint.after": "the log has been copied",
    "journal.snapshot.before": "a snapshot of the state is about to be kept",
    "journal.snapshot.within": "the new snapshot is written, and the oldest still there",
    "journal.snapshot.after": "a snapshot is kept",
    "journal.purge.before": "tokens of ended requests are about to go",
    "journal.purge.within": "the tokens are gone, and the parameters are not",
    "journal.purge.after": "tokens and parameters are gone",
    "journal.compaction.begun": "a successor of the journal is begun",
    "journal.compaction.folded": "a portion of the projections is folded for it",
    "journal.compaction.copied": "a portion of the events is copied into it",
    "journal.compaction.gathered": "the journal has put together what its successor takes over",
    "journal.compaction.left_wal": "the journal stands alone, without a log",
    "journal.compaction.written": "all of the successor is written, and it is not flushed",
    "journal.compaction.flushed": "the successor is whole and flushed",
    "journal.compaction.renamed": "the successor has the journal's name",
    "journal.compaction.folder_flushed": "and the folder says so durably",
    "journal.compaction.connected": "the successor is open as the journal",
    "journal.close.before": "the journal is about to be closed",
    "journal.close.after": "the journal is closed, and its lock given back",
}
_LIVES = {
    "recovery.state": "the state is folded, and no token is read",
    "recovery.done": "everything is recovered, and no step was taken",
    "recovery.started": "the first step of a run is taken, and no engine started",
    "recovery.compared": "the known files have been looked at",
    "recovery.swept": "the unknown files have been removed",
    "hub.flush.before": "the effects are performed, and the streams have not heard",
    "hub.flush.after": "the streams have been handed what the step brought",
    "step.done": "a step is at its end",
    "stop.drained": "a stop has come to its end, and the engine still runs",
    "stop.files.before": "the engine has stopped, and the store of saved KV is about to be closed",
    "stop.files.after": "the store of saved KV is closed",
}
_HTTP = {
    "http.start.before": "the head of a stream is about to be sent",
    "http.start.after": "the head of a stream is sent",
    "http.event.before": "an event is about to be sent",
    "http.event.after": "an event is sent",
    "http.end.before": "the end of a stream is about to be sent",
    "http.end.after": "a stream is sent to its end",
    "http.whole.before": "an answer in one object is about to be sent",
}

POINTS: dict[str, str] = {
    **_event_points(),
    **_effect_points(),
    **_file_points(),
    **_JOURNAL,
    **_LIVES,
    **_HTTP,
}
"""Every point there is, and what has happened there."""
