"""`fermata whatif`: the requests of a journal once more, with other settings."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from journal.bundle import refuse_changed
from journal.errors import JournalError
from journal.reader import JournalReader
from journal.rebuild import load_base
from journal.rows import RunRow
from scheduler.policy import POLICY_VERSION
from scheduler.settings import ConfigurationError
from scheduler.simulation.hardware import Hardware
from scheduler.simulation.world import Stuck
from scheduler.whatif.carried import NothingRecorded
from scheduler.whatif.configuration import parse_changes, settings_of
from scheduler.whatif.fitting import FitError, check_fit, gather
from scheduler.whatif.recorded import Incident, incident_of
from scheduler.whatif.rerun import hardware_of, recorded_block_tokens, rerun_of, sizes_of
from scheduler.whatif.totals import Totals, totals_of
from tools.text_table import text_table

LOOKED_AT = (
    "finished",
    "pauses",
    "held_ms",
    "total_ms",
    "first_token_p50_ms",
    "gap_p99_ms",
    "peak_bytes",
    "hit_tokens",
)
"""Of the totals, those by which a simulation is judged."""

DONE, STUCK, UNUSABLE = 0, 1, 2


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a what-if came to, for programs. Errors are permille of what was recorded; `simulated`
    is with the recorded settings, `changed` with the changes. The recorded policy is that of the
    last run. `num_carried` requests were open where the journal begins, `num_open` where it ends.
    """

    prefill_error_permille: int | None
    decode_error_permille: int | None
    simulated_error_permille: dict[str, int | None]
    num_carried: int
    num_open: int
    recorded_policy_version: int
    policy_version: int
    changes: dict[str, object]
    recorded: Totals
    simulated: Totals
    changed: Totals | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """The changes, as `name=value`, and whether programs read the answer."""

    changes: Sequence[str] = ()
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """What a journal tells, and how far what is made of it is off."""

    incident: Incident
    hardware: Hardware
    recorded: Totals
    error: FitError


def run(path: Path, wanted: Wanted) -> int:
    """Prints how good the cost model is, then what was recorded beside what would have been.
    Returns 0; 1 when a what-if comes to no end; 2 for a journal or a setting that cannot be used.
    """
    try:
        report = report_of(path, parse_changes(wanted.changes))
    except (JournalError, NothingRecorded, ConfigurationError) as error:
        return refuse(str(error))
    except Stuck as error:
        return give_up(error)
    if wanted.as_json:
        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(lines_of(report)))
    return DONE


def refuse(why: str) -> int:
    """One line on stderr, and its exit status."""
    print(f"fermata whatif: {' '.join(why.split())}", file=sys.stderr)
    return UNUSABLE


def refuse_options() -> int:
    """Options that do not go together."""
    return refuse(
        "give a journal, or --trace FILE; --model, --journal, --ceiling, --ssd and --limit are"
        " those of a trace"
    )


def give_up(error: Stuck) -> int:
    """One line on stderr for a simulation without an end, and its exit status."""
    print(f"fermata whatif: with these settings it comes to no end: {error}", file=sys.stderr)
    return STUCK


def read_source(path: Path) -> Source:
    """Reads a journal, or a bundle that nobody has changed, and fits. Raises JournalError for a
    file that cannot be read, and NothingRecorded for one without a start or a request.
    """
    with JournalReader.open(path) as reader:
        refuse_changed(reader)
        try:
            incident = incident_of(reader.read(), carried_run(reader))
        except NothingRecorded as error:
            raise NothingRecorded(f"{reader.file}: {error}") from error
        facts = gather(reader.read(), sizes_of(incident))
        recorded = totals_of(reader.read())
    error = check_fit(facts, max(1, recorded_block_tokens(incident)))
    return Source(incident, hardware_of(incident, facts), recorded, error)


def carried_run(reader: JournalReader) -> RunRow | None:
    """The run in which a bundle begins, or a journal that was shortened."""
    with reader.transaction() as run:
        return load_base(run).rows.run


