"""`fermata whatif`: the requests of a journal once more, with other settings."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from journal.errors import JournalError
from journal.reader import JournalReader
from scheduler.settings import ConfigurationError
from scheduler.simulation.world import Stuck
from scheduler.whatif.configuration import parse_changes, settings_of
from scheduler.whatif.fitting import FitError, check_fit, gather
from scheduler.whatif.recorded import NothingRecorded, incident_of
from scheduler.whatif.rerun import Rerun, hardware_of, recorded_block_tokens, sizes_of
from scheduler.whatif.totals import Totals, totals_of
from tools.text_table import text_table

DONE, STUCK, UNUSABLE = 0, 1, 2


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a what-if came to, for programs. Errors are permille of what was recorded; `again` is
    the recorded settings in the simulation, `changed` those with the changes.
    """

    prefill_error_permille: int | None
    decode_error_permille: int | None
    changes: dict[str, object]
    recorded: Totals
    again: Totals
    changed: Totals | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """The changes, as `name=value`, and whether programs read the answer."""

    changes: Sequence[str] = ()
    as_json: bool = False


def run(path: Path, wanted: Wanted) -> int:
    """Prints how good the cost model is, then what was recorded beside what would have been.
    Returns 0; 1 when a what-if comes to no end; 2 for a journal or a setting that cannot be used.
    """
    try:
        report = report_of(path, parse_changes(wanted.changes))
    except (JournalError, NothingRecorded, ConfigurationError) as error:
        print(f"fermata whatif: {error}", file=sys.stderr)
        return UNUSABLE
    except Stuck as error:
        print(f"fermata whatif: with these settings it comes to no end: {error}", file=sys.stderr)
        return STUCK
    if wanted.as_json:
        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(lines_of(report)))
    return DONE


def report_of(path: Path, changes: dict[str, object]) -> Report:
    """Reads the journal, fits, and runs it again with and without the changes."""
    with JournalReader.open(path) as reader:
        incident = incident_of(reader.read())
        facts = gather(reader.read(), sizes_of(incident))
        recorded = totals_of(reader.read())
    error: FitError = check_fit(facts, max(1, recorded_block_tokens(incident)))
    hardware = hardware_of(incident, facts)
    again = Rerun(incident, settings_of(incident, {}), hardware)
    again.run()
    changed = None
    if changes:
        changed = Rerun(incident, settings_of(incident, changes), hardware)
        changed.run()
    return Report(
        prefill_error_permille=error.prefill_permille,
        decode_error_permille=error.decode_permille,
        changes=changes,
        recorded=recorded,
        again=again.totals(),
        changed=None if changed is None else changed.totals(),
    )


def lines_of(report: Report) -> list[str]:
    """The error first: what follows is worth no more than that."""
    prefill, decode = report.prefill_error_permille, report.decode_error_permille
    off = f"prefill {percent(prefill)}, decode {percent(decode)} off"
    lines = [f"cost model, fitted to the first half of the facts, on the second half: {off}", ""]
    columns = ["", "recorded", "simulated"]
    sides = [report.recorded, report.again]
    if report.changed is not None:
        columns.append(", ".join(f"{name}={value}" for name, value in report.changes.items()))
        sides.append(report.changed)
    rows = [
        (name, *(shown(getattr(side, name)) for side in sides)) for name in Totals.__struct_fields__
    ]
    return lines + text_table(columns, rows, columns[1:])


def percent(permille: int | None) -> str:
    """An error as people read it."""
    return "not checked" if permille is None else f"{permille / 10:.1f}%"


def shown(value: int | None) -> str:
    """A number, or nothing."""
    return "-" if value is None else f"{value:,}"
