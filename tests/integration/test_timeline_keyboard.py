"""The picture of a journal by keyboard alone, and what assistive technology is told of it."""

from pathlib import Path

import pytest

from journal import events
from tests.integration.timeline_browser import (
    WITHOUT,
    Browser,
    find_browser,
)
from tests.integration.timeline_journals import drawn, story
from tests.integration.timeline_seen import (
    OPEN_ONE,
    SECOND,
    assert_numbers,
    fields,
    mark_of,
    show,
    the,
)

pytestmark = pytest.mark.skipif(find_browser() is None, reason=WITHOUT)


def test_arrow_keys_go_from_event_to_event(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, drawn(story("every_rung")))
    browser.evaluate("byId('find').focus()")
    browser.evaluate("list.focus()")
    browser.press("Home")
    active = "active.mark.entry.seq"
    assert browser.evaluate("active.mark === shown.marks[0]")
    seen = [browser.evaluate("active.mark.place")]
    for _ in range(4):
        browser.press("ArrowRight")
        seen.append(browser.evaluate("active.mark.place"))
    assert seen == [0, 1, 2, 3, 4]
    browser.press("ArrowLeft")
    assert browser.evaluate("active.mark.place") == 3
    pause = the("every_rung", events.PauseStarted)
    browser.evaluate(f"activate({mark_of(pause)})")
    row = browser.evaluate("active.mark.row.index")
    browser.press("ArrowUp")
    assert browser.evaluate("active.mark.row.index") == row - 1
    browser.press("ArrowDown")
    assert browser.evaluate("active.mark.row.index") == row
    browser.press("ArrowUp", "ArrowUp", "ArrowUp")
    assert browser.evaluate("active.mark.row === rail")
    browser.press("End")
    assert browser.evaluate(active) == browser.evaluate("shown.marks.at(-1).entry.seq")


def test_focus_shows_and_tells_the_numbers(browser: Browser, tmp_path: Path) -> None:
    record = the("every_rung", events.PauseStarted)
    show(browser, tmp_path, drawn(story("every_rung")))
    browser.evaluate("list.focus()")
    browser.press("Home")
    while browser.evaluate("active.mark.entry.seq") != record.seq:
        browser.press("ArrowRight")
    assert_numbers(fields(browser, "#tip"), record.event)
    browser.press("ArrowLeft", "ArrowRight")
    told = browser.accessible(lambda role: role == "option")
    event = record.event
    assert isinstance(event, events.PauseStarted)
    words = f"rank {event.rank} of {event.num_candidates}"
    assert any(words in node["name"] and f"seq {record.seq}" in node["name"] for node in told)
    active = "document.getElementById(list.getAttribute('aria-activedescendant'))"
    assert browser.evaluate(f"{active}.getAttribute('aria-selected')") == "true"
    assert browser.evaluate(f"{active}.getAttribute('aria-setsize')") == str(
        browser.evaluate("shown.marks.length")
    )


def test_everything_is_reached_by_tab_and_seen(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, drawn(story("crash_while_paused")))
    seen: list[str] = []
    for _ in range(40):
        browser.press("Tab")
        name, outline, width = browser.evaluate(
            "(() => { const e = document.activeElement, s = getComputedStyle(e);"
            " if (e === document.body) return ['', '', 0];"
            " return [e.id || e.dataset.group || e.getAttribute('href') || e.textContent,"
            " s.outlineStyle, parseFloat(s.outlineWidth)]; })()"
        )
        if name in seen or not name:
            break
        assert outline != "none", name
        assert width >= 2, name
        seen.append(name)
    wanted = [
        "skip",
        "zoom-in",
        "zoom-out",
        "zoom-all",
        "move-left",
        "move-right",
        "find",
        "phase",
        "in-view",
    ]
    wanted += [*browser.evaluate("Object.keys(picture.groups)"), f"#req_{1:026}"]
    assert seen[: len(wanted)] == wanted
    rest = seen[len(wanted) :]
    assert [name for name in rest if name in ("marks", f"#{SECOND}", "Show")] == [
        "marks",
        "Show",
        f"#{SECOND}",
    ]


def test_a_request_is_opened_and_left_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, drawn(story("crash_while_paused")))
    browser.evaluate("labels.querySelector('a').focus()")
    browser.press("ArrowDown")
    assert browser.evaluate("document.activeElement.getAttribute('href')") == f"#{SECOND}"
    browser.press("Enter")
    browser.wait(f"({OPEN_ONE}) === '{SECOND}'")
    assert browser.evaluate("document.activeElement.id") == "side"
    browser.press("Escape")
    browser.wait(f"({OPEN_ONE}) === ''")
    assert browser.evaluate("document.activeElement.id") == "marks"
    pause = the("crash_while_paused", events.PauseStarted)
    browser.evaluate(f"activate({mark_of(pause)})")
    browser.press("Enter")
    browser.wait(f"({OPEN_ONE}) === '{SECOND}'")
    browser.settle()
    assert browser.evaluate("document.querySelector('#one-events .active').dataset.seq") == str(
        pause.seq
    )
    assert_numbers(fields(browser, "#one-events .active"), pause.event)


def test_assistive_technology_is_told_roles_and_names(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, drawn(story("crash_while_paused")), f"#{SECOND}")
    used = ("button", "link", "checkbox", "searchbox", "combobox", "listbox", "option")
    nodes = browser.accessible(lambda role: role in used)
    assert {node["role"] for node in nodes} >= set(used) - {"option"}
    assert [node for node in nodes if not node["name"].strip()] == []
    assert len({node["name"] for node in nodes if node["role"] == "checkbox"}) == 10
    links = [node["name"] for node in nodes if node["role"] == "link"]
    assert any(f"Events of {SECOND}: number 2, finished; waiting" in name for name in links)
    areas = {n["role"] for n in browser.accessible(lambda r: r in ("main", "banner"))}
    assert areas == {"main", "banner"}
    levels = browser.evaluate(
        "[...document.querySelectorAll('h1, h2, h3')].filter((e) => e.offsetParent)"
        ".map((e) => +e.tagName[1])"
    )
    assert levels == [1, 2]
    ids = browser.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert browser.evaluate("document.documentElement.lang") == "en"
