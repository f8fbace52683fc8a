"""A journal's requests once more: what is read of it, the fitted costs, and what comes of it."""

from functools import partial
from random import Random

import msgspec
import pytest

from journal import events
from journal.events import AnyEvent, Record
from scheduler.settings import ConfigurationError
from scheduler.simulation.clients import Asked
from scheduler.simulation.models import workstation
from scheduler.simulation.world import World
from scheduler.whatif.carried import NothingRecorded
from scheduler.whatif.configuration import parse_changes, settings_of
from scheduler.whatif.fitting import Facts, Sizes, check_fit, fit_disk, fit_engine, gather
from scheduler.whatif.recorded import incident_of, prompt_of
from scheduler.whatif.rerun import hardware_of, rerun_of, sizes_of
from scheduler.whatif.totals import Totals, totals_of
from tests.loop_driver import settings_of as small_server

SIZES = Sizes(token_bytes=1000, block_tokens=64, state_bytes=0)


def idle_world(ceiling: str) -> World:
    """A simulated server whose speeds are known."""
    settings = small_server(
        memory__ceiling=ceiling, memory__reserve="chunk", kv__memory_bytes=0, fake__turn_tokens=0
    )
    return World(settings, workstation(), seed=3, checks=False)


def recorded_world(ceiling: str, num_requests: int = 6) -> World:
    """What it does with long prompts under this ceiling."""
    world = idle_world(ceiling)
    for number in range(num_requests):
        asked = Asked(30_000 + 4_000 * number, 250 + 40 * number, at_ns=number * 4 * 10**9)
        world.ask(asked)
    world.run(10**14)
    return world


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return list(recorded_world("21GB").journal.read())


def test_costs_that_made_the_facts_are_found_again() -> None:
    random = Random(1)
    facts = Facts()
    for _ in range(200):
        start, length = random.randrange(100_000), random.randrange(16, 2048)
        pairs = length * start + length * (length - 1) // 2
        facts.chunks.append((start, length, 5_000_000 + length * 2_000_000 + pairs * 15))
        rows, positions = random.randrange(1, 9), random.randrange(1_000, 300_000)
        facts.steps.append((rows, positions, 20_000_000 + rows * 1_000_000 + positions * 90))
    cost = fit_engine(facts, 64)
    assert cost.token_ns == pytest.approx(2_000_000, rel=1e-3)
    assert cost.attend_ps == pytest.approx(15_000, rel=1e-3)
    assert cost.launch_ns == pytest.approx(5_000_000, rel=1e-2)
    assert cost.weights_ns == pytest.approx(20_000_000, rel=1e-3)
    assert cost.row_ns == pytest.approx(1_000_000, rel=1e-3)
    assert cost.read_ps == pytest.approx(90_000, rel=1e-3)
    error = check_fit(facts, 64)
    assert error.prefill_permille == 0
    assert error.decode_permille == 0


def test_a_cost_that_would_be_negative_is_left_out_and_the_sum_stays() -> None:
    facts = Facts(steps=[(rows, 1000 * rows, 10_000_000) for rows in range(1, 9)] * 4)
    cost = fit_engine(facts, 64)
    assert min(cost.weights_ns, cost.row_ns, cost.read_ps) >= 0
    predicted = sum(
        cost.weights_ns + rows * cost.row_ns + positions * cost.read_ps // 1000
        for rows, positions, _ in facts.steps
    )
    assert predicted == pytest.approx(sum(ns for _, _, ns in facts.steps), rel=1e-3)


def test_a_second_half_that_is_slower_shows_as_error() -> None:
    fast = [(0, 100, 1_000_000)] * 20
    slow = [(0, 100, 2_000_000)] * 20
    assert check_fit(Facts(chunks=fast + slow), 64).prefill_permille == 500
    assert check_fit(Facts(), 64).prefill_permille is None


def test_a_disk_is_as_fast_as_it_was_while_it_wrote() -> None:
    ns = 1_000_000_000
    facts = Facts(saves=[(0, ns, 10**6), (0, 2 * ns, 10**6), (10 * ns, 11 * ns, 10**6)])
    facts.restores = [(4 * 10**6, 0, 2 * ns), (0, 128, 600)]
    disk = fit_disk(facts)
    assert disk.write_bytes_per_s == 10**6
    assert disk.read_bytes_per_s == 2 * 10**6
    assert fit_engine(facts, 64).copy_ns == 300


