"""A file that was damaged while the server runs costs time and no token; the journal says which."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from journal import events
from scheduler.kvcache.naming import BlockFile, StateFile
from tests.integration.kv_serving import (
    BLOCK_TOKENS,
    MODELS,
    NUM_TOKENS,
    ask,
    expected,
    files_below,
    num_prefilled,
    prompt,
    recorded,
    serving,
    wait_for_blocks,
)
from tests.kvcache.damage import DAMAGES, delete, exchange, flip

pytestmark = pytest.mark.engine

BAD_BLOCK = 5
STATE_EVERY = 2


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("model", MODELS)
def test_a_bad_block_is_a_miss_and_an_event(
    state_folder: Path, model: str, damage: Callable[[Path, Path], None]
) -> None:
    settings = {"memory_bytes": 0, "state_every_blocks": STATE_EVERY}
    with serving(state_folder, model, **settings) as server:
        first = ask(server, prompt(1))
        wait_for_blocks(server, NUM_TOKENS // BLOCK_TOKENS)
        names = chain_of(state_folder, first.request_id)
        domain = server.http.get("/v1/cache").json()["domain"]
        bad, other = (
            state_folder / "kv" / BlockFile(domain, names[i]).path for i in (BAD_BLOCK, 8)
        )
        damage(bad, other)
        second = ask(server, prompt(1))
        wait_for_blocks(server, NUM_TOKENS // BLOCK_TOKENS)
        third = ask(server, prompt(1))
        shutil.rmtree(state_folder / "kv")
        fourth = ask(server, prompt(1))
    every = STATE_EVERY if model == "tiny-hybrid" else 1
    good = BAD_BLOCK // every * every * BLOCK_TOKENS
    assert [answer.content for answer in (first, second, third, fourth)] == [expected(model, 1)] * 4
    assert second.num_cached_tokens == good
    assert num_prefilled(state_folder, 1, second.request_id) == NUM_TOKENS - 1 - good
    found = recorded(state_folder, events.BlockCorrupt)
    reason = "missing" if damage is delete else "corrupt"
    assert (found[0].hash, found[0].part, found[0].reason) == (names[BAD_BLOCK], "block", reason)
    lost = [event.hashes for event in recorded(state_folder, events.BlocksLost)]
    after_rmtree = names[1 : NUM_TOKENS // BLOCK_TOKENS]
    assert lost == [(names[8],), after_rmtree] if damage is exchange else lost == [after_rmtree]
    assert third.num_cached_tokens == NUM_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    assert fourth.num_cached_tokens == 0
    assert found[-1].reason == "missing"


def test_a_bad_state_leaves_the_one_before_it(state_folder: Path) -> None:
    settings = {"memory_bytes": 0, "state_every_blocks": STATE_EVERY}
    with serving(state_folder, "tiny-hybrid", **settings) as server:
        first = ask(server, prompt(1))
        wait_for_blocks(server, NUM_TOKENS // BLOCK_TOKENS)
        last = chain_of(state_folder, first.request_id)[NUM_TOKENS // BLOCK_TOKENS - 1]
        domain = server.http.get("/v1/cache").json()["domain"]
        flip(state_folder / "kv" / StateFile(domain, last).path, -8)
        second = ask(server, prompt(1))
    assert second.content == expected("tiny-hybrid", 1)
    before = (NUM_TOKENS // BLOCK_TOKENS - STATE_EVERY) * BLOCK_TOKENS
    assert second.num_cached_tokens == before
    (found,) = recorded(state_folder, events.BlockCorrupt)
    assert (found.hash, found.part, found.reason) == (last, "state", "corrupt")


def test_what_was_lost_while_the_server_was_away_is_found_at_its_start(state_folder: Path) -> None:
    with serving(state_folder, "tiny-plain") as server:
        first = ask(server, prompt(1))
        wait_for_blocks(server, NUM_TOKENS // BLOCK_TOKENS)
        domain = server.http.get("/v1/cache").json()["domain"]
    names = chain_of(state_folder, first.request_id)
    gone, short, *_, kept = (state_folder / "kv" / BlockFile(domain, n).path for n in names[4:])
    gone.unlink()
    os.truncate(short, 100)
    half, unknown = kept.with_suffix(".tmp"), kept.with_name(f"{'0' * 64}.safetensors")
    for path in (half, unknown):
        path.write_bytes(b"of a process that is gone")
    with serving(state_folder, "tiny-plain") as server:
        second = ask(server, prompt(1))
        assert not half.exists()
        assert not unknown.exists()
        assert kept.exists()
    assert second.content == first.content == expected("tiny-plain", 1)
    assert second.num_cached_tokens == 4 * BLOCK_TOKENS
    lost = {event.reason: event.hashes for event in recorded(state_folder, events.BlocksLost)}
    assert lost == {"missing": (names[4],), "corrupt": (names[5],)}
    assert sum(e.num_swept for e in recorded(state_folder, events.StoreMeasured)) == 2
    assert recorded(state_folder, events.BlockCorrupt) == []


def chain_of(folder: Path, request_id: str) -> tuple[str, ...]:
    """The hashes of a prompt's blocks."""
    named = [e for e in recorded(folder, events.BlocksNamed) if e.request_id == request_id]
    return named[0].hashes


@pytest.mark.parametrize("model", MODELS)
def test_a_chain_that_lost_all_its_files_is_whole_again_after_one_request(
    state_folder: Path, model: str
) -> None:
    num_blocks = NUM_TOKENS // BLOCK_TOKENS
    with serving(state_folder, model, memory_bytes=0, state_every_blocks=STATE_EVERY) as server:
        ask(server, prompt(1))
        wait_for_blocks(server, num_blocks)
        num_files = len(files_below(state_folder))
        shutil.rmtree(state_folder / "kv")
        second = ask(server, prompt(1))
        wait_for_blocks(server, num_blocks)
        assert len(files_below(state_folder)) == num_files
        third = ask(server, prompt(1))
    assert second.num_cached_tokens == 0
    assert third.num_cached_tokens == num_blocks * BLOCK_TOKENS
    assert second.content == third.content == expected(model, 1)
