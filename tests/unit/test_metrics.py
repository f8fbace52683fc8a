"""What is counted of held requests and of memory."""

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import SchedulerCollector
from journal import events
from scheduler.metrics import HELD_BOUNDS_NS, Metrics
from tests.unit.core_driver import CoreDriver
from tests.unit.hold_driver import CEILING, EMERGENCY, FINE, HIGH, HoldDriver, hold_limits
from tests.unit.kv_driver import STATEFUL, KvDriver
from tests.unit.orphan_driver import OrphanDriver

SECOND = 10**9


def counted(driver: CoreDriver) -> Metrics:
    """The whole run, as if it were one step."""
    metrics = Metrics()
    metrics.count(driver.state, driver.records)
    return metrics


def published(metrics: Metrics) -> dict[str, float]:
    """What /metrics shows of it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SchedulerCollector(metrics))
    return {
        sample.name + "".join(f",{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_pauses_resumes_and_drops_are_counted() -> None:
    driver = HoldDriver()
    driver.decode("xy", "XY")
    driver.press(HIGH)
    driver.save_all()
    driver.step(driver.tail_failed("req_b"))
    driver.step(driver.freed("req_b"))
    driver.hold("req_a")
    metrics = counted(driver)
    assert (metrics.num_held, metrics.num_pausing, metrics.num_waiting) == (1, 1, 1)
    driver.come_to_rest("req_a")
    for _ in range(3):
        driver.step(driver.sampled(FINE))
    driver.pass_ns(40 * SECOND)
    driver.release("req_a")
    metrics = counted(driver)
    assert dict(metrics.pauses) == {"high": 1, "operator": 1}
    assert dict(metrics.kv_drops) == {"io_error": 1}
    assert metrics.num_resuming == 2
    assert metrics.resumes == 2
    assert metrics.held_ns.counts[HELD_BOUNDS_NS.index(60 * SECOND)] == 1
    found = published(metrics)
    assert found["fermata_pauses_total,operator"] == 1
    assert found["fermata_kv_drops_total,io_error"] == 1
    assert found["fermata_resumes_total"] == 2
    assert found["fermata_requests_resuming"] == 2
    assert found["fermata_held_seconds_count"] == 2
    assert found["fermata_held_seconds_sum"] > 40
    driver.step(driver.restored("req_b"))
    assert counted(driver).num_resuming == 1, "of two rows"


def test_requests_without_a_client_are_counted_and_what_becomes_of_them() -> None:
    driver = OrphanDriver()
    driver.start()
    for chain, key in (("x", ""), ("y", ""), ("z", "k")):
        driver.send(chain, key=key)
    driver.gone("req_a", "req_b", "req_c")
    assert counted(driver).num_orphans == 3
    driver.send("x")
    driver.send("z", key="k")
    metrics = counted(driver)
    assert (metrics.num_orphans, dict(metrics.adoptions)) == (1, {"content": 1, "key": 1})
    driver.tick(60)
    metrics = counted(driver)
    assert (metrics.num_orphans, metrics.orphans_expired) == (0, 1)
    found = published(metrics)
    assert found["fermata_adoptions_total,content"] == 1
    assert found["fermata_adoptions_total,key"] == 1
    assert found["fermata_orphans_expired_total"] == 1
    assert found["fermata_orphans"] == 0
    assert found["fermata_requests_received_total"] == 5


def test_what_the_allocator_gives_back_is_counted_as_measured_but_never_below_nothing() -> None:
    driver = HoldDriver(hold_limits(memory_bytes=1_000_000))
    driver.decode("x")
    driver.press(HIGH, cached_bytes=500_000)
    driver.step(driver.reclaimed(300_000))
    driver.step(driver.reclaimed(-51))
    metrics = counted(driver)
    assert (metrics.reclaims, metrics.reclaimed_bytes) == (2, 300_000)
    found = published(metrics)
    assert found["fermata_memory_reclaims_total"] == 2
    assert found["fermata_memory_reclaimed_bytes_total"] == 300_000


def test_memory_and_its_marks_are_gauges() -> None:
    driver = HoldDriver()
    driver.decode("x", "y")
    driver.press(EMERGENCY)
    found = published(counted(driver))
    assert found["fermata_memory_ceiling_bytes"] == CEILING
    assert found["fermata_memory_low_bytes"] == 1_600_000
    assert found["fermata_memory_high_bytes"] == 1_840_000
    assert found["fermata_memory_emergency_bytes"] == CEILING
    assert found["fermata_memory_level"] == 2
    assert found["fermata_memory_usage_bytes"] >= EMERGENCY
    assert found["fermata_memory_emergencies_total"] == 1
    assert found["fermata_active_bytes"] == EMERGENCY
    assert found["fermata_reserved_bytes"] == driver.state.reserved_bytes


def test_memory_that_a_row_gave_back_is_shown_before_the_next_reading() -> None:
    driver = HoldDriver()
    driver.decode("x")
    driver.step(driver.sampled(FINE))
    driver.step(driver.decoded(req_a="stop"))
    metrics, num_counted = counted(driver), len(driver.records)
    driver.step(events.KvFreed(request_id="req_a", number=1, freed_bytes=200_000))
    metrics.count(driver.state, driver.records[num_counted:])
    assert metrics.active_bytes == metrics.memory.active_bytes == FINE - 200_000


def test_memory_that_a_row_gave_back_is_shown_where_nothing_is_read() -> None:
    driver = CoreDriver()
    driver.start()
    driver.step(driver.receive(20, 100, name="req_a"))
    done = msgspec.structs.replace(driver.chunk_done(), active_bytes=900_000)
    driver.step(done)
    driver.step(driver.decoded(req_a="stop"))
    driver.step(events.KvFreed(request_id="req_a", number=1, freed_bytes=200_000))
    assert counted(driver).active_bytes == 700_000


def test_without_a_ceiling_there_are_no_marks() -> None:
    driver = CoreDriver()
    driver.start()
    found = published(counted(driver))
    marks = {name for name in found if name.startswith("fermata_memory_")}
    counters = {"reclaims_total", "reclaimed_bytes_total", "emergencies_total"}
    assert marks == {f"fermata_memory_{name}" for name in counters | {"level"}}


def test_aborts_are_counted_by_reason() -> None:
    driver = HoldDriver(hold_limits(pause=False))
    driver.decode("x", "y")
    driver.press(EMERGENCY)
    assert published(counted(driver))["fermata_requests_ended_total,aborted,memory"] == 1


def test_ends_set_the_pace_and_refusals_do_not() -> None:
    driver = HoldDriver()
    driver.run("x")
    driver.ask("x" * 900)
    metrics = counted(driver)
    assert dict(metrics.requests_ended) == {
        "finished:stop": 1,
        "rejected:context_length_exceeded": 1,
    }
    finished = [r.at_ns for r in driver.records if isinstance(r.event, events.RequestFinished)]
    assert list(metrics.pace.ends) == finished
    assert metrics.prompt_tokens == 17, "of the one that was taken"


def test_bad_files_are_counted_by_reason_and_blocks_that_went_as_blocks() -> None:
    driver = KvDriver(model=STATEFUL)
    driver.run("wxyz", 1)
    driver.step(events.BlockCorrupt(hash="wx", part="state", reason="corrupt", detail=""))
    metrics = counted(driver)
    assert dict(metrics.bad_files) == {"corrupt": 1}
    assert (dict(metrics.evicted_blocks), list(metrics.evicted_bytes)) == ({}, ["bad"])
    assert not [name for name in published(metrics) if name.startswith("fermata_kv_evicted_blocks")]
    driver.step(events.BlocksLost(hashes=("wxy", "wxyz"), states=("wxyz",), reason="missing"))
    driver.step(events.BlockCorrupt(hash="w", part="block", reason="corrupt", detail=""))
    metrics = counted(driver)
    assert dict(metrics.bad_files) == {"corrupt": 2, "missing": 3}
    assert dict(metrics.evicted_blocks) == {"bad": 1}
