"""Who follows a stream is counted, also where one request is answered by another."""

from dataclasses import dataclass, field

import pytest

from journal.events import ClientAttached, ClientGone, RequestRejected
from scheduler.streams import (
    Accepted,
    Joined,
    Judgement,
    Rejected,
    RequestStream,
    StreamHub,
)
from tests.unit.test_streams import END, stream_of

REJECTED = Rejected(
    RequestRejected(request_id="req_b", reason="queue_full", numbers=None, num_waiting=9)
)


@dataclass
class Counted:
    """A hub, and what the scheduler is told of clients: "-a" has lost its last one, "+a" has one
    again.
    """

    hub: StreamHub = field(default_factory=lambda: StreamHub(max_lingering=8))
    told: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.hub.wish = self.tell

    def tell(self, fact: ClientGone | ClientAttached) -> None:
        sign = "-" if isinstance(fact, ClientGone) else "+"
        self.told.append(sign + fact.request_id.removeprefix("req_"))

    def sent(self, name: str) -> RequestStream:
        """A request that a client has sent, and follows."""
        stream = stream_of(f"req_{name}")
        stream.num_clients = 1
        self.hub.add(stream)
        return stream

    def judged(self, name: str, judgement: Judgement) -> None:
        """The step that judges it."""
        self.hub.update(f"req_{name}").judgement = judgement
        self.hub.flush()

    def ended(self, name: str) -> None:
        """The step that ends it."""
        self.hub.update(f"req_{name}").end = END
        self.hub.flush()


def test_the_last_that_leaves_and_the_first_that_comes_are_told() -> None:
    counted = Counted()
    stream = counted.sent("a")
    counted.hub.follow(stream)
    counted.hub.leave(stream)
    assert counted.told == []
    counted.hub.leave(stream)
    counted.hub.follow(stream)
    counted.hub.follow(stream)
    assert counted.told == ["-a", "+a"]
    stream.num_clients = 0
    with pytest.raises(AssertionError, match="more clients leave"):
        counted.hub.leave(stream)


def test_one_that_a_start_has_found_has_nobody_until_somebody_comes() -> None:
    counted = Counted()
    stream = stream_of("req_a")
    counted.hub.add(stream)
    counted.hub.follow(stream)
    assert counted.told == ["+a"]


@pytest.mark.parametrize("way", ["ended", "cut", "rejected"])
def test_of_what_does_not_go_on_nothing_is_told(way: str) -> None:
    counted = Counted()
    stream = counted.sent("a")
    if way == "ended":
        counted.ended("a")
    elif way == "cut":
        counted.hub.cut_all()
    else:
        counted.judged("a", REJECTED)
    counted.hub.leave(stream)
    assert counted.told == []
    counted.hub.follow(stream)
    assert counted.told == (["+a"] if way == "ended" else []), "a whole answer finds its reader"


def test_who_comes_for_a_whole_answer_is_told() -> None:
    counted = Counted()
    stream = stream_of("req_a")
    counted.hub.add(stream)
    counted.ended("a")
    counted.hub.follow(stream)
    counted.hub.leave(stream)
    assert counted.told == ["+a"], "it may have had no client until now"


def test_who_leaves_before_it_is_judged_is_missed() -> None:
    counted = Counted()
    counted.hub.leave(counted.sent("a"))
    assert counted.told == ["-a"]
    counted.judged("a", Accepted(3))
    assert counted.told == ["-a"]


def test_the_adopter_follows_what_it_has_adopted() -> None:
    counted = Counted()
    lost, adopter = counted.sent("a"), counted.sent("b")
    counted.hub.leave(lost)
    counted.judged("b", Joined("req_a"))
    assert adopter.joined is lost
    assert (lost.num_clients, counted.told) == (1, ["-a", "+a"])
    assert counted.hub.find("req_b") is None
    counted.hub.leave(adopter)
    assert (lost.num_clients, counted.told) == (0, ["-a", "+a", "-a"])


def test_an_adopter_that_left_before_it_knew_leaves_an_orphan() -> None:
    counted = Counted()
    lost, adopter = counted.sent("a"), counted.sent("b")
    counted.hub.leave(lost)
    counted.hub.leave(adopter)
    counted.told.clear()
    counted.judged("b", Joined("req_a"))
    assert (lost.num_clients, counted.told) == (0, ["-a"])


def test_the_first_client_may_leave_while_a_twin_is_being_judged() -> None:
    counted = Counted()
    holder, twin = counted.sent("a"), counted.sent("b")
    counted.hub.leave(holder)  # behind the decision, and before anybody is told of it
    counted.judged("b", Joined("req_a"))
    assert (holder.num_clients, counted.told) == (1, ["-a", "+a"])
    counted.hub.leave(twin)
    assert counted.told == ["-a", "+a", "-a"]


def test_twins_of_one_key_follow_one_stream() -> None:
    counted = Counted()
    holder, *twins = [counted.sent(name) for name in "abc"]
    for name in "bc":
        counted.hub.update(f"req_{name}").judgement = Joined("req_a")
    counted.hub.flush()
    assert (holder.num_clients, counted.told) == (3, [])
    for stream in (holder, *twins):
        assert counted.told == []
        counted.hub.leave(stream)
    assert counted.told == ["-a"]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_an_adopted_request_may_end_in_the_same_step(order: str) -> None:
    counted = Counted()
    lost, adopter = counted.sent("a"), counted.sent("b")
    counted.hub.leave(lost)
    for name in order:
        update = counted.hub.update(f"req_{name}")
        if name == "a":
            update.end = END
        else:
            update.judgement = Joined("req_a")
    counted.hub.flush()
    counted.hub.leave(adopter)
    assert counted.hub.find("req_a") is lost
    assert counted.told.count("-a") == 1, "what has ended is not told of"


def test_one_that_has_ended_long_ago_has_no_clients_to_count() -> None:
    counted = Counted()
    adopter = counted.sent("b")
    counted.judged("b", Joined("req_a"))
    assert adopter.joined is None
    counted.hub.leave(adopter)
    assert counted.told == []
