"""Runs in which everything happens that can happen to a request that is held."""

from journal import events
from scheduler.request import Phase
from tests.unit.hold_driver import EMERGENCY, FINE, HIGH, HoldDriver, hold_limits


def busy_with_holds() -> list[HoldDriver]:
    """In all of them together every kind of event about memory and held requests has happened, and
    every row of the table that begins or ends in a pause.
    """
    return [
        pressed(),
        held_in_prefill(),
        *(ended_while_pausing(how) for how in ("stop", "cancel", "retry", "abort", "death")),
        *(ended_while_resuming(how) for how in ("cancel", "retry", "abort", "death", "hold")),
        *(ended_while_paused(how) for how in ("cancel", "abort")),
    ]


def pressed() -> HoldDriver:
    """The whole ladder, and a request that goes on from its chain."""
    driver = HoldDriver(hold_limits(memory_bytes=1_000_000))
    driver.decode("x", "y")
    driver.press(HIGH, cached_bytes=500_000)
    driver.step(driver.reclaimed(0))
    for active_bytes in (HIGH, HIGH, EMERGENCY):
        driver.press(active_bytes)
    driver.step(driver.tail_failed("req_b"))
    driver.step(driver.freed("req_b"))
    for _ in range(3):
        driver.step(driver.sampled(FINE))
    driver.step(driver.restored("req_b"))
    driver.feed()
    driver.pause("req_b")
    driver.release("req_b")
    driver.step(driver.tail_lost("req_b"))
    driver.step(driver.restored("req_b", 16))
    return driver


def held_in_prefill() -> HoldDriver:
    """Held while its row is filled, while a chunk is fed, and while it waits."""
    driver = HoldDriver(hold_limits(max_rows=1))
    driver.run("xy")
    driver.ask("xyz", 40)
    driver.hold("req_b")
    driver.step(driver.restored("req_b"))
    driver.come_to_rest("req_b")
    driver.release("req_b")
    driver.step(driver.restored("req_b"))
    driver.hold("req_b")
    driver.step(driver.chunk_done())
    driver.come_to_rest("req_b")
    driver.decode("v")
    driver.ask("w", 1)
    driver.hold("req_d")
    driver.step(driver.decoded(req_c="stop"))
    return driver


def ended_while_pausing(how: str) -> HoldDriver:
    """It is on its way out of the engine when its end comes."""
    driver = HoldDriver(hold_limits(max_retries=0 if how == "abort" else 1))
    driver.decode("x")
    token = driver.decoded(req_a="stop")
    driver.hold("req_a")
    match how:
        case "stop":
            driver.step(token)
        case "cancel":
            driver.step(events.CancelRequested(request_id="req_a"))
        case "death":
            driver.start()
        case _:
            driver.step(driver.failed("req_a"))
    return driver


def ended_while_resuming(how: str) -> HoldDriver:
    """Its row is being filled again when its end comes."""
    driver = HoldDriver(hold_limits(max_retries=0 if how == "abort" else 1))
    driver.decode("x")
    driver.pause("req_a")
    driver.release("req_a")
    assert driver.request("req_a").phase is Phase.RESUMING
    match how:
        case "cancel":
            driver.step(events.CancelRequested(request_id="req_a"))
        case "death":
            driver.start()
        case "hold":
            driver.hold("req_a")
        case _:
            driver.step(driver.failed("req_a", "start"))
    return driver


def ended_while_paused(how: str) -> HoldDriver:
    """Its end comes while it is held; or it was in the engine at too many deaths."""
    driver = HoldDriver(hold_limits(max_deaths=0))
    driver.decode("x")
    driver.pause("req_a")
    if how == "cancel":
        driver.step(events.CancelRequested(request_id="req_a"))
    else:
        driver.release("req_a")
        driver.start()
    return driver
