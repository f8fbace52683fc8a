"""What tests ask of a picture in a browser: where things are, what is painted and what is told."""

from pathlib import Path

import msgspec

from journal import events
from journal.events import Record
from tests.integration.timeline_browser import Browser
from tests.integration.timeline_journals import story
from tools.timeline_file import html_of
from tools.timeline_parts import Picture

SECOND = f"req_{2:026}"
OPEN_ONE = "byId('one').hidden ? '' : byId('one-title').textContent"
"""The id of the request whose events are beside the picture."""


def show(browser: Browser, folder: Path, picture: Picture, fragment: str = "") -> None:
    """Opens a picture in the browser."""
    file = folder / "picture.html"
    file.write_text(html_of(picture))
    browser.open(file, fragment)


def the(name: str, kind: type[events.Event]) -> Record:
    """The first event of a kind in a story."""
    return next(record for record in story(name) if isinstance(record.event, kind))


def mark_of(record: Record) -> str:
    """JavaScript for the mark of an event."""
    return f"marks.find((each) => each.entry.seq === {record.seq})"


def spot(browser: Browser, mark: str) -> tuple[float, float]:
    """Where a mark is in the window."""
    x, y = browser.evaluate(
        f"(() => {{ const s = spotOf({mark}), b = list.getBoundingClientRect();"
        " return [s.x + b.left, s.y + b.top]; })()"
    )
    return x, y


def middle(browser: Browser, element: str) -> tuple[float, float]:
    """The middle of an element."""
    x, y = browser.evaluate(
        f"(() => {{ const b = {element}.getBoundingClientRect();"
        " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
    )
    return x, y


def fields(browser: Browser, within: str) -> dict[str, str]:
    """Names and values that are shown inside an element."""
    return browser.evaluate(
        f"Object.fromEntries([...document.querySelectorAll('{within} dt')].map("
        "(name) => [name.textContent, name.nextElementSibling.textContent]))"
    )


def assert_numbers(found: dict[str, str], event: events.Event) -> None:
    """Each field of the event is shown, each number as it stands in the journal."""
    body = msgspec.to_builtins(event)
    for name in ("kind", "request_id", "number"):
        body.pop(name, None)
    assert set(found) == set(body)
    for name, value in body.items():
        if isinstance(value, int) and not isinstance(value, bool):
            assert int(found[name].split()[0].replace(",", "")) == value, name
        elif isinstance(value, str) and value:
            assert found[name] == value


def pixels(browser: Browser, canvas: str, color: str) -> int:
    """How much of a canvas has nearly this colour of the style."""
    return browser.evaluate(
        "(() => {"
        f" const c = byId('{canvas}'), hex = colors['{color}'];"
        " const rgb = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));"
        " const copy = new OffscreenCanvas(c.width, c.height);"
        " const ink = copy.getContext('2d', { willReadFrequently: true });"
        " ink.drawImage(c, 0, 0);"
        " const d = ink.getImageData(0, 0, c.width, c.height).data;"
        " const near = (i) => rgb.every((part, k) => Math.abs(d[i + k] - part) < 40);"
        " let n = 0;"
        " for (let i = 0; i < d.length; i += 4) n += d[i + 3] > 128 && near(i);"
        " return n; })()"
    )


def count_glyphs(browser: Browser) -> int:
    """How many glyphs one frame has."""
    return browser.evaluate(
        "(() => { const was = drawGlyph; let n = 0;"
        " drawGlyph = (...rest) => { n += 1; was(...rest); };"
        " drawNow(); drawGlyph = was; return n; })()"
    )
