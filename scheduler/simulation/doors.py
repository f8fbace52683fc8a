"""What HTTP is to the scheduler, without sockets: requests come in, and streams are followed."""

from journal.memory import MemoryJournal
from scheduler.loop import Loop
from scheduler.parameters import decode_parameters
from scheduler.streams import Accepted, Arrival, RequestStream, StreamEnd


class Doors:
    """See the module's text. They outlive the process behind them, and are shut without one."""

    def __init__(self, journal: MemoryJournal) -> None:
        self.journal = journal
        self.loop: Loop | None = None

    def open(self, loop: Loop) -> None:
        """A process listens. Nobody has a connection to it yet."""
        self.loop = loop
        loop.hub.wish = loop.sensors.wish

    def shut(self) -> None:
        """It listens no more, and all its connections are lost."""
        self.loop = None

    def submit(self, arrival: Arrival) -> RequestStream | None:
        """A request, whose connection is its first reader. None: the server is not there, or takes
        nothing now.
        """
        loop = self.loop
        if loop is None or loop.full or loop.sensors.stop_reason is not None:
            return None
        if not loop.sensors.has_room():
            return None
        stream = RequestStream(
            arrival.request_id, arrival.parameters, len(arrival.prompt), num_clients=1
        )
        loop.hub.add(stream)
        loop.sensors.arrive(arrival)
        return stream

    def attach(self, request_id: str) -> RequestStream | None:
        """Follows an answer from wherever its reader is. None: nobody knows of it."""
        assert self.loop is not None, "one attaches to a server that is there"
        stream = self.find(request_id)
        if stream is not None:
            self.loop.hub.follow(stream)
        return stream

    def leave(self, stream: RequestStream) -> None:
        """A connection ends from the client's side: the one that was given for this stream."""
        assert self.loop is not None, "without a server there is no connection"
        self.loop.hub.leave(stream)

    def find(self, request_id: str) -> RequestStream | None:
        """The live stream, or one that is rebuilt from the journal."""
        assert self.loop is not None, "one asks a server that is there"
        return self.loop.hub.find(request_id) or self.rebuild(request_id)

    def rebuild(self, request_id: str) -> RequestStream | None:
        """The stream of a request that has ended, as `History.stream`."""
        rows = [row for row in self.journal.requests.values() if row.request_id == request_id]
        body = self.journal.parameters(request_id)
        if not rows or body is None or rows[0].max_tokens is None or rows[0].outcome is None:
            return None
        row = rows[0]
        tokens = self.journal.output_tokens(request_id)[0].tolist()
        assert len(tokens) == row.num_output_tokens, f"{request_id} ended with other tokens"
        stream = RequestStream(
            request_id,
            decode_parameters(body),
            row.num_prompt_tokens,
            Accepted(row.max_tokens or 0),
            tokens=tokens,
        )
        match row.outcome:
            case "finished" | "cancelled" | "aborted" as kind:
                reason = row.reason or ""
                stream.end = StreamEnd(kind, reason, "", row.num_prompt_tokens, len(tokens))
            case _:
                return None
        return stream
