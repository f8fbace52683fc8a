"""The table of blocks says what is on disk, and the prompt's parts add up."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from journal.blocks import BlockRow
from journal.events import (
    BlockCorrupt,
    BlockSaveFailed,
    BlockSavePlanned,
    BlocksEvicted,
    BlocksLost,
    ChainRestored,
    Fact,
    Part,
    PlannedBlock,
    PrefillChunkCommitted,
    RequestAdmitted,
    RequestRetried,
)
from journal.journal import Journal
from journal.memory import MemoryJournal
from journal.queries import find_request, select_rows
from journal.tables import block
from tests.journal_steps import (
    KV_BLOCK_TOKENS,
    KV_DOMAIN,
    Steps,
    admitted,
    received,
    request_id,
    run_of,
    run_sql,
)

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


class Both:
    """The file and its twin, which must agree after every commit."""

    def __init__(self, folder: Path) -> None:
        self.file = Steps(Journal.open(folder))
        self.twin = Steps(MemoryJournal())

    def __call__(self, name: str, *arguments: object) -> dict[str, BlockRow]:
        for steps in (self.file, self.twin):
            getattr(steps, name)(*arguments)
        return self.rows()

    def rows(self) -> dict[str, BlockRow]:
        rows = {
            row.hash: row for row in select_rows(run_of(self.file.journal), block, BlockRow, "")
        }
        assert rows == self.twin.journal.blocks
        return rows

    def facts(self, *facts: Fact) -> dict[str, BlockRow]:
        return self("commit", list(facts))


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    """A request decodes; blocks A and B are on disk, and C is being written."""
    both = Both(tmp_path)
    both("start")
    both("receive", 1, range(100))
    both("join", 1)
    both("plan_blocks", 1, [A, B, C])
    both("save", A, 100)
    both("save", B, 200)
    yield both
    assert both.file.journal.verify() == []
    both.file.journal.close()


def test_a_block_is_planned_and_then_saved(both: Both) -> None:
    rows = both.rows()
    ends = [(row.end_tokens, row.parent, row.block_bytes) for row in rows.values()]
    size = KV_BLOCK_TOKENS
    assert ends == [(size, "", 100), (2 * size, A, 200), (3 * size, B, 0)]
    assert [row.saved_ns is None for row in rows.values()] == [False, False, True]
    assert rows[A].last_use_ns == rows[A].saved_ns
    assert {row.domain for row in rows.values()} == {KV_DOMAIN}


def test_the_state_at_a_blocks_end_comes_and_goes(both: Both) -> None:
    assert both("save", B, 50, "state")[B].state_bytes == 50
    assert both.facts(BlocksLost(hashes=(), states=(B,), reason="missing"))[B].state_bytes == 0
    both("save", B, 60, "state")
    bad = BlockCorrupt(hash=B, part="state", reason="corrupt", detail="")
    assert both.facts(bad)[B].state_bytes == 0


def test_a_state_may_be_there_before_its_block(both: Both) -> None:
    row = both("save", C, 50, "state")[C]
    assert (row.saved_ns, row.block_bytes, row.state_bytes) == (None, 0, 50)
    row = both("save", C, 300)[C]
    assert (row.saved_ns, row.block_bytes, row.state_bytes) == (row.last_use_ns, 300, 50)


def test_a_state_is_known_while_its_block_is_tried_again(both: Both) -> None:
    both("save", C, 50, "state")
    failed = BlockSaveFailed(hash=C, part="block", reason="disk_full", detail="")
    assert both.facts(failed)[C].state_bytes == 50
    both("plan_blocks", 1, [A, B, C])
    assert both("save", C, 300)[C].state_bytes == 50
    dropped = BlocksEvicted(domain=KV_DOMAIN, hashes=(), states=(C,), freed_bytes=0, reason="bad")
    assert both("commit", [received(2)], [dropped])[C].state_bytes == 0


def planned(name: str, index: int, part: Part) -> BlockSavePlanned:
    """The decision to save one file."""
    block = PlannedBlock(index=index, hash=name, part=part, parent=B)
    return BlockSavePlanned(request_id=request_id(1), number=1, blocks=(block,))


@pytest.mark.parametrize("is_early", [False, True])
def test_a_state_is_known_though_its_block_failed_before_it_was_saved(
    both: Both, is_early: bool
) -> None:
    both("commit", [received(2)], [planned(C, 2, "state")])
    failed = BlockSaveFailed(hash=C, part="block", reason="disk_full", detail="")
    row = both.facts(failed)[C]
    assert (row.saved_ns, row.writing_parts) == (None, 2)
    if is_early:
        assert both("save", C, 50, "state")[C].state_bytes == 50
    again = both("commit", [received(3)], [planned(C, 2, "block")])[C]
    assert (again.writing_parts, again.planned_ns) == (1 if is_early else 3, row.planned_ns)
    if not is_early:
        both("save", C, 50, "state")
    row = both("save", C, 300)[C]
    assert (row.block_bytes, row.state_bytes, row.writing_parts) == (300, 50, 0)
    assert (row.parent, row.end_tokens) == (B, 3 * KV_BLOCK_TOKENS)


def test_a_state_that_came_without_its_block_goes_with_its_row(both: Both) -> None:
    both("commit", [received(2)], [planned("d" * 64, 3, "state")])
    assert both("save", "d" * 64, 50, "state")["d" * 64].state_bytes == 50
    gone = BlocksEvicted(
        domain=KV_DOMAIN, hashes=(), states=("d" * 64,), freed_bytes=50, reason="bad"
    )
    assert set(both("commit", [received(3)], [gone])) == {A, B, C}


def test_a_state_that_is_not_saved_leaves_nothing(both: Both) -> None:
    both("commit", [received(2)], [planned("d" * 64, 3, "state")])
    assert both.facts(BlockSaveFailed(hash="d" * 64, part="state", reason="given_up", detail=""))
    assert set(both.rows()) == {A, B, C}


def test_what_is_being_written_of_a_block_that_is_lost_still_is(both: Both) -> None:
    both("commit", [received(2)], [planned(B, 1, "state")])
    lost = BlocksLost(hashes=(B,), states=(), reason="missing")
    row = both.facts(lost)[B]
    assert (row.saved_ns, row.last_use_ns, row.block_bytes, row.writing_parts) == (None, None, 0, 2)
    both("start")
    assert set(both.rows()) == {A}


def test_a_start_leaves_nothing_on_its_way(both: Both) -> None:
    both("commit", [received(2)], [planned(B, 1, "state")])
    both("start")
    assert [row.writing_parts for row in both.rows().values()] == [0, 0]


def test_a_save_that_fails_leaves_nothing(both: Both) -> None:
    failed = BlockSaveFailed(hash=C, part="block", reason="disk_full", detail="")
    assert set(both.facts(failed)) == {A, B}
    again = msgspec.structs.replace(failed, hash=A)
    assert set(both.facts(again)) == {A, B}, "what is on disk stays"


def test_bad_and_lost_blocks_are_not_there(both: Both) -> None:
    bad = BlockCorrupt(hash=B, part="block", reason="corrupt", detail="")
    assert set(both.facts(bad)) == {A, C}
    assert set(both.facts(BlocksLost(hashes=(A,), states=(), reason="missing"))) == {C}


def test_evicted_blocks_are_not_there(both: Both) -> None:
    evicted = BlocksEvicted(
        domain=KV_DOMAIN, hashes=(B,), states=(A,), freed_bytes=250, reason="budget"
    )
    both("save", A, 50, "state")
    rows = both("commit", [received(2)], [evicted])
    assert set(rows) == {A, C}
    assert rows[A].state_bytes == 0


def test_an_admission_uses_the_whole_chain_that_it_starts_from(both: Both) -> None:
    before = both.rows()
    admission = msgspec.structs.replace(admitted(2), last_hash=B, num_cached_tokens=2)
    rows = both("commit", [received(2)], [admission])
    now = both.file.journal.last_at_ns
    assert [rows[name].last_use_ns for name in (A, B, C)] == [now, now, None]
    assert before[A].saved_ns == rows[A].saved_ns


def test_what_a_dead_run_was_writing_is_not_there(both: Both) -> None:
    both("start")
    assert set(both.rows()) == {A, B}


def test_blocks_are_the_same_after_a_compaction(both: Both) -> None:
    before = both.rows()
    for steps in (both.file, both.twin):
        steps.journal.begin_compaction(steps.journal.last.seq, 1, {})
        while not steps.journal.advance_compaction():
            pass
    assert both.rows() == before
    assert both("save", C, 7)[C].block_bytes == 7


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE block SET block_bytes = 7 WHERE parent = ''", "block_bytes is 7, rebuilt 100"),
        ("DELETE FROM block WHERE parent = ''", "block: a row is missing"),
        (
            f"INSERT INTO block VALUES ('x', 'd', '{A}', 1, 1, 0, 1, 1, 1, 0)",
            "block: a row is too many",
        ),
        ("UPDATE run SET kv_domain = 'x'", "kv_domain is 'x'"),
    ],
)
def test_verify_compares_blocks(tmp_path: Path, statement: str, finding: str) -> None:
    both = Both(tmp_path)
    both("start")
    both("receive", 1, range(100))
    both("plan_blocks", 1, [A, B])
    both("save", A)
    run_sql(both.file.journal, statement)
    findings = both.file.journal.verify()
    both.file.journal.close()
    assert any(finding in line for line in findings), findings


def restored(number: int, memory: int, disk: int) -> ChainRestored:
    return ChainRestored(
        request_id=request_id(number),
        number=number,
        num_tokens=memory + disk,
        num_memory_tokens=memory,
        num_disk_tokens=disk,
        read_bytes=0,
        duration_ns=1,
    )


def from_chain(number: int, num_tokens: int) -> RequestAdmitted:
    """An admission that found so many tokens."""
    return msgspec.structs.replace(
        admitted(number), num_cached_tokens=num_tokens, parted_because="unknown", waited_ns=5
    )


def parts(steps: Steps[Journal], number: int) -> tuple[int, int, int]:
    row = find_request(run_of(steps.journal), request_id(number))
    assert row is not None
    return row.num_memory_tokens, row.num_disk_tokens, row.num_prefilled_tokens


def test_a_prompt_is_what_was_restored_and_what_was_fed(both: Both) -> None:
    steps = both.file
    name = request_id(2)
    steps.commit([received(2, 100)], [from_chain(2, 64)])
    assert parts(steps, 2) == (0, 0, 0), "found is not yet restored"
    steps.commit([restored(2, 16, 32)])
    steps.commit([received(3)], [PrefillChunkCommitted(request_id=name, num_cached_tokens=99)])
    assert parts(steps, 2) == (16, 32, 51)
    steps.commit([received(4)], [RequestRetried(request_id=name, number=2, retry=1)])
    assert parts(steps, 2) == (0, 0, 0), "the row is gone"
    steps.commit([received(5)], [admitted(2)])
    steps.commit([restored(2, 16, 32)])
    assert parts(steps, 2) == (0, 0, 0), "what a dropped row was filled with is late"


def test_restored_output_is_no_part_of_the_prompt(both: Both) -> None:
    steps = both.file
    steps.commit([received(2, 40)], [from_chain(2, 64)])
    steps.commit([restored(2, 16, 48)])
    assert parts(steps, 2) == (16, 24, 0)
    row = find_request(run_of(steps.journal), request_id(2))
    assert row is not None
    assert (row.parted_because, row.waited_ns) == ("unknown", 5)


def test_verify_finds_a_prompt_that_does_not_add_up(tmp_path: Path) -> None:
    steps = Steps(Journal.open(tmp_path))
    steps.start()
    steps.commit([received(1, 40)], [from_chain(1, 16)])
    steps.commit([restored(1, 16, 0)])
    assert steps.journal.verify() == []
    steps.batch = (1,)
    steps.finish(1, [], 0)
    (finding,) = steps.journal.verify()
    steps.journal.close()
    assert finding == (
        "request 1: 16 from memory, 0 from disk and 0 prefilled are not its prompt of 40 tokens"
    )
