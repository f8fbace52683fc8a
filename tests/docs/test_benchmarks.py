"""What the README says of the benchmarks is what there is."""

import re
from pathlib import Path

import msgspec

from tools.bench_common import Measurement, machine, measure, report
from tools.cli import bench

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = README.partition("\n## Benchmarks\n")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", SECTION, flags=re.MULTILINE))


def test_the_keys_are_those_of_the_object() -> None:
    assert list(ROWS) == list(report("kv", [measure("one", "ms", [1.0])], seed=1))


def test_the_keys_inside_are_those_of_their_objects() -> None:
    assert re.findall(r"`(\w+)`", ROWS["machine"]) == list(machine())
    fields = [field.name for field in msgspec.structs.fields(Measurement)]
    assert re.findall(r"`(\w+)`", ROWS["measurements"]) == fields


def test_every_benchmark_is_named() -> None:
    named = re.findall(r"^    uv run fermata bench (\w+) ", SECTION, flags=re.MULTILINE)
    assert named == [command.name for command in bench.registered_commands]
