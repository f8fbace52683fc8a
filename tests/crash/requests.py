"""What the server that is killed was asked, and how it is set up."""

from pathlib import Path

from scheduler.settings import Settings
from tests.loop_driver import settings_of

FINISHED = "req_finished".ljust(30, "0")
DECODING = "req_decoding".ljust(30, "0")
PREFILLING = "req_prefilling".ljust(30, "0")
WAITING = "req_waiting".ljust(30, "0")

REQUESTS = (
    (FINISHED, "short", 2),
    (DECODING, "goes on", 400),
    (PREFILLING, "a long prompt " * 500, 20),
    (WAITING, "comes last", 20),
)


def kill_settings(folder: Path) -> Settings:
    """Two rows, and a prefill that takes its time: 7,000 tokens in chunks of 64."""
    return settings_of(
        state=folder,
        scheduler__max_rows=2,
        fake__turn_tokens=0,
        fake__step_ms=2,
        fake__prefill_tokens_per_s=50_000,
    )
