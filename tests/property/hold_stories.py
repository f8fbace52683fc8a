"""Long random stories of a server whose memory is short, by a seed: more crowded than what a search
for small examples tries.
"""

from random import Random
from typing import Any

from tests.property.hold_world import SETUPS, HoldWorld

ACTIONS = {
    "ask": 12,
    "crowd": 6,
    "run": 30,
    "hold": 3,
    "release": 5,
    "ballast": 2,
    "sample": 4,
    "cancel": 2,
    "lose_client": 1,
    "break_row": 1,
    "break_file": 2,
    "lose_file": 1,
    "trouble": 1,
    "heal": 3,
    "measure": 1,
    "wait": 2,
    "clear": 1,
    "restart": 2,
    "stop": 1,
}
"""What happens, and how often."""


CHOICES: dict[str, tuple[Any, ...]] = {
    "ballast": (0, 0, 0, 100, 200, 400),
    "trouble": ("disk_full", "io_error", "obstructed"),
    "measure": (0, 900, 10_000),
    "wait": (5, 30, 100),
    "restart": SETUPS,
    "stop": SETUPS,
    "run": tuple(range(1, 30)),
    "crowd": (0, 1, 2),
}
"""The one detail of these; others name a request or a file by a number."""


def details_of(name: str, random: Random) -> tuple[Any, ...]:
    """The details of one action."""
    if name == "ask":
        letters = "".join(random.choice("ab") for _ in range(random.randrange(7)))
        return (letters, random.choice([0, 1, 3, 15]), random.randrange(1, 40), 0, 3)
    if name == "break_row":
        return (random.randrange(5), random.choice(["start", "prefill", "decode"]))
    if name in {"sample", "heal", "clear"}:
        return ()
    return (random.choice(CHOICES.get(name, range(30))),)


def tell(seed: int, num_actions: int = 60) -> HoldWorld:
    """The world after the story of this seed."""
    random = Random(seed)
    world = HoldWorld(random.choice(SETUPS))
    names = list(ACTIONS)
    weights = list(ACTIONS.values())
    for name in random.choices(names, weights, k=num_actions):
        getattr(world, name)(*details_of(name, random))
    return world
