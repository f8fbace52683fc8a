"""`fermata whatif --trace`: the requests of a trace on a server that need not exist."""

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from journal.errors import JournalError
from scheduler.settings import ConfigurationError, Settings
from scheduler.simulation.hardware import Hardware
from scheduler.simulation.world import Stuck
from scheduler.whatif.carried import NothingRecorded
from scheduler.whatif.configuration import parse_changes, settings_of
from scheduler.whatif.fitting import FitError
from scheduler.whatif.sizing import (
    CEILING,
    DISK,
    cells_of,
    run_trace,
    settings_without_journal,
    why_refused,
)
from scheduler.whatif.totals import Totals
from scheduler.whatif.trace import BadTrace, check_trace, coming_of_trace, hardware_named
from tools.whatif import DONE, error_line, give_up, read_source, refuse, table_of, title_of

DEFAULT_MODEL = "hybrid-27b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to serve the trace: a known model, or what a journal tells of; and with which
    settings, each ceiling with each budget.
    """

    model: str | None = None
    journal: Path | None = None
    changes: tuple[str, ...] = ()
    ceilings: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ()
    limit: int | None = None
    as_json: bool = False


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One combination, and what the trace comes to with it."""

    changes: dict[str, object]
    totals: Totals


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """For programs. Errors are permille of what the journal recorded, null for a known model: its
    numbers are what it is said to be, and nobody has measured them.
    """

    prefill_error_permille: int | None
    decode_error_permille: int | None
    model: str
    requests: int
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class Server:
    """What serves, with its settings for each cell."""

    hardware: Hardware
    error: FitError | None
    cells: list[tuple[dict[str, object], Settings]]


def run(trace: Path, wanted: Wanted) -> int:
    """Prints how good the costs are, then a column for each combination. Returns 0; 1 when it comes
    to no end; 2 for a trace, a journal or a setting that cannot be used.
    """
    try:
        server = server_of(wanted)
        report = report_of(trace, wanted.limit, server)
    except (BadTrace, JournalError, NothingRecorded, ConfigurationError) as error:
        return refuse(str(error))
    except Stuck as error:
        return give_up(error)
    if wanted.as_json:
        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(lines_of(report, server.error)))
    return DONE


def server_of(wanted: Wanted) -> Server:
    """What is to serve the trace."""
    changes = parse_changes(wanted.changes)
    grid = cells_of(wanted.ceilings, wanted.budgets)
    for option, name in (("--ceiling", CEILING), ("--ssd", DISK)):
        if name in changes and name in grid[0]:
            raise ConfigurationError(f"{option} and --set {name} are the same setting: give one")
    if wanted.journal is None:
        hardware = hardware_named(wanted.model or DEFAULT_MODEL)
        cells = [(cell, settings_without_journal(changes | cell)) for cell in grid]
        return Server(hardware, None, cells)
    if wanted.model is not None:
        raise ConfigurationError("--model and --journal are two servers: give one")
    source = read_source(wanted.journal)
    cells = [(cell, settings_of(source.incident, changes | cell)) for cell in grid]
    return Server(source.hardware, source.error, cells)


def report_of(trace: Path, limit: int | None, server: Server) -> Report:
    """Runs the trace on each. Raises BadTrace where none of them has room for one of its
    requests, however long that waits.
    """
    facts = server.hardware.facts
    num_requests = check_trace(trace, limit, facts)
    cells: list[Cell] = []
    refusals: list[str] = []
    for number, (changes, settings) in enumerate(server.cells, 1):
        progress = Progress(f"{number} of {len(server.cells)}", num_requests)
        coming = coming_of_trace(trace, limit)
        sized = run_trace(coming, settings, server.hardware, progress.show)
        progress.clear()
        cells.append(Cell(changes=changes, totals=sized.totals))
        if sized.refusal is not None:
            refusals.append(why_refused(sized.refusal))
    if len(refusals) == len(cells):
        raise BadTrace(f"{trace}: {refusals[-1]}")
    error = server.error or FitError(None, None)
    return Report(
        prefill_error_permille=error.prefill_permille,
        decode_error_permille=error.decode_permille,
        model=facts.name,
        requests=num_requests,
        cells=cells,
    )


class Progress:
    """One line on stderr that is written over, for people who wait."""

    def __init__(self, what: str, num_requests: int) -> None:
        self.what = what
        self.num_requests = num_requests
        self.is_shown = sys.stderr.isatty()

    def show(self, num_taken: int) -> None:
        """So many requests have come."""
        self.write(f"simulation {self.what}: {num_taken} of {self.num_requests} requests")

    def clear(self) -> None:
        """Nothing is left of it."""
        self.write("")

    def write(self, text: str) -> None:
        """The line, over the one before."""
        if self.is_shown:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def lines_of(report: Report, error: FitError | None) -> list[str]:
    """How far the costs may be off, and a column for each cell."""
    first = f"cost model: {report.model} by its description; how far that is off was not measured"
    if error is not None:
        first = error_line(error.prefill_permille, error.decode_permille)
    columns = [title_of(cell.changes) or "simulated" for cell in report.cells]
    return [first, "", *table_of(columns, [cell.totals for cell in report.cells])]
