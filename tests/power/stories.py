"""What servers do in whose middle the power goes."""

from collections.abc import Callable

from tests.power.server import BLOCK_TOKENS, PowerServer

PROMPT = "one prompt of some length, " * 6
assert 2 * BLOCK_TOKENS < len(PROMPT) < 3 * BLOCK_TOKENS

Story = Callable[[PowerServer], None]


def held_once(server: PowerServer) -> None:
    """One request, which is held in its text and goes on to its end."""
    stream = server.submit(PROMPT, 60)
    server.run_until_output(stream, 10)
    server.hold(stream)
    server.release(stream)
    server.run_until_idle()


def held_and_evicted(server: PowerServer) -> None:
    """Two requests with one prefix and a third one, held in turns; what nobody uses is sent away,
    and one that is held gets cancelled.
    """
    first = server.submit(PROMPT, 80)
    server.run_until_output(first, 5)
    server.hold(first)
    second = server.submit(f"{PROMPT}and more of it", 30)
    other = server.submit(f"another {PROMPT}", 90)
    server.run_until_output(other, 3)
    server.hold(other)
    server.release(first)
    server.run_until_output(first, 40)
    server.hold(first)
    assert second.end is not None
    server.clear()
    server.cancel(other)
    server.run_until_idle()
    server.release(first)
    server.run_until_idle()
    server.clear()
    server.run_until_idle()


def held_over_deaths(server: PowerServer) -> None:
    """A request that is held when its server dies, goes on in the next one, which dies as well, and
    is held again in a third one.
    """
    stream = server.submit(PROMPT, 120)
    server.run_until_output(stream, 7)
    server.hold(stream)
    server.kill()
    stream = server.stream(stream.request_id)
    server.run_until(lambda: server.state.engine_ready)
    server.release(stream)
    server.run_until_output(stream, 70)
    server.kill()
    stream = server.stream(stream.request_id)
    server.run_until_output(stream, 80)
    server.hold(stream)
    server.release(stream)
    server.run_until_idle()
