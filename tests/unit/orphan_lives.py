"""Runs in which everything happens that can happen to a request that has lost its client."""

from journal import events
from tests.unit.orphan_driver import OrphanDriver


def busy_with_clients() -> list[OrphanDriver]:
    """In all of them together every kind of event about clients has happened."""
    return [lost_and_adopted(), stopped()]


def lost_and_adopted() -> OrphanDriver:
    """Lost while it decodes, and found again by who sends it again; another by its key."""
    driver = OrphanDriver()
    driver.decode_sent("x")
    driver.lose("req_a")
    driver.send("x")
    driver.send("y", key="k")
    driver.send("y", key="k")
    driver.gone("req_c")
    driver.attached("req_c")
    return driver


def stopped() -> OrphanDriver:
    """A stop whose time for rows is over; the next start goes on from there."""
    driver = OrphanDriver()
    driver.decode_sent("x")
    driver.step(events.ServerStopping(reason="SIGTERM"))
    driver.step(events.DrainEnded())
    driver.come_to_rest("req_a")
    driver.start()
    driver.step(driver.restored("req_a"))
    driver.finish("req_a")
    return driver