def test_the_simulated_hardware_is_found_in_its_own_journal(records: list[Record]) -> None:
    incident = incident_of(records)
    facts = gather(records, sizes_of(incident))
    hardware, true = hardware_of(incident, facts), workstation()
    assert hardware.facts.kv_bytes_per_token == true.facts.kv_bytes_per_token
    for start, length in ((0, 2048), (20_000, 2048), (40_000, 512)):
        fitted = hardware.engine.chunk_ns(start, length)
        assert fitted == pytest.approx(true.engine.chunk_ns(start, length), rel=0.05)
    for rows in ([30_000], [50_000]):
        assert hardware.engine.step_ns(rows) == pytest.approx(true.engine.step_ns(rows), rel=0.01)
    error = check_fit(facts, 256)
    assert (error.prefill_permille, error.decode_permille) == (0, 0)


def test_unchanged_settings_give_the_recorded_totals(records: list[Record]) -> None:
    recorded, again = totals_of(records), rerun(records, {})
    assert (again.finished, again.pauses) == (recorded.finished, recorded.pauses)
    assert recorded.pauses > 0
    assert again.total_ms == pytest.approx(recorded.total_ms, rel=0.1)
    assert again.held_ms == pytest.approx(recorded.held_ms, rel=0.1)
    assert again.prefilled_tokens == recorded.prefilled_tokens
    assert again.output_tokens == recorded.output_tokens


@pytest.mark.parametrize("power", [False, True])
def test_a_server_that_died_is_away_as_long_as_it_was(power: bool) -> None:
    world = idle_world("40GB")
    world.downtime_ns = 50 * 10**9
    for number in range(2):
        world.ask(Asked(20_000, 1_500, at_ns=number * 10**9))
    world.plan(80 * 10**9, partial(world.crash, power=power))
    world.run(10**14)
    records = list(world.journal.read())
    first, second = incident_of(records).lives
    assert second.began_ns - first.ended_ns >= 50 * 10**9
    recorded, again = totals_of(records), rerun(records, {})
    assert (again.requests, again.finished) == (recorded.requests, recorded.finished) == (2, 2)
    assert again.total_ms == pytest.approx(recorded.total_ms, rel=0.05)
    assert again.total_ms > 130_000


def test_a_server_that_was_stopped_comes_back_when_it_came() -> None:
    world = idle_world("40GB")
    world.downtime_ns = 40 * 10**9
    world.ask(Asked(20_000, 1_500))
    world.plan(70 * 10**9, world.stop)
    world.run(10**14)
    records = list(world.journal.read())
    assert [life.stop_ns for life in incident_of(records).lives] == [70 * 10**9, None]
    recorded, again = totals_of(records), rerun(records, {})
    assert (again.finished, again.pauses) == (recorded.finished, recorded.pauses) == (1, 1)
    assert again.total_ms == pytest.approx(recorded.total_ms, rel=0.05)


@pytest.fixture(scope="module")
def short() -> list[Record]:
    return list(recorded_world("40GB", num_requests=1).journal.read())


def test_weights_take_as_long_to_load_as_they_did(short: list[Record]) -> None:
    incident = incident_of(short)
    hardware = hardware_of(incident, gather(short, sizes_of(incident)))
    quick = rerun_of(incident, settings_of(incident, {}), hardware)
    quick.run()
    incident.lives[0].load_ns = 200 * 10**9
    slow = rerun_of(incident, settings_of(incident, {}), hardware)
    slow.run()
    one, other = quick.totals().first_token_p50_ms, slow.totals().first_token_p50_ms
    assert one is not None
    assert other is not None
    assert other > one + 100_000


def test_nothing_is_kept_that_nobody_asks_for(short: list[Record]) -> None:
    incident = incident_of(short)
    hardware = hardware_of(incident, gather(short, sizes_of(incident)))
    settings = settings_of(incident, {"journal.snapshot_events": 100})
    one, other = (rerun_of(incident, settings, hardware) for _ in range(2))
    other.forget = lambda: None
    one.run()
    other.run()
    assert one.totals() == other.totals()
    one.forget()
    journal = one.world.journal
    assert len(list(journal.read())) < len(list(other.world.journal.read())) // 3
    assert all(journal.prompt_tokens(row.request_id) is None for row in journal.requests.values())


def rerun(records: list[Record], changes: dict[str, object]) -> Totals:
    incident = incident_of(records)
    facts = gather(records, sizes_of(incident))
    again = rerun_of(incident, settings_of(incident, changes), hardware_of(incident, facts))
    again.run()
    return again.totals()


@pytest.mark.parametrize("ceiling", ["20GB", "40GB"])
def test_another_ceiling_gives_what_a_server_has_at_it(records: list[Record], ceiling: str) -> None:
    there = totals_of(recorded_world(ceiling).journal.read())
    imagined = rerun(records, {"memory.ceiling": ceiling})
    assert (imagined.finished, imagined.pauses) == (there.finished, there.pauses)
    assert imagined.total_ms == pytest.approx(there.total_ms, rel=0.2)
    assert imagined.held_ms == pytest.approx(there.held_ms, rel=0.2, abs=500)


