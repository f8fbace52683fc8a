"""Long random stories of clients that leave and come back, by a seed."""

from random import Random
from typing import Any

from tests.property.client_world import SETUPS, ClientWorld

ACTIONS = {
    "send": 12,
    "send_again": 10,
    "crowd": 4,
    "reuse_key": 1,
    "leave": 10,
    "come": 6,
    "run": 24,
    "collect": 4,
    "hold": 2,
    "release": 4,
    "ballast": 2,
    "sample": 3,
    "cancel": 2,
    "break_row": 2,
    "break_file": 1,
    "trouble": 1,
    "heal": 3,
    "wait": 4,
    "clear": 1,
    "restart": 3,
    "stop": 1,
    "drain": 2,
}
"""What happens, and how often."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "ballast": (0, 0, 0, 100, 200, 400),
    "crowd": (0, 1, 2),
    "trouble": ("disk_full", "io_error", "obstructed"),
    "wait": (5, 30, 100, 400),
    "restart": SETUPS,
    "stop": SETUPS,
    "drain": SETUPS,
    "run": tuple(range(1, 30)),
    "collect": (0, 1, 4),
}
"""The one detail of these; others name a request by a number."""


def details_of(name: str, random: Random) -> tuple[Any, ...]:
    """The details of one action."""
    if name == "send":
        letters = "".join(random.choice("ab") for _ in range(random.randrange(6)))
        more, most = random.choice([0, 1, 3, 15]), random.randrange(1, 40)
        return (letters, more, most, random.randrange(40), random.randrange(12))
    if name == "break_row":
        return (random.randrange(5), random.choice(["start", "prefill", "decode"]))
    if name in {"sample", "heal", "clear"}:
        return ()
    return (random.choice(CHOICES.get(name, range(30))),)


def tell(seed: int, num_actions: int = 80) -> ClientWorld:
    """The world after the story of this seed."""
    random = Random(seed)
    world = ClientWorld(random.choice(SETUPS))
    for name in random.choices([*ACTIONS], [*ACTIONS.values()], k=num_actions):
        getattr(world, name)(*details_of(name, random))
    return world
