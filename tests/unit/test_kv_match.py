"""What a prompt starts from: the longest saved prefix, what it leases, and why it is no longer."""

import pytest

from journal import events
from scheduler.effects import RestoreRow
from tests.unit.core_driver import only
from tests.unit.kv_driver import (
    BLOCK,
    BLOCK_BYTES,
    STATEFUL,
    KvDriver,
    admitted,
    kv_limits,
    names_of,
    ready,
)


def leases(driver: KvDriver) -> dict[str, int]:
    return {name: block.leases for name, block in driver.state.index.blocks.items()}


@pytest.mark.parametrize(
    ("chain", "more_tokens", "num_blocks", "num_tokens"),
    [
        ("xyz", 0, 3, 3 * BLOCK - 1),
        ("xyz", 1, 3, 3 * BLOCK),
        ("xyz", BLOCK - 1, 3, 3 * BLOCK),
        ("xyzzy", 2, 3, 3 * BLOCK),
        ("xy", 0, 2, 2 * BLOCK - 1),
        ("xq", 3, 1, BLOCK),
        ("qyz", 3, 0, 0),
    ],
)
def test_a_prompt_hits_all_that_it_can(
    chain: str, more_tokens: int, num_blocks: int, num_tokens: int
) -> None:
    driver = KvDriver()
    driver.run("xyz")
    admission = admitted(driver.ask(chain, more_tokens))
    assert (admission.num_blocks, admission.num_cached_tokens) == (num_blocks, num_tokens)
    assert (admission.num_memory_tokens, admission.num_disk_tokens) == (0, num_tokens)
    leased = {name for name, count in leases(driver).items() if count}
    assert leased == set(names_of(chain)[:num_blocks])
    restores = [e for e in driver.effects if isinstance(e, RestoreRow)]
    assert [(r.hashes, r.num_tokens, r.states) for r in restores] == [
        (names_of(chain)[:num_blocks], num_tokens, ()) for _ in range(num_blocks > 0)
    ]


def test_an_exact_repeat_computes_one_token() -> None:
    driver = KvDriver()
    driver.run("xyz", 0)
    driver.ask("xyz", 0)
    assert driver.state.chunk is None
    decisions = driver.step(driver.restored("b"))
    assert [type(decision) for decision in decisions] == [events.BatchChanged]
    [finished] = only(driver.finish("b"), events.RequestFinished)
    assert finished.num_disk_tokens == 3 * BLOCK - 1
    assert finished.num_prefilled_tokens == 1


