"""In long random stories the tables say of held requests what the scheduler knows of them."""

from collections import Counter
from itertools import groupby
from random import Random

from journal.events import Record, RequestFinished
from journal.rebuild import EMPTY, Rebuild
from journal.rows import Changes, PinRow, RequestRow
from scheduler.evolve import fold
from scheduler.request import ENDS, Phase, Request
from scheduler.state import SchedulerState
from tests.property.hold_stories import tell
from tests.property.hold_world import SETUPS, HoldWorld


def tell_of_deaths(seed: int) -> HoldWorld:
    """A story in which the server dies often, and requests are held by hand and by pressure."""
    random = Random(seed)
    world = HoldWorld(random.choice(SETUPS[:6]))
    actions = ["crowd", "run", "run", "run", "hold", "hold", "release", "sample", "restart"]
    for name in random.choices(actions, k=40):
        match name:
            case "sample":
                world.sample()
            case "hold":
                world.hold(random.randrange(9))
                world.collect(0)
            case "restart":
                world.restart(world.setup)
            case _:
                getattr(world, name)(random.randrange(3 if name == "crowd" else 9))
    return world


class Check:
    """Folds the same events twice, and compares after each step."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def story(self, records: list[Record]) -> None:
        state, rebuild = SchedulerState(), Rebuild(EMPTY)
        for _, group in groupby(records, key=lambda record: record.step):
            step = list(group)
            fold(state, step)
            for record in step:
                changes = rebuild.apply(record)
                if changes is not None:
                    self.seen.update(pause.outcome for pause in changes.pauses.values())
                    self.same_end(record, changes)
            rows = rebuild.projection.open_rows()
            assert [row.number for row in rows.requests] == list(state.requests)
            paused = [row.number for row in rows.pauses if row.paused_ns is not None]
            held = [r.number for r in state.requests.values() if r.phase in HELD]
            assert sorted(paused) == sorted(held)
            for row in rows.requests:
                self.same(row, state.requests[row.number])
            for pin in rows.pins:
                self.same_pin(pin, state.requests[pin.number], rebuild)

    def same(self, row: RequestRow, request: Request) -> None:
        self.seen[request.phase] += 1
        names = ["phase", "num_pauses", "num_memory_tokens", "num_disk_tokens"]
        if request.phase is not Phase.PAUSED:  # where the scheduler counts what is in the engine
            names.append("num_prefilled_tokens")
        if request.phase is Phase.RESUMING and request.restoring:
            names = ["phase", "num_pauses"]
        for name in names:
            assert getattr(row, name) == getattr(request, name), (request.request_id, name)

    def same_end(self, record: Record, changes: Changes) -> None:
        """The end of a request says where its prompt came from, and so does its row."""
        event = record.event
        if isinstance(event, RequestFinished):
            row = changes.requests[event.number]
            self.seen["held and finished"] += bool(row.num_pauses)
            for name in ("num_memory_tokens", "num_disk_tokens", "num_prefilled_tokens"):
                assert getattr(row, name) == getattr(event, name), (event.request_id, name)

    def same_pin(self, pin: PinRow, request: Request, rebuild: Rebuild) -> None:
        assert (pin.num_tokens, pin.domain) == (request.saved_tokens, request.pin_domain)
        chain, name = [], pin.last_hash
        while len(chain) < pin.num_blocks and name in rebuild.blocks:
            chain.append(name)
            name = rebuild.blocks[name].parent
        if len(request.pins) == pin.num_blocks:  # else a block was lost
            self.seen["pin"] += 1
            assert chain == list(reversed(request.pins))


HELD = (Phase.PAUSED, Phase.RESUMING)


def test_rows_follow_the_scheduler() -> None:
    check = Check()
    for seed in range(30):
        check.story(tell(seed).driver.records)
        check.story(tell_of_deaths(seed).driver.records)
    assert {*Phase} - check.seen.keys() == set(ENDS)
    wanted = {"resumed", "ended", "given_up", "open", "pin", "held and finished"}
    assert wanted <= check.seen.keys()
