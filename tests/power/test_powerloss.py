"""The states in which a power cut can leave a disk, by hand."""

from pathlib import Path

from scheduler.kvcache.files import write_whole
from scheduler.kvcache.powerloss import (
    SECTOR_BYTES,
    Disk,
    FolderFlushed,
    Named,
    Operation,
    RecordingFiles,
    State,
    Wrote,
    rebuild,
    torn_versions,
)

LONG = bytes(range(1, 251)) * 5


def after(*operations: Operation) -> list[State]:
    disk = Disk()
    for operation in operations:
        disk.apply(operation)
    states = list(disk.all_states())
    assert len(states) == disk.num_states()
    return states


def test_what_was_not_flushed_is_torn_at_any_sector() -> None:
    versions = torn_versions(LONG, 0)
    assert len({*versions}) == len(versions)
    sizes = {len(version) for version in versions}
    assert sizes == {0, SECTOR_BYTES, 2 * SECTOR_BYTES, len(LONG)}
    assert versions[0] == b""
    assert versions[-1] == LONG
    for start in (0, SECTOR_BYTES, 2 * SECTOR_BYTES):
        assert LONG[:start] + bytes(len(LONG) - start) in versions
        holed = LONG[:start] + bytes(len(LONG[start:][:SECTOR_BYTES]))
        assert holed + LONG[len(holed) :] in versions


def test_what_was_flushed_stays() -> None:
    for version in torn_versions(LONG, SECTOR_BYTES):
        assert version[:SECTOR_BYTES] == LONG[:SECTOR_BYTES]
    assert torn_versions(LONG, len(LONG)) == [LONG]


def test_names_come_out_each_for_itself_until_their_folder_is_flushed() -> None:
    made = (Named("a", 1), Wrote(1, b""), Named("b", "folder"), Named("b/c", 1))
    assert {tuple(state) for state in after(*made)} == {
        (), ("a",), ("b",), ("a", "b"), ("b", "b/c"), ("a", "b", "b/c"),
    }  # fmt: skip
    assert {tuple(s) for s in after(*made, FolderFlushed(""))} == {("a", "b"), ("a", "b", "b/c")}
    flushed = (*made, FolderFlushed(""), FolderFlushed("b"))
    assert {tuple(state) for state in after(*flushed)} == {("a", "b", "b/c")}
    gone = (*flushed, Named("b/c", "nothing"))
    assert {tuple(state) for state in after(*gone)} == {("a", "b"), ("a", "b", "b/c")}


def test_a_name_that_is_replaced_is_never_missing() -> None:
    operations = (
        *(Named("old", 1), Wrote(1, b""), FolderFlushed("")),
        *(Named("new", 2), Wrote(2, b""), Named("old", 2), Named("new", "nothing")),
    )
    assert all("old" in state for state in after(*operations))


def test_a_file_that_was_written_whole_is_there_in_every_state(tmp_path: Path) -> None:
    files = RecordingFiles(tmp_path / "recorded")
    files.root.mkdir()
    write_whole(files, files.root / "a" / "b", [memoryview(LONG)])
    states = after(*files.history)
    assert {tuple(sorted(state)) for state in states} >= {("a", "a/b")}
    for number, state in enumerate(states):
        assert state["a/b"] == LONG
        copy = tmp_path / str(number)
        copy.mkdir()
        rebuild(state, copy)
        assert (copy / "a" / "b").read_bytes() == LONG


def test_some_states_are_among_all_of_them() -> None:
    disk = Disk()
    for number in range(6):
        disk.apply(Named(f"{number}", number))
        disk.apply(Wrote(number, LONG[:number]))
    every = [dict(state) for state in disk.all_states()]
    some = [dict(state) for state in disk.some_states(seed=3, num_random=10)]
    assert all(state in every for state in some)
    assert {} in some
    assert {str(number): LONG[:number] for number in range(6)} in some
    assert some == [dict(state) for state in disk.some_states(seed=3, num_random=10)]