def test_what_is_in_memory_counts_for_memory() -> None:
    driver = KvDriver(kv_limits(memory_bytes=5 * BLOCK_BYTES // 2))
    driver.run("xyz")
    admission = admitted(driver.ask("xyz", 0))
    assert list(driver.state.index.hot) == ["xy", "xyz"]
    assert admission.num_memory_tokens == 2 * BLOCK - 1
    assert admission.num_disk_tokens == BLOCK


def test_a_model_with_states_starts_at_the_deepest_one() -> None:
    driver = KvDriver(model=STATEFUL)
    driver.run("uvwxy", 5, suffix_tokens=4)
    states = {n: bool(b.state_bytes) for n, b in driver.state.index.blocks.items()}
    assert states == {"u": False, "uv": True, "uvw": False, "uvwx": True, "uvwxy": True}
    admission = admitted(driver.ask("uvwxy", 0))
    assert (admission.num_blocks, admission.num_cached_tokens) == (4, 4 * BLOCK)
    [restore] = [e for e in driver.effects if isinstance(e, RestoreRow)]
    assert (restore.hashes, restore.states) == (names_of("uvwx"), (2, 4))
    driver.step(driver.restored("b"))
    driver.prefill()
    driver.finish("b")
    admission = admitted(driver.ask("uvwxq", 1))
    assert admission.num_cached_tokens == 4 * BLOCK
    driver.step(driver.restored("c", 2 * BLOCK))
    assert driver.state.chunk is not None
    assert driver.state.chunk.start == 2 * BLOCK


def test_a_model_with_states_says_when_there_is_none() -> None:
    driver = KvDriver(kv_limits(state_every_blocks=9), model=STATEFUL)
    driver.run("xyz", 1, suffix_tokens=4 * BLOCK)
    admission = admitted(driver.ask("xyz", 1))
    assert (admission.num_cached_tokens, admission.parted_because) == (0, "no_state")
    assert set(leases(driver).values()) == {0}


def test_why_a_prompt_is_not_found_further() -> None:
    driver = KvDriver(kv_limits(await_ns=0))
    assert admitted(driver.ask("xy", 1)).parted_because == "unknown"
    assert admitted(driver.ask("xyz", 1)).parted_because == "being_computed"
    driver = KvDriver()
    driver.run("xyz")
    assert admitted(driver.ask("xyz", 1)).parted_because == "whole"
    driver.step(events.BlocksLost(hashes=("xyz",), states=(), reason="missing"))
    admission = admitted(driver.ask("xyz", 1, max_tokens=1))
    assert (admission.parted_because, admission.parted_at_tokens) == ("missing", 2 * BLOCK)


def test_why_after_an_eviction() -> None:
    driver = KvDriver(kv_limits(max_bytes=3 * BLOCK_BYTES, writing_bytes=BLOCK_BYTES))
    driver.run("x")
    driver.run("y")
    driver.run("zw")
    assert "x" not in driver.on_disk
    assert admitted(driver.ask("x", 1)).parted_because == "evicted"


def test_blocks_of_another_domain_are_not_found() -> None:
    driver = KvDriver()
    driver.run("xyz")
    driver.begin_run()
    driver.step(ready(driver.model, "another"))
    assert driver.state.index.num_ours == 0
    admission = admitted(driver.ask("qr", 1))
    assert admission.parted_because == "other_domain"


def test_a_retry_does_not_start_from_saved_blocks() -> None:
    driver = KvDriver()
    driver.run("xyz")
    driver.ask("xyz", 3)
    decisions = driver.step(driver.failed("b", "prefill"))
    assert only(decisions, events.RequestRetried)
    assert set(leases(driver).values()) == {0}
    again = only(decisions, events.RequestAdmitted) or only(
        driver.step(driver.freed("b")), events.RequestAdmitted
    )
    assert [(a.num_cached_tokens, a.parted_because) for a in again] == [(0, "retry")]


def test_a_restore_that_came_short_prefills_the_rest_and_saves_it_again() -> None:
    driver = KvDriver()
    driver.run("xyz")
    driver.ask("xyz", 3)
    corrupt = events.BlockCorrupt(hash="xy", part="block", reason="corrupt", detail="")
    decisions = driver.step(corrupt, driver.restored("b", BLOCK))
    [gone] = only(decisions, events.BlocksEvicted)
    assert (gone.hashes, gone.reason) == (("xy",), "bad")
    assert driver.on_disk == ["x", "xyz"]
    [chunk] = only(decisions, events.PrefillChunkPlanned)
    assert (chunk.start, chunk.length) == (BLOCK, 2 * BLOCK + 2)
    driver.prefill()
    assert [planned.hash for planned in driver.plans] == ["xy"]
    driver.save_all()
    assert leases(driver) == {"x": 1, "xy": 1, "xyz": 1}
    [finished] = only(driver.finish("b"), events.RequestFinished)
    assert (finished.num_disk_tokens, finished.num_prefilled_tokens) == (BLOCK, 2 * BLOCK + 3)


def test_all_that_a_restore_found_lost_is_saved_again_as_it_is_computed() -> None:
    driver = KvDriver(model=STATEFUL)
    driver.run("uvwxyz", 1)
    states = [name for name, block in driver.state.index.blocks.items() if block.state_bytes]
    assert states == ["uv", "uvwx", "uvwxyz"]
    driver.ask("uvwxyz", 1)
    decisions = driver.step(
        events.BlockCorrupt(hash="u", part="block", reason="missing", detail=""),
        events.BlocksLost(hashes=("uv", "uvw"), states=("uv", "uvwx"), tails=(), reason="missing"),
        events.BlocksLost(hashes=("uvwxy",), states=(), tails=(), reason="corrupt"),
        driver.restored("b", 0),
    )
    [gone, damaged] = only(decisions, events.BlocksEvicted)
    assert (gone.hashes, damaged.hashes) == (("u",), ("uvwxy",))
    driver.prefill()
    driver.save_all()
    blocks = driver.state.index.blocks
    assert list(blocks) == ["uvwx", "uvwxyz", "u", "uv", "uvw", "uvwxy"]
    assert [name for name, block in blocks.items() if block.state_bytes] == [
        "uvwx",
        "uvwxyz",
        "uv",
    ]
    assert set(leases(driver).values()) == {1}


def test_a_block_that_was_lost_since_the_match_is_saved_again() -> None:
    driver = KvDriver()
    driver.run("xyz")
    driver.ask("xyz", 3)
    lost = events.BlocksLost(hashes=("xy",), states=(), reason="missing")
    driver.step(lost)
    driver.step(driver.restored("b"))
    assert [planned.hash for planned in driver.plans] == ["xy"]


def test_a_file_that_is_being_written_anew_is_not_the_one_that_was_bad() -> None:
    driver = KvDriver()
    driver.run("xyz")
    driver.ask("xyz", 3)
    bad = events.BlockCorrupt(hash="xy", part="block", reason="corrupt", detail="")
    driver.step(bad, driver.restored("b", BLOCK))
    driver.prefill()
    decisions = driver.step(bad)
    assert only(decisions, events.BlocksEvicted) == []
    driver.save_all()
    assert driver.on_disk == ["x", "xy", "xyz"]
