"""The diagram of phases shows the table, and the document shows the diagram."""

from pathlib import Path

import pytest

from scheduler.request import TRANSITIONS, Phase
from tools.diagram import BEGIN, END, DiagramError, diagram_of, main, with_diagram

DOCUMENT = Path(__file__).resolve().parents[2] / "ARCHITECTURE.md"


def test_small_table() -> None:
    table = {
        (Phase.WAITING, "request_queued"): Phase.WAITING,
        (Phase.WAITING, "request_rejected"): Phase.REJECTED,
        (Phase.WAITING, "server_started"): Phase.WAITING,
    }
    assert diagram_of(table).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> waiting: request_received",
        "    waiting --> waiting: request_queued, server_started",
        "    waiting --> rejected: request_rejected",
        "    finished --> [*]",
        "    cancelled --> [*]",
        "    aborted --> [*]",
        "    rejected --> [*]",
        "    joined --> [*]",
    ]


def test_every_row_of_the_table_is_drawn() -> None:
    arrows = [line.strip() for line in diagram_of(TRANSITIONS).splitlines() if ": " in line]
    drawn = {
        (Phase(way.split(" --> ")[0]), kind): Phase(way.split(" --> ")[1])
        for way, _, kinds in (arrow.partition(": ") for arrow in arrows[1:])
        for kind in kinds.split(", ")
    }
    assert drawn == TRANSITIONS


def test_only_what_is_between_the_markers_changes() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    fresh = with_diagram(text, "new\n")
    assert fresh == f"before\n{BEGIN}\n```mermaid\nnew\n```\n{END}\nafter\n"
    assert with_diagram(fresh, "new\n") == fresh


@pytest.mark.parametrize("text", ["", f"{BEGIN}\n", f"{END}\n{BEGIN}\n"])
def test_missing_marker_is_named(text: str) -> None:
    with pytest.raises(DiagramError, match="states: begin"):
        with_diagram(text, "new\n")


def test_stale_document_is_found_and_written(tmp_path: Path) -> None:
    file = tmp_path / "document.md"
    file.write_text(f"{BEGIN}\n{END}\n")
    assert main(["--check", "--file", str(file)]) == 1
    assert file.read_text() == f"{BEGIN}\n{END}\n"
    assert main(["--file", str(file)]) == 0
    assert main(["--check", "--file", str(file)]) == 0


def test_missing_document_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--file", str(tmp_path / "nowhere.md")]) == 2
    assert "nowhere.md" in capsys.readouterr().err


def test_document_shows_the_table_of_the_code() -> None:
    assert main(["--check", "--file", str(DOCUMENT)]) == 0
