"""A server to be run under a tracer of system calls: `python -m tests.power.traced_server FOLDER`.

With `--weak` behind it, commits of `power` are flushed no more than others are.
"""

import sys

from journal.database import SYNCHRONOUS
from tools.serve import run

if __name__ == "__main__":
    if "--weak" in sys.argv:
        SYNCHRONOUS["power"] = SYNCHRONOUS["process"]
    settings = {
        "model": "fake",
        "state": sys.argv[1],
        "server.port": 0,
        "memory.ceiling": "none",
        "kv.block_tokens": 16,
        "kv.reserve_bytes": 0,
        "fake.step_ms": 2,
        "fake.turn_tokens": 0,
    }
    sys.exit(run(None, settings))
