"""The recorded work once more, in virtual time, with settings of one's own."""

from dataclasses import replace
from functools import partial
from statistics import median

import msgspec

from journal.events import Record
from scheduler.engine.base import StartRow
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.settings import Settings
from scheduler.simulation.engine import SimulatedEngine
from scheduler.simulation.hardware import Hardware
from scheduler.simulation.world import Stuck, World
from scheduler.streams import Arrival
from scheduler.whatif.fitting import Facts, Sizes, fit_disk, fit_engine
from scheduler.whatif.recorded import Incident, Recorded, prompt_of
from scheduler.whatif.totals import Totals, totals_of

LIMIT_FACTOR = 100
"""A what-if is given up when it takes so many times as long as the incident did."""

LEAST_LIMIT_NS = 3_600 * 10**9


class Rerun:
    """One what-if. `run` it, then ask for its totals."""

    def __init__(self, incident: Incident, settings: Settings, hardware: Hardware) -> None:
        self.incident = incident
        self.world = World(settings, hardware, checks=False)
        self.outputs: dict[str, int] = {}
        limits = settings.kv.limits(hardware.facts)
        self.block_tokens = 0 if limits is None else limits.block_tokens
        self.own_block_tokens = recorded_block_tokens(incident)
        let_rows_end(self.world.engine, self.outputs)

    def run(self) -> None:
        """Everything that came in comes in again. Raises Stuck when it comes to no end."""
        world = self.world
        last_ns = 0
        for request in self.incident.requests:
            arrival = arrival_of(request, self.own_block_tokens)
            self.outputs[request.request_id] = max(1, request.num_output_tokens)
            world.plan(request.at_ns, partial(self.submit, arrival))
            for after_ns, wish in request.wishes:
                world.plan(request.at_ns + after_ns, partial(world.wish, wish))
            last_ns = max(last_ns, request.at_ns)
        limit_ns = max(LEAST_LIMIT_NS, LIMIT_FACTOR * last_ns)
        while world.turn():
            if world.timeline.now_ns > limit_ns:
                raise Stuck(world.describe("no end within the time that an incident may take"))
        if world.state.requests:
            raise Stuck(world.describe("nothing happens any more"))

    def submit(self, arrival: Arrival) -> None:
        """A request comes in. Where it is not taken it is not: that is what is to be seen."""
        self.world.doors.submit(arrival)

    def records(self) -> list[Record]:
        """All that the what-if's own journal holds."""
        return list(self.world.journal.read())

    def totals(self, wanted: frozenset[str] | None = None) -> Totals:
        """What it came to."""
        return totals_of(self.world.journal.read(), wanted)


def recorded_block_tokens(incident: Incident) -> int:
    """How many tokens each recorded hash stands for."""
    kv = incident.limits.kv
    return 0 if kv is None else kv.block_tokens


def arrival_of(request: Recorded, block_tokens: int) -> Arrival:
    """The request as it came, with tokens that were never its own."""
    received = request.received
    parameters = RequestParameters(
        route=received.route,
        model="fake",
        created=1,
        stream=received.stream,
        sampling=SamplingParameters(seed=received.seed, ignore_end_of_turn=True),
    )
    return Arrival(
        request_id=request.request_id,
        client_request_id=None,
        route=received.route,
        stream=received.stream,
        prompt=prompt_of(request, block_tokens),
        max_tokens=request.max_tokens,
        parameters=parameters,
        num_suffix_tokens=received.num_suffix_tokens,
        keep_output=received.keep_output,
        content_digest=received.content_digest,
        session_digest=received.session_digest,
        key_digest=received.key_digest,
    )


def let_rows_end(engine: SimulatedEngine, outputs: dict[str, int]) -> None:
    """Each row ends after as many tokens as were recorded of it, whatever it may put out."""
    start_row = engine.start_row

    def start(command: StartRow) -> None:
        most = min(command.max_tokens, outputs.get(command.request_id, command.max_tokens))
        start_row(replace(command, max_tokens=max(most, num_output(command) + 1)))

    engine.start_row = start


def num_output(command: StartRow) -> int:
    """What the row had put out before it began."""
    return len(command.token_ids) - command.num_prompt_tokens


def sizes_of(incident: Incident) -> Sizes:
    """What files take in the simulation."""
    model = incident.model
    tokens = max(1, recorded_block_tokens(incident))
    return Sizes(model.kv_bytes_per_token, tokens, model.state_bytes)


def hardware_of(incident: Incident, facts: Facts) -> Hardware:
    """What the recorded server ran on, as far as its facts tell. What a chunk needs beside what it
    leaves is what chunks needed.
    """
    model = incident.model
    if facts.transients:
        need = round(median(facts.transients))
        model = msgspec.structs.replace(model, transient_bytes_per_token=need)
    engine = fit_engine(facts, max(1, recorded_block_tokens(incident)))
    return Hardware(model, engine, fit_disk(facts))
