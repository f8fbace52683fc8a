"""Stories as text: a scenario file is one JSON object, to be read, changed and played again."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import msgspec

from journal.crashpoints import POINTS
from scheduler.settings import NS_PER_S, ConfigurationError
from scheduler.simulation.happenings import HAPPENINGS, Happening
from scheduler.simulation.models import small_model, small_settings
from scheduler.simulation.stories import Story

MOST = {"_ns": 3_600 * NS_PER_S, "_ms": 3_600 * 1_000, "_tokens": 100_000, "_bytes": 10**12}
"""The largest numbers, by the last part of their name: an hour, and what is played in seconds."""


class ScenarioError(Exception):
    """A text that is no scenario, and why, in one line."""


def to_text(story: Story) -> str:
    """The story as indented JSON, from which it can be read again."""
    return msgspec.json.format(msgspec.json.encode(story), indent=2).decode()


def from_text(text: str) -> Story:
    """The inverse of `to_text`. Raises ScenarioError for what is no JSON, for names that mean
    nothing, and for values that cannot be.
    """
    try:
        story = msgspec.json.decode(text, type=Story)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ScenarioError(str(error)) from error
    for place in unknown_names(msgspec.json.decode(text), msgspec.to_builtins(story)):
        raise ScenarioError(f"{place} means nothing")
    for place, why in impossible_numbers(msgspec.to_builtins(story)):
        raise ScenarioError(f"{place}: {why}")
    for number, happening in enumerate(story.happenings):
        if why := why_cannot_happen(happening):
            raise ScenarioError(f"happenings[{number}]: {why}")
    check_settings(story)
    return story


def unknown_names(given: object, read: object, where: str = "") -> Iterator[str]:
    """The places of keys in the text that were passed over when it was read."""
    if isinstance(given, dict) and isinstance(read, dict):
        known = cast("Mapping[str, object]", read)
        for name, value in cast("Mapping[str, object]", given).items():
            place = f"{where}.{name}" if where else name
            if name in known:
                yield from unknown_names(value, known[name], place)
            else:
                yield place
    elif isinstance(given, list) and isinstance(read, list | tuple):
        pairs = zip(cast("list[object]", given), cast("list[object]", read), strict=True)
        for number, (one, other) in enumerate(pairs):
            yield from unknown_names(one, other, f"{where}[{number}]")


def impossible_numbers(value: object, where: str = "") -> Iterator[tuple[str, str]]:
    """The places of numbers that cannot be, and why. Settings have bounds of their own."""
    if isinstance(value, dict):
        for name, part in cast("Mapping[str, object]", value).items():
            if where or name != "settings":
                yield from impossible_numbers(part, f"{where}.{name}" if where else name)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(cast("Sequence[object]", value)):
            yield from impossible_numbers(part, f"{where}[{number}]")
    elif isinstance(value, int) and (most := MOST.get(unit_of(where))) is not None:
        least = -1 if where.endswith("cancels_at_tokens") else 0
        if not least <= value <= most:
            yield where, f"{value} is not from {least} to {most}"


def unit_of(place: str) -> str:
    """The last part of a name, without the number of an element: what it counts."""
    return "_" + place.rpartition(".")[2].partition("[")[0].rpartition("_")[2]


def why_cannot_happen(happening: Happening) -> str:
    """Empty for what can."""
    if happening.kind not in HAPPENINGS:
        return f"there is no kind {happening.kind!r}; there are {', '.join(sorted(HAPPENINGS))}"
    if happening.kind == "mark" and happening.word not in POINTS:
        return f"there is no point {happening.word!r}; `fermata crash --list` shows them"
    return ""


def check_settings(story: Story) -> None:
    """Raises ScenarioError for settings with which there is no server to simulate."""
    try:
        settings = small_settings(story.ceiling_bytes, **story.settings)
    except ConfigurationError as error:
        raise ScenarioError(f"settings: {error}") from error
    model = small_model(story.state_bytes)
    if settings.kv.limits(model) is None:
        raise ScenarioError("settings: kv.enabled: a simulated server saves its blocks")
    if story.ceiling_bytes <= model.weights_bytes:
        raise ScenarioError(f"ceiling_bytes: the model alone takes {model.weights_bytes} bytes")
