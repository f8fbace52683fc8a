"""Journals to draw, and their pictures."""

import re
import shutil
from functools import cache, partial
from pathlib import Path
from random import Random

import msgspec

from journal import events
from journal.events import Record
from journal.journal import Journal
from scheduler.simulation.world import Asked, World
from tests.histories import simulated
from tests.histories.keeping import history_files, keep
from tests.property.pressure_world import LIMIT_NS, S, hardware_of, room_for, settings_under
from tools.timeline_fold import picture_of
from tools.timeline_parts import Entry, Picture
from tools.timeline_window import MAX_SEQ, Window

ALL = Window("all of it", 1, MAX_SEQ, 0, 2**63)
MANY = 10_000
"""Events of a journal for which the picture must still be smooth."""


@cache
def story(name: str) -> tuple[Record, ...]:
    """The journal of a simulated story of tests/histories, or of one below."""
    play = lost_clients if name == "lost_clients" else simulated.STORIES[name]
    return tuple(play().journal.read())


def lost_clients() -> World:
    """One request loses its client and is held until somebody follows it again; another ends
    without one.
    """
    world = simulated.world_of(simulated.ROW, simulated.ROW)
    first, second = f"req_{1:026}", f"req_{2:026}"
    wishes = {
        2: events.ClientGone(request_id=first),
        3: events.ClientGone(request_id=second),
        6: events.ClientAttached(request_id=first),
    }
    for at_s, fact in wishes.items():
        world.plan(at_s * S, partial(world.wish, fact))
    return simulated.run(world)


def kept_story(name: str, folder: Path) -> Path:
    """The same as a file."""
    file = folder / f"{name}.db"
    keep(story(name), file)
    return file


def upgraded_histories(folder: Path) -> list[Path]:
    """Copies of all recorded histories, in the schema of this release."""
    found: list[Path] = []
    for file in history_files():
        copy = folder / file.name
        shutil.copyfile(file, copy)
        Journal.open(copy).close()
        found.append(copy)
    return found


def asked_of(random: Random) -> Asked:
    """A request of any size, at any time of the first 50 seconds."""
    at_ns = random.randrange(50 * S)
    return Asked(random.randint(1, 200), random.randint(2, 60), at_ns=at_ns)


@cache
def crowded() -> tuple[Record, ...]:
    """At least `MANY` events: hundreds of requests, some held, some without a client, and two
    deaths of the server.
    """
    random = Random(7)
    settings = settings_under(
        room_for(1_500, num_rows=8),
        memory__reserve="chunk",
        memory__growth_tokens=1,
        scheduler__max_rows=8,
        scheduler__max_waiting=400,
        kv__max_bytes=3_000_000,
        fake__turn_tokens=30,
        requests__max_deaths=100,
    )
    world = World(settings, hardware_of(), seed=7, checks=False)
    ids = [world.ask(asked_of(random)) for _ in range(260)]
    for at_s in (9, 30):
        world.plan(at_s * S, world.crash)
    for at_s in range(5, 60, 6):
        world.plan(at_s * S, partial(world.take_memory, 900_000))
        world.plan((at_s + 2) * S, partial(world.take_memory, -900_000))
    for request_id in random.choices(ids, k=6):
        gone = events.ClientGone(request_id=request_id)
        world.plan(random.randrange(50 * S), partial(world.wish, gone))
    world.run(LIMIT_NS)
    records = tuple(world.journal.read())
    assert len(records) >= MANY, f"{len(records)} events"
    return records


def drawn(records: tuple[Record, ...], window: Window = ALL) -> Picture:
    """The picture of these records."""
    return picture_of(records, "journal.db", window)


def embedded(html: str) -> Picture:
    """The picture that a file holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return msgspec.json.decode(found[1], type=Picture)


def kind_name(picture: Picture, entry: Entry) -> str:
    """The kind of an entry."""
    return picture.kinds[entry.kind].name
