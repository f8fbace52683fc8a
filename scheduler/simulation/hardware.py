"""What a simulated server runs on."""

from dataclasses import dataclass

from journal.events import ModelFacts
from scheduler.simulation.cost import DiskCost, EngineCost


@dataclass(frozen=True, slots=True)
class Hardware:
    """The speeds of a machine, and the model that it serves."""

    facts: ModelFacts
    engine: EngineCost
    disk: DiskCost
    disk_bytes: int = 2 * 10**12
