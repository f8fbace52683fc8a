"""The one place where the scheduler's parts are put together."""

from contextlib import ExitStack

from journal.journal import Journal
from scheduler.engine.model import ModelSource
from scheduler.history import History
from scheduler.kvcache.naming import KEY_FILE, load_key
from scheduler.kvcache.pointed_files import default_files
from scheduler.recovery import recover
from scheduler.run import Run
from scheduler.service import Service
from scheduler.settings import NS_PER_S, Settings


def build(settings: Settings, source: ModelSource) -> Service:
    """Locks and opens the journal of the state folder, recovers, and makes the service. It comes
    before listening, so it must be fast: nothing of the model is touched here.

    Raises JournalError when the journal cannot be written, or is another process's, and
    KeyDamaged and OSError when there is no key of the installation and none can be made.
    """
    journal = Journal.open(
        settings.state,
        durability=settings.journal.durability,
        gather_steps=settings.journal.gather_steps,
    )
    with ExitStack() as undo:
        undo.callback(journal.close)
        secret = load_key(settings.state / KEY_FILE, default_files()).secret
        recovered = recover(journal, settings.requests.max_lingering)
        recovered.hub.retention_ns = settings.requests.retention_s * NS_PER_S
        history = History.open(journal.file)
        undo.pop_all()
    run = Run(settings, source, journal, recovered)
    return Service(settings, run, recovered.hub, history, secret)
