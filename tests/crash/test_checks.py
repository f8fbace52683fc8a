"""The checks of `fermata crash`: each finds what was damaged on purpose, and nothing else."""

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from journal import events
from journal.journal import Journal
from scheduler.engine.fake_tokenizer import FakeTokenizer
from scheduler.evolve import fold
from scheduler.recovery import recover_state
from scheduler.state import SchedulerState
from tests.integration.http_server import RunningServer, running
from tools.crash_checks import (
    Evidence,
    check_ends,
    check_recovery,
    check_replay,
    check_state,
    files_below,
    problems_of,
    tally_of,
)
from tools.crash_clients import Act, Ask, Attempt, Crowd, Deeds

pytestmark = pytest.mark.crash

BODY = {
    "model": "default",
    "prompt": "a prompt of several blocks, " * 4,
    "max_tokens": 118,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 2,
}
QUIET: dict[str, Any] = {
    "kv": {"block_tokens": 16, "reserve_bytes": 0, "memory_bytes": 0},
    "fake": {"step_ms": 1},
}
HOLD = (Act(20, "pause"), Act(20, "until paused"))


class Listens:
    """A server that listens, as clients know it."""

    def __init__(self, address: str) -> None:
        self.address: str | None = address


def stop_in_order(server: RunningServer) -> None:
    """A stop that waits for the writers: one at once may leave a file that is nobody's yet."""
    server.begin_stop()
    server.join()


def served(state: Path) -> Evidence:
    """A request is held, the server stops and starts again, and the request goes on to its end."""
    crowd = Crowd([Ask("/v1/completions", BODY, HOLD)], Deeds(str))
    evidence = Evidence(state, crowd.clients, FakeTokenizer())
    (client,) = crowd.clients

    async def ask(address: str) -> None:
        await crowd.address.move(Listens(address))
        asking = asyncio.ensure_future(crowd.run())
        held = asyncio.ensure_future(client.operate())
        await held
        asking.cancel()
        await asyncio.wait((asking,))

    async def go_on(address: str) -> None:
        await crowd.address.move(Listens(address))
        await Deeds(str).do(client, "resume")
        await client.run()

    with running(state, **QUIET) as server:
        asyncio.run(ask(server.url))
        stop_in_order(server)
    evidence.at_deaths[1] = files_below(state / "kv")
    client.ask = replace(client.ask, acts=())
    with running(state, **QUIET) as server:
        asyncio.run(go_on(server.url))
        stop_in_order(server)
    return evidence


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """What is left when nothing is wrong."""
    evidence = served(tmp_path_factory.mktemp("sound") / "state")
    assert problems_of(evidence) == []
    return evidence


@pytest.fixture
def evidence(sound: Evidence, tmp_path: Path) -> Evidence:
    """The same, to be damaged."""
    state = tmp_path / "state"
    shutil.copytree(sound.state, state)
    clients = [replace(client, attempts=copied(client.attempts)) for client in sound.clients]
    return replace(sound, state=state, clients=clients, at_deaths=dict(sound.at_deaths))


def copied(attempts: list[Attempt]) -> list[Attempt]:
    """Attempts that can be changed."""
    return [replace(a, pieces=list(a.pieces), tokens=list(a.tokens)) for a in attempts]


def only_problem(evidence: Evidence) -> str:
    """The one thing that is wrong."""
    (problem,) = problems_of(evidence)
    return problem


def attempt_of(evidence: Evidence) -> Attempt:
    return evidence.clients[0].attempts[0]


def test_a_held_request_was_delivered_across_two_lives(sound: Evidence) -> None:
    tally, num_pauses = tally_of(sound)
    assert (tally.num_tokens, tally.num_bad, num_pauses) == (118, 0, 1)
    assert attempt_of(sound).is_done
    assert sound.at_deaths[1]


def test_a_changed_token_is_found(evidence: Evidence) -> None:
    pieces = attempt_of(evidence).pieces
    position, text = pieces[40]
    pieces[40] = (position, chr(ord(text[0]) ^ 1) + text[1:])
    assert f"up to position {position}" in only_problem(evidence)
    assert tally_of(evidence)[0].num_changed >= 1, "a piece may be of several tokens"


def test_a_doubled_token_is_found(evidence: Evidence) -> None:
    pieces = attempt_of(evidence).pieces
    pieces.insert(40, pieces[39])
    problems = problems_of(evidence)
    assert any(f"position {pieces[39][0]} after {pieces[39][0]}" in each for each in problems)
    assert tally_of(evidence)[0].num_doubled == 1