def report_of(path: Path, changes: dict[str, object]) -> Report:
    """Runs a journal again with and without the changes."""
    source = read_source(path)
    settings = settings_of(source.incident, {})
    changed_settings = settings_of(source.incident, changes)
    again = rerun_of(source.incident, settings, source.hardware)
    again.run()
    changed = None
    if changes:
        changed = rerun_of(source.incident, changed_settings, source.hardware)
        changed.run()
    simulated = again.totals()
    return Report(
        prefill_error_permille=source.error.prefill_permille,
        decode_error_permille=source.error.decode_permille,
        simulated_error_permille=differences(source.recorded, simulated),
        num_carried=len(source.incident.carried),
        num_open=source.incident.num_open,
        recorded_policy_version=source.incident.policy_version,
        policy_version=POLICY_VERSION,
        changes=changes,
        recorded=source.recorded,
        simulated=simulated,
        changed=None if changed is None else changed.totals(),
    )


def differences(recorded: Totals, simulated: Totals) -> dict[str, int | None]:
    """How much more each number is that people look at, in permille of what was recorded."""
    return {
        name: difference_permille(getattr(recorded, name), getattr(simulated, name))
        for name in LOOKED_AT
    }


def difference_permille(recorded: int | None, simulated: int | None) -> int | None:
    """How much more it is. Null without a recorded number, or with one that is 0."""
    if not recorded or simulated is None:
        return None
    return round((simulated - recorded) * 1000 / recorded)


def lines_of(report: Report) -> list[str]:
    """The errors first: what follows is worth no more than that."""
    columns = ["recorded", "simulated"]
    sides = [report.recorded, report.simulated]
    if report.changed is not None:
        columns.append(title_of(report.changes))
        sides.append(report.changed)
    errors = [
        error_line(report.prefill_error_permille, report.decode_error_permille),
        simulated_line(report.simulated_error_permille),
    ]
    return [*errors, *caveats_of(report), "", *table_of(columns, sides)]


def simulated_line(permille: dict[str, int | None]) -> str:
    """How far the whole is off."""
    found = [f"{name} {p / 10:+.1f}%" for name, p in permille.items() if p is not None]
    return f"the whole, simulated with the recorded settings: {', '.join(found) or 'not checked'}"


def caveats_of(report: Report) -> Iterator[str]:
    """What else makes the columns differ, besides settings."""
    if report.recorded_policy_version != report.policy_version:
        yield (
            f"recorded under policy {report.recorded_policy_version}, simulated with policy"
            f" {report.policy_version}: the two may differ for that alone"
        )
    if report.num_carried:
        yield (
            f"{report.num_carried} requests were open where this begins: simulated, they come then,"
            " with what they had put out as prompt, and nothing of them is saved yet"
        )
    if report.num_open:
        yield (
            f"{report.num_open} requests had not ended where this ends: simulated, they end after"
            " what they had put out by then, but for those that somebody holds: they stay held"
        )


def error_line(prefill_permille: int | None, decode_permille: int | None) -> str:
    """How far the cost model is off."""
    off = f"prefill {percent(prefill_permille)}, decode {percent(decode_permille)} off"
    return f"cost model, fitted to the first half of the facts, on the second half: {off}"


def title_of(changes: dict[str, object]) -> str:
    """Settings as the title of a column."""
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def table_of(columns: Sequence[str], sides: Sequence[Totals]) -> list[str]:
    """Totals side by side."""
    rows = [
        (name, *(shown(getattr(side, name)) for side in sides)) for name in Totals.__struct_fields__
    ]
    return text_table(["", *columns], rows, columns)


def percent(permille: int | None) -> str:
    """An error as people read it."""
    return "not checked" if permille is None else f"{permille / 10:.1f}%"


def shown(value: int | None) -> str:
    """A number, or nothing."""
    return "-" if value is None else f"{value:,}"
