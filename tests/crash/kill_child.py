"""A server without HTTP that is there to be killed: `python -m tests.crash.kill_child FOLDER`.

It prints each token as a client would get it: the request, the position and the token.
"""

import asyncio
import sys
from pathlib import Path

from scheduler.engine.fake import FakeSource
from scheduler.service import Service
from scheduler.streams import RequestStream
from scheduler.wiring import build
from tests.crash.requests import REQUESTS, kill_settings
from tests.loop_driver import arrival_of


async def show(stream: RequestStream) -> None:
    """Prints a stream as it comes."""
    num_seen = 0
    while stream.end is None:
        await stream.wait(num_seen, None)
        for token in stream.tokens[num_seen:]:
            print(stream.request_id, num_seen, token, flush=True)
            num_seen += 1


async def serve(service: Service) -> None:
    """Takes all requests at once, and goes on until it is killed."""
    service.start()
    assert await service.served_model(30) is not None
    streams = [
        service.submit(arrival_of(request_id, text, max_tokens))
        for request_id, text, max_tokens in REQUESTS
    ]
    await asyncio.gather(*(show(stream) for stream in streams))


if __name__ == "__main__":
    settings = kill_settings(Path(sys.argv[1]))
    asyncio.run(serve(build(settings, FakeSource(settings.fake))))