def test_prompts_share_what_their_hashes_share(records: list[Record]) -> None:
    first, second = incident_of(records).requests[:2]
    shared = msgspec.structs.replace(second.received)
    tokens = prompt_of(first, 256)
    assert len(tokens) == first.num_prompt_tokens
    second.hashes = (*first.hashes[:3], *second.hashes[3:])
    other = prompt_of(second, 256)
    assert tokens[: 3 * 256] == other[: 3 * 256]
    assert tokens[3 * 256 : 4 * 256] != other[3 * 256 : 4 * 256]
    assert shared == second.received


def test_settings_are_the_recorded_ones_with_the_changes(records: list[Record]) -> None:
    incident = incident_of(records)
    incident.configuration |= {"a.setting.of.another.release": 1, "memory.ceiling": "auto"}
    plain = settings_of(incident, {})
    assert plain.memory.ceiling == incident.limits.ceiling_bytes
    changed = settings_of(incident, parse_changes(["memory.ceiling=52GB", "scheduler.max_rows=3"]))
    assert changed.memory.ceiling == 52 * 10**9
    assert changed.scheduler.max_rows == 3
    assert changed.memory.reserve == "chunk"
    assert parse_changes(["server.drain_limit_ms=3"]) == {"server.drain_limit_ms": "3"}
    for wrong in ("memory.ceiling", "memory.roof=3", "=3"):
        with pytest.raises(ConfigurationError, match="--set"):
            parse_changes([wrong])
    with pytest.raises(ConfigurationError, match="max_rows"):
        settings_of(incident, {"scheduler.max_rows": "many"})


def test_a_journal_without_requests_is_nothing_to_start_from() -> None:
    with pytest.raises(NothingRecorded, match="no start"):
        incident_of([])
    world = recorded_world("21GB", num_requests=0)
    with pytest.raises(NothingRecorded, match="no request"):
        incident_of(world.journal.read())


def step(at_ns: int, event: AnyEvent) -> Record:
    return Record(1, 1, 1, "fact", at_ns, event)


def decoded(at_ns: int) -> Record:
    event = events.TokensDecoded(batch=1, numbers=(1,), counts=(1,), ended=(), duration_ns=1)
    return step(at_ns, event)


def test_work_takes_from_the_end_of_what_came_before_it_or_from_when_it_came() -> None:
    batch = events.BatchChanged(batch=1, numbers=(1,), joined=(1,), left=())
    planned = events.PrefillChunkPlanned(request_id="r", number=2, chunk=1, start=0, length=10)
    done = events.PrefillChunkDone(
        request_id="r", chunk=1, start=0, length=10, duration_ns=5, peak_bytes=70, active_bytes=0
    )
    told = [step(500, planned), step(800, done), step(900, batch), decoded(1_000), decoded(1_110)]
    told += [step(1_120, planned), step(1_850, done), decoded(1_970)]
    facts = gather(told, SIZES)
    assert facts.chunks == [(0, 10, 300), (0, 10, 730)]
    assert [ns for _, _, ns in facts.steps] == [100, 110, 120]
    assert facts.transients == [7, 7]


def test_nothing_is_taken_while_a_row_is_filled_and_nothing_of_the_time_before_a_start(
    records: list[Record],
) -> None:
    batch = events.BatchChanged(batch=1, numbers=(1,), joined=(1,), left=())
    resumed = next(r.event for r in records if isinstance(r.event, events.ResumeStarted))
    restored = next(
        r.event
        for r in records
        if isinstance(r.event, events.ChainRestored) and r.event.request_id == resumed.request_id
    )
    started = next(r.event for r in records if isinstance(r.event, events.ServerStarted))
    told = [step(0, batch), decoded(100), step(110, resumed), decoded(900), step(950, restored)]
    told += [decoded(1_000), decoded(1_100), step(2_000, started), decoded(9_000)]
    told += [step(9_500, batch), decoded(9_700)]
    assert [ns for _, _, ns in gather(told, SIZES).steps] == [100, 100, 200]


def test_slow_restores_took_turns_and_say_nothing_of_the_disk() -> None:
    facts = Facts(restores=[(1000, 0, 1000), (2000, 0, 2000), (1000, 0, 900_000)])
    assert fit_disk(facts).read_bytes_per_s == 10**9
    assert fit_engine(facts, 64).copy_ns == 0


def test_a_peak_between_two_readings_counts() -> None:
    reading = events.MemorySampled(
        active_bytes=5, cached_bytes=9, peak_bytes=7, process_bytes=99, available_bytes=99
    )
    higher = msgspec.structs.replace(reading, active_bytes=8)
    assert totals_of([step(0, reading)]).peak_bytes == 7
    assert totals_of([step(0, higher), step(1, reading)]).peak_bytes == 8