def test_a_lost_token_is_found(evidence: Evidence) -> None:
    del attempt_of(evidence).pieces[40]
    assert "up to position" in only_problem(evidence)
    assert tally_of(evidence)[0].num_changed >= 2, "what was in it, and what follows on it"


def test_a_lost_end_is_found(evidence: Evidence) -> None:
    del attempt_of(evidence).pieces[-1]
    assert "the whole answer is" in only_problem(evidence)
    assert tally_of(evidence)[0].num_lost == 1


def test_lost_log_probabilities_are_found(evidence: Evidence) -> None:
    del attempt_of(evidence).tokens[30]
    assert "log-probabilities" in only_problem(evidence)


def test_a_client_without_its_end_is_found(evidence: Evidence) -> None:
    attempt_of(evidence).is_done = False
    assert "never came to an end" in only_problem(evidence)


def test_what_a_client_complains_of_is_told(evidence: Evidence) -> None:
    client = evidence.clients[0]
    complaining = replace(client, problems=["404"])
    assert "404" in only_problem(replace(evidence, clients=[complaining]))


def test_a_lost_pin_is_found(evidence: Evidence) -> None:
    files = dict(evidence.at_deaths[1])
    del files[next(path for path in files if "tails" in path)]
    evidence.at_deaths[1] = files
    assert "was pinned at the death of run 1" in only_problem(evidence)


Damage = Callable[[Path], object]


def add(path: Path) -> None:
    path.with_name("0" * 64 + ".safetensors").write_bytes(b"half")


def leave_half(path: Path) -> None:
    path.with_name(f"{path.name}.0123-1.tmp").write_bytes(b"half")


def turn_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "what"),
    [(add, "nobody's"), (leave_half, "nobody's"), (turn_a_bit, "corrupt"), (Path.unlink, "gone")],
)
def test_files_that_are_not_as_the_index_says_are_found(
    evidence: Evidence, damage: Damage, what: str
) -> None:
    damage(sorted((evidence.state / "kv").rglob("*.safetensors"))[0])
    problems = problems_of(evidence)
    assert problems
    assert any(what in problem for problem in problems)
    assert all(problem.startswith("files: ") for problem in problems)


def test_a_file_of_another_size_is_found(evidence: Evidence) -> None:
    cut(sorted((evidence.state / "kv").rglob("*.safetensors"))[0])
    assert any("recorded are" in problem for problem in problems_of(evidence))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE request SET num_output_tokens = num_output_tokens - 1",
        "DELETE FROM run",
        "DELETE FROM pause",
        "UPDATE block SET hash = hash || '0'",
    ],
)
def test_a_half_projection_is_found(evidence: Evidence, statement: str) -> None:
    with closing(sqlite3.connect(evidence.state / "journal.db")) as database:
        database.execute(statement)
        database.commit()
    problems = problems_of(evidence)
    assert problems
    assert all(problem.startswith("verify: ") for problem in problems)


def records_of(evidence: Evidence) -> list[events.Record]:
    journal = Journal.open(evidence.state)
    records = list(journal.read())
    journal.close()
    return records


def test_a_request_with_no_end_or_two_is_found(sound: Evidence, evidence: Evidence) -> None:
    records = records_of(evidence)
    assert list(check_ends(records, sound.allowed)) == []
    (end,) = [r for r in records if isinstance(r.event, events.RequestFinished)]
    records.remove(end)
    (problem,) = check_ends(records, sound.allowed)
    assert "never came to its end" in problem
    (problem,) = check_ends([*records, end, end], sound.allowed)
    assert "a second end" in problem


def test_what_is_decided_otherwise_is_found(evidence: Evidence) -> None:
    records = records_of(evidence)
    (end,) = [r for r in records if isinstance(r.event, events.RequestFinished)]
    records.remove(end)
    assert any("replay" in problem for problem in check_replay(records))


def test_a_snapshot_that_says_something_else_is_found(evidence: Evidence) -> None:
    records = records_of(evidence)
    journal = Journal.open(evidence.state)
    state, seq = recover_state(journal)
    journal.close()
    assert seq > 0
    assert list(check_recovery(records, state)) == []
    state.now_ns += 1
    (problem,) = check_recovery(records, state)
    assert "snapshot" in problem


def test_counters_of_what_has_not_ended_are_found(evidence: Evidence) -> None:
    records = records_of(evidence)
    state = SchedulerState()
    (pinned,) = [r for r in records if isinstance(r.event, events.RequestPaused)]
    fold(state, records[: records.index(pinned) + 1])
    problems = "\n".join(check_state(state))
    for what in ("requests", "pauses", "blocks with a pin", "tails"):
        assert what in problems
