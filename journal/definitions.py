"""What the views and triggers of the schema are: a journal in which somebody has put another in the
place of one says something else in SQL than its events do.
"""

from collections.abc import Iterator
from hashlib import sha256

from journal.database import Run
from journal.tables import SCHEMA

DIGESTS = {
    "trigger": {
        "events_have_no_gap": "414fee6e82a43ec5",
        "events_never_change": "1628dcbf974cb07e",
        "events_never_go": "0eb58d4fb1457897",
    },
    "view": {
        "adoptions": "0756cfa5a1c33a2c",
        "blocks": "9523024b1dc32b35",
        "cache_hits": "6e2ddb3773d73c72",
        "cache_misses": "a98dc04d6db24e0b",
        "disk_writes": "062f199a0e1694db",
        "first_tokens": "1a4ab06c27800c53",
        "held_times": "8c5aeaa541cf6e71",
        "memory": "210612a45ac19b91",
        "miss_causes": "503ab63eebdbc76f",
        "orphans": "a8e7c5654c1fa6da",
        "pauses": "76c9ccdcfe456321",
        "phases": "bb86feca36c17a99",
        "pinned_blocks": "f9bff4a1fbe384e3",
        "pins": "8f628f82f96eeef5",
        "rejections": "2b7e9bc34dc4d300",
        "requests": "6586a61e4cdc9013",
        "runs": "9a9a7565cf6cb273",
        "throughput": "74ebe23e4c8c3adc",
        "waits": "e0eca404e0023f4e",
    },
}
"""The first 16 hexadecimal digits of SHA-256 over the statement that makes it, as SQLite keeps it.
The migrations make them; a test compares the two, and says what has to stand here.
"""


def found(run: Run, kind: str) -> dict[str, str]:
    """The views or triggers of a journal with their digests, by name."""
    query = "SELECT name, sql FROM sqlite_master WHERE type = ? ORDER BY name"
    rows = run(query, (kind,)).fetchall()
    return {name: sha256(sql.encode()).hexdigest()[:16] for name, sql in rows}


def changed_definitions(run: Run) -> Iterator[str]:
    """What is not as the schema makes it, one line each. A view of somebody's own changes nothing;
    a trigger of somebody's own does.
    """
    for kind, expected in DIGESTS.items():
        there = found(run, kind)
        for name, digest in expected.items():
            if name not in there:
                yield f"{kind} {name} is missing"
            elif there[name] != digest:
                yield f"{kind} {name} is not that of schema {SCHEMA}"
        if kind == "trigger":
            yield from (f"trigger {name} is none of ours" for name in there.keys() - expected)
