"""One HTML file that needs no other: markup, style, program and data.

The program may do nothing but run: the policy inside the file names the digests of the one script
and the one style, and forbids all else, every connection among it.
"""

import base64
import hashlib
from importlib.resources import files

import msgspec

from tools.timeline_parts import Picture

VIEW = "timeline_view"
SCRIPTS = (
    "text.js",
    "model.js",
    "scale.js",
    "filter.js",
    "draw_memory.js",
    "draw_lanes.js",
    "draw.js",
    "details.js",
    "summary.js",
    "events.js",
    "labels.js",
    "keys.js",
    "pointer.js",
    "start.js",
)
"""The parts of the program, in the order in which they need each other."""


def html_of(picture: Picture) -> str:
    """The whole file."""
    style = read("timeline.css")
    script = "\n".join(['"use strict";', *map(read, SCRIPTS)])
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "script": script, "data": data_of(picture)}
    return fill(read("timeline.html"), parts)


def fill(markup: str, parts: dict[str, str]) -> str:
    """Puts each part where the markup names it as `<!--name-->` or `%name%`, once."""
    for name, part in parts.items():
        before, found, after = markup.partition(f"%{name}%")
        assert found, f"the markup has a place for {name}"
        markup = before + part + after
    return markup


def read(name: str) -> str:
    """One of the files beside this module. Its last line break is not part of what is hashed."""
    return (files("tools") / VIEW / name).read_text(encoding="utf-8").rstrip("\n")


def digest(text: str) -> str:
    """The text as a Content-Security-Policy names it (https://www.w3.org/TR/CSP3/#grammardef-hash)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def data_of(picture: Picture) -> str:
    """The picture as JSON in which nothing can end the element that holds it: HTML knows no escapes
    in there, and JSON knows `<`, `>` and `&` by their numbers too.
    """
    text = msgspec.json.encode(picture).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
