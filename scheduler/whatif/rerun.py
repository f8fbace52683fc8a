"""Requests once more, or for the first time, in virtual time, with settings of one's own."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median

import msgspec

from journal import events
from journal.events import Record
from scheduler.engine.base import StartRow
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.request import Phase
from scheduler.settings import Settings
from scheduler.simulation.engine import SimulatedEngine
from scheduler.simulation.hardware import Hardware
from scheduler.simulation.marks import Killed
from scheduler.simulation.world import Stuck, World
from scheduler.streams import Arrival
from scheduler.whatif.fitting import Facts, Sizes, fit_disk, fit_engine
from scheduler.whatif.recorded import FAKE, Incident, Life, Recorded, Wish, prompt_of
from scheduler.whatif.totals import Counting, End, Totals

NO_NEWS_NS = 3_600 * 10**9
"""A what-if is given up when for so long nobody got a token or came to an end, and nothing came."""

RETRY_NS = 1_000_000_000
"""A client that finds the server away, or full, tries again after so long."""

FORGET_EVERY = 4_096
"""Turns of the simulation between two looks at what its journal need not keep any more."""

Watch = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Coming:
    """A request that comes at `at_ns`: what is sent is made when it is sent, since prompts are long
    and there may be many. It puts out `num_output_tokens` where that is known. The wishes come so
    long after it.
    """

    at_ns: int
    arrival: Callable[[], Arrival]
    num_output_tokens: int | None
    wishes: Sequence[tuple[int, Wish]] = ()


@dataclass(frozen=True, slots=True)
class JournalEnd:
    """Where a journal ends. What somebody wants of a request comes by then, and what is still held
    is counted up to there. These requests had not ended.
    """

    at_ns: int
    still_open: frozenset[str]


@dataclass
class RerunWorld(World):
    """A simulated server whose rows end as those of the requests did, and whose lives begin and end
    as the recorded ones. `saves_elsewhere`: what it saves is not in its engine's allocator.
    """

    lives: Sequence[Life] = (Life(),)
    saves_elsewhere: bool = False
    outputs: dict[str, int] = field(default_factory=dict[str, int])

    def begin(self) -> None:
        """As `World.begin`; the weights take as long to load as they did in this life."""
        super().begin()
        let_rows_end(self.engine, self.outputs)
        life = self.lives[min(self.nonce, len(self.lives)) - 1]
        self.engine.free_ns = self.timeline.now_ns + life.load_ns
        if self.saves_elsewhere:
            self.engine.held_elsewhere = lambda: self.ballast_bytes

    def end_life(self, life: Life, away_ns: int) -> None:
        """It ends as it did, and is away for as long."""
        self.downtime_ns = away_ns
        if life.stop_ns is not None:
            self.stop()
        elif self.is_up:
            raise Killed(power=False)


class Rerun:
    """One what-if. `run` it, then ask for its totals. `refusal` is the first request that would not
    fit if it were alone. `end` is that of the journal, if the requests are from one.
    """

    def __init__(
        self, coming: Iterable[Coming], world: RerunWorld, end: JournalEnd | None = None
    ) -> None:
        self.coming = iter(coming)
        self.world = world
        self.end = end
        self.news_ns = 0
        self.num_taken = 0
        self.num_expected = 0
        self.num_received = 0
        self.counting = Counting()
        self.refusal: events.RequestRejected | None = None
        world.journal.note = self.note

    def note(self, record: Record) -> None:
        """One record of the simulation."""
        event = record.event
        self.counting.take(record)
        self.num_received += isinstance(event, events.RequestReceived)
        if isinstance(event, events.TokensDecoded | End):
            self.expect(self.world.timeline.now_ns)
        if isinstance(event, events.RequestRejected) and event.numbers and not self.refusal:
            self.refusal = event

    def expect(self, at_ns: int) -> None:
        """Something goes on at this moment."""
        self.news_ns = max(self.news_ns, at_ns)

    def run(self, watch: Watch | None = None) -> None:
        """Everything comes in. `watch` hears now and then how many have come. Raises Stuck when it
        comes to no end.
        """
        world = self.world
        self.plan_lives()
        self.plan_next()
        turns = 0
        while world.turn():
            turns += 1
            if turns % FORGET_EVERY == 0:
                self.forget()
                if watch is not None:
                    watch(self.num_taken)
            if self.only_held_are_left():
                return
            if world.state.requests and world.timeline.now_ns > self.news_ns + NO_NEWS_NS:
                self.give_up("nobody has got anything for an hour")
                return
        if world.state.requests:
            self.give_up("nothing happens any more")

    def only_held_are_left(self) -> bool:
        """Whether all that is open is held, and the journal tells of nothing that would change it.
        A request without a client that had been cancelled by then is waited for.
        """
        world, state = self.world, self.world.state
        if self.end is None or world.timeline.now_ns <= self.end.at_ns:
            return False
        if not state.requests or self.num_expected > self.num_received:
            return False
        due = state.lost.keys() | state.found.keys()
        left = self.end.still_open
        return all(
            request.phase is Phase.PAUSED
            and request.stays_held
            and (request.request_id in left or number not in due)
            for number, request in state.requests.items()
        )

    def give_up(self, why: str) -> None:
        """Nothing goes on. Raises Stuck unless that is as somebody wants it."""
        requests = self.world.state.requests.values()
        if self.end is None or not all(request.stays_held for request in requests):
            raise Stuck(self.world.describe(why))

    def plan_lives(self) -> None:
        """Each recorded end of a life, if another one came after it."""
        for life, following in pairwise(self.world.lives):
            away_ns = max(0, following.began_ns - life.ended_ns)
            self.expect(following.began_ns)
            end_ns = life.ended_ns if life.stop_ns is None else life.stop_ns
            self.world.plan(end_ns, partial(self.world.end_life, life, away_ns))

    def plan_next(self) -> None:
        """The next request, when it is time; one at a time, since there may be many."""
        coming = next(self.coming, None)
        if coming is not None:
            self.num_expected += 1
            self.expect(coming.at_ns)
            self.world.plan(coming.at_ns, partial(self.come, coming))

    def come(self, coming: Coming) -> None:
        """A request comes in, and the next one is planned."""
        arrival = coming.arrival()
        if coming.num_output_tokens is not None:
            self.world.outputs[arrival.request_id] = max(1, coming.num_output_tokens)
        for after_ns, wish in coming.wishes:
            self.expect(coming.at_ns + after_ns)
            self.world.plan(coming.at_ns + after_ns, partial(self.world.wish, wish))
        self.submit(arrival)
        self.plan_next()

    def submit(self, arrival: Arrival) -> None:
        """A request is sent until somebody takes it, or refuses it."""
        if self.world.doors.submit(arrival) is not None:
            self.num_taken += 1
            return
        self.world.plan(self.world.timeline.now_ns + RETRY_NS, partial(self.submit, arrival))

    def forget(self) -> None:
        """What nothing will ask for any more."""
        world = self.world
        world.journal.forget(frozenset(r.request_id for r in world.state.requests.values()))
        world.disk.unlinked.clear()  # a loss of power would bring them back, and there is none

    def totals(self) -> Totals:
        """What it came to."""
        if self.end is None:
            return self.counting.totals()
        timeline = self.world.timeline
        return self.counting.totals(timeline.wall_ns() - timeline.now_ns + self.end.at_ns)


def rerun_of(
    incident: Incident,
    settings: Settings,
    hardware: Hardware,
    wanted: frozenset[str] | None = None,
) -> Rerun:
    """The recorded requests, by whose totals those that are wanted are counted."""
    world = RerunWorld(
        settings,
        hardware,
        checks=False,
        lives=incident.lives,
        saves_elsewhere=incident.model.name == FAKE,
    )
    still_open = frozenset(request.request_id for request in incident.requests if not request.ended)
    end = JournalEnd(incident.lives[-1].ended_ns, still_open)
    rerun = Rerun(coming_of(incident), world, end)
    rerun.counting.wanted, rerun.counting.carried = wanted, incident.carried
    return rerun


def coming_of(incident: Incident) -> Iterator[Coming]:
    """The recorded requests, in the order in which they came."""
    block_tokens = recorded_block_tokens(incident)
    for request in incident.requests:
        yield Coming(
            request.at_ns,
            partial(arrival_of, request, block_tokens),
            request.known_length,
            request.wishes,
        )


def recorded_block_tokens(incident: Incident) -> int:
    """How many tokens each recorded hash stands for."""
    kv = incident.limits.kv
    return 0 if kv is None else kv.block_tokens


def arrival_of(request: Recorded, block_tokens: int) -> Arrival:
    """The request as it came, with tokens that were never its own."""
    received = request.received
    parameters = RequestParameters(
        route=received.route,
        model=FAKE,
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
    """Each row ends after as many tokens as are known of it, whatever it may put out."""
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
    hardware = Hardware(model, engine, fit_disk(facts))
    if incident.free_bytes is not None:
        hardware = replace(hardware, disk_bytes=incident.free_bytes)
    return hardware
