"""The picture of a journal in a real browser: looked at and pointed at."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from journal import events
from journal.events import Record
from tests.integration.timeline_browser import (
    NARROW,
    WITHOUT,
    Browser,
    find_browser,
)
from tests.integration.timeline_journals import MANY, crowded, drawn, story, upgraded_histories
from tests.integration.timeline_seen import (
    OPEN_ONE,
    SECOND,
    assert_numbers,
    count_glyphs,
    fields,
    mark_of,
    middle,
    pixels,
    show,
    spot,
    the,
)
from tools import timeline as command
from tools.timeline_parts import Entry, Picture
from tools.timeline_window import MAX_SEQ, Window

pytestmark = pytest.mark.skipif(find_browser() is None, reason=WITHOUT)


def test_every_history_is_drawn_without_an_error(browser: Browser, tmp_path: Path) -> None:
    for file in upgraded_histories(tmp_path):
        output = tmp_path / f"{file.stem}.html"
        assert command.run(file, output) == 0
        browser.open(output)
        labels = browser.evaluate("labels.children.length")
        assert labels == browser.evaluate("Math.min(lanes.length, shown.lanes.length)") > 0
        assert browser.evaluate("shown.marks.length") > labels
        if browser.evaluate("lanes.some((lane) => lane.times.get('decoding') > 0)"):
            assert pixels(browser, "lanes", "decoding") > 20
        if browser.evaluate("samples.length > 1"):
            assert pixels(browser, "top", "usage") > 20


def test_lanes_memory_and_who_was_held_are_there(browser: Browser, tmp_path: Path) -> None:
    picture = drawn(story("every_rung"))
    show(browser, tmp_path, picture)
    for color in ("prefilling", "decoding", "paused", "resuming", "pauses", "admissions", "ends"):
        assert pixels(browser, "lanes", color) > 5, color
    for color in ("ceiling", "high", "low", "usage", "memory"):
        assert pixels(browser, "top", color) > 5, color
    held = browser.evaluate("[...document.querySelectorAll('.hold')].map((e) => e.textContent)")
    assert len(held) == len(picture.holds) == 2
    assert all("emergency mark" in text for text in held)
    lengths = [(hold.end_ns or 0) - (hold.paused_ns or 0) for hold in picture.holds]
    assert browser.evaluate("holds.map(heldNs)") == lengths
    assert "2 requests held 2 times" in browser.evaluate("byId('gist').textContent")


def test_hover_shows_the_numbers_of_the_journal(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, drawn(story("every_rung")))
    for kind in (events.PauseStarted, events.RequestFinished, events.MemoryReclaimed):
        record = the("every_rung", kind)
        x, y = spot(browser, mark_of(record))
        browser.point(x, y)
        browser.settle()
        assert not browser.evaluate("tip.hidden")
        assert f"seq {record.seq}" in browser.evaluate("tip.textContent")
        assert_numbers(fields(browser, "#tip"), record.event)
    browser.point(5, 5)
    browser.settle()
    assert browser.evaluate("tip.hidden")


def test_hover_over_memory_shows_the_reading(browser: Browser, tmp_path: Path) -> None:
    picture = drawn(story("every_rung"))
    show(browser, tmp_path, picture)
    sample = max(picture.samples, key=lambda each: each.usage_bytes)
    x = browser.evaluate(f"placeOf({sample.at_ns}) + 1")
    browser.point(x, middle(browser, "topCanvas")[1])
    browser.settle()
    found = fields(browser, "#tip")
    assert found["used and reserved"].startswith(f"{sample.usage_bytes:,} B")
    assert found["ceiling"].startswith(f"{sample.ceiling_bytes:,} B")
    assert "emergency mark" in found


def test_what_was_read_and_what_is_counted_are_two_numbers(
    browser: Browser, tmp_path: Path
) -> None:
    picture = drawn(story("every_rung"))
    show(browser, tmp_path, picture)
    read = max(sample.read_bytes for sample in picture.samples)
    usage = max(sample.usage_bytes for sample in picture.samples)
    assert read < usage
    texts = [browser.evaluate(f"bytesText({size})") for size in (read, usage)]
    gist = browser.evaluate("byId('gist').textContent")
    assert f"memory read up to {texts[0]}, used and reserved up to {texts[1]}, ceiling" in gist
    assert "in use" not in browser.evaluate("document.body.innerText")
    [piece] = browser.evaluate("pieces.map((piece) => [piece.samples.length, piece.end])")
    assert piece == [len(picture.samples), picture.end_ns]


def test_where_no_server_was_there_is_no_memory(browser: Browser, tmp_path: Path) -> None:
    picture = drawn(story("crash_while_paused"))
    [away] = picture.aways
    second = 10**9
    for sample in picture.samples:  # the story starts again at once: here it takes a second
        if sample.seq > away.last_seq:
            sample.at_ns += second
    for late in (away, picture):
        late.end_ns += second
    show(browser, tmp_path, picture)
    pieces = browser.evaluate(
        "pieces.map((each) => [each.samples.at(-1).at, each.end, each.samples[0].at])"
    )
    assert len(pieces) == 2
    assert pieces[0][0] <= pieces[0][1] == away.begin_ns
    assert pieces[1][2] >= away.end_ns
    at = (away.begin_ns + away.end_ns) // 2
    browser.point(browser.evaluate(f"placeOf({at})"), middle(browser, "topCanvas")[1])
    browser.settle()
    assert browser.evaluate("tip.textContent") == "No server, no memory"
    assert browser.evaluate(f"sampleAt({away.end_ns - 1})") is None, (
        "that of the run before is gone"
    )
    assert browser.evaluate(f"sampleAt({away.begin_ns}).seq") <= away.last_seq


def test_filters_hide_events_and_requests(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, drawn(story("crash_while_paused")))
    pauses = "shown.marks.filter((mark) => mark.entry.group === 'pauses').length"
    before, painted = browser.evaluate(pauses), pixels(browser, "lanes", "pauses")
    assert before > 2
    browser.click(*middle(browser, "document.querySelector('[data-group=pauses]')"))
    assert browser.evaluate(pauses) == 0
    assert pixels(browser, "lanes", "pauses") < painted
    browser.click(*middle(browser, "document.querySelector('[data-group=pauses]')"))
    assert browser.evaluate(pauses) == before
    names = "[...labels.querySelectorAll('a')].map((a) => a.getAttribute('href').slice(1))"
    assert len(browser.evaluate(names)) == 2
    browser.evaluate("byId('phase').focus()")
    browser.press("p", "p")  # the second choice that begins so: prefill, pausing, paused
    browser.press("p")
    assert browser.evaluate("byId('phase').value") == "paused"
    assert browser.evaluate(names) == [SECOND]
    browser.evaluate("clearRequestFilter(); byId('find').focus()")
    browser.press("1")
    assert browser.evaluate(names) == [f"req_{1:026}"]
    browser.press("x")
    assert browser.evaluate(names) == []
    assert not browser.evaluate("byId('nobody').hidden")


def test_wheel_buttons_and_keys_zoom_and_move(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, drawn(story("every_rung")))
    whole = browser.evaluate("spanOf()")
    x, y = middle(browser, "topCanvas")
    under = browser.evaluate(f"timeAt({x})")
    browser.point(x, y, "mouseWheel", deltaX=0, deltaY=-400)
    browser.settle()
    span = browser.evaluate("spanOf()")
    assert span < whole * 0.7
    assert browser.evaluate(f"timeAt({x})") == pytest.approx(under, abs=whole / 1000)
    browser.click(*middle(browser, "byId('zoom-in')"))
    assert browser.evaluate("spanOf()") == pytest.approx(span / 2)
    browser.press("+")
    assert browser.evaluate("spanOf()") == pytest.approx(span / 4)
    begin = browser.evaluate("view.begin")
    browser.press("ArrowRight", shift=True)
    assert browser.evaluate("view.begin") == pytest.approx(begin + span / 16)
    browser.point(x, y, "mousePressed", button="left", clickCount=1)
    browser.point(x + 100, y, button="left", buttons=1)
    browser.point(x + 100, y, "mouseReleased", button="left", clickCount=1)
    browser.settle()
    assert browser.evaluate("view.begin") < begin + span / 16
    browser.press("-", "0")
    assert browser.evaluate("spanOf()") == pytest.approx(whole)
    x, y = middle(browser, "list")
    browser.point(x, y, "mouseWheel", deltaX=0, deltaY=-400)
    browser.settle()
    assert browser.evaluate("spanOf()") < whole * 0.7


def seqs_of(picture: Picture, request_id: str) -> list[int]:
    """The entries about a request, as the picture has them."""
    index = [lane.request_id for lane in picture.lanes].index(request_id)
    about: list[Entry] = [entry for entry in picture.entries if index in entry.lanes]
    return [entry.seq for entry in about]


def test_an_address_opens_all_events_of_its_request_in_order(
    browser: Browser, tmp_path: Path
) -> None:
    picture = drawn(story("crash_while_paused"))
    show(browser, tmp_path, picture, f"#{SECOND}")
    assert browser.evaluate(OPEN_ONE) == SECOND
    shown = browser.evaluate("[...byId('one-events').children].map((e) => +e.dataset.seq)")
    assert shown == seqs_of(picture, SECOND)
    named = [r.seq for r in story("crash_while_paused") if names(r, SECOND)]
    assert set(named) <= set(shown)
    browser.evaluate("byId('back').click()")
    browser.wait(f"({OPEN_ONE}) === ''")


def names(record: Record, request_id: str) -> bool:
    return getattr(record.event, "request_id", None) == request_id


def test_dark_and_still_are_respected(browser: Browser, tmp_path: Path) -> None:
    browser.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    show(browser, tmp_path, drawn(story("emergency_alone")))
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(ground), browser.evaluate("colors.decoding")
    moving = (
        "[...document.querySelectorAll('*')].filter((e) => { const s = getComputedStyle(e);"
        " return parseFloat(s.transitionDuration) || s.animationName !== 'none'; }).length"
    )
    assert browser.evaluate(moving) == 0
    browser.prefer(prefers_color_scheme="dark")
    assert (browser.evaluate(ground), browser.evaluate("colors.decoding")) != light
    assert pixels(browser, "lanes", "decoding") > 20


def test_a_narrow_window_is_not_broken(browser: Browser, tmp_path: Path) -> None:
    browser.size(*NARROW)
    show(browser, tmp_path, drawn(story("every_rung")))
    assert browser.evaluate("document.documentElement.scrollWidth") <= NARROW[0]
    beyond = browser.evaluate(
        "[...document.querySelectorAll('button, input, select, a, canvas, li, p')].filter((e) =>"
        " e.offsetParent && e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert beyond == 0
    assert browser.evaluate("byId('side').getBoundingClientRect().top") > browser.evaluate(
        "byId('board').getBoundingClientRect().bottom - 2"
    )
    assert pixels(browser, "lanes", "decoding") > 20


def test_what_the_journal_says_stays_text(browser: Browser, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
    picture = drawn(story("emergency_alone"))
    for entry in picture.entries:
        entry.body |= {"detail": evil}
    picture = msgspec.structs.replace(picture, journal=evil)
    show(browser, tmp_path, picture, f"#{picture.lanes[0].request_id}")
    browser.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    browser.settle()
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.scripts.length") == 2
    assert evil in browser.evaluate("byId('one-events').textContent")
    assert evil in browser.evaluate("byId('window').textContent")


def test_the_file_can_reach_nothing(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, drawn(story("emergency_alone")))
    assert (
        browser.evaluate("fetch('data:text/plain,x').then(() => 'let through', () => 'refused')")
        == "refused"
    )
    browser.evaluate(
        "document.body.append(make('script', { textContent: 'window.wasRun = true' }))"
    )
    assert not browser.evaluate("window.wasRun === true")
    assert browser.requests == []
    assert "Content Security Policy" in json.dumps(browser.messages)
    browser.messages.clear()  # these two were meant


def test_ten_thousand_events_are_few_elements_and_few_strokes(
    browser: Browser, tmp_path: Path
) -> None:
    records = crowded()
    picture = drawn(records)
    assert picture.num_events >= MANY
    show(browser, tmp_path, picture)
    browser.click(*middle(browser, "document.querySelector('[data-group=steps]')"))
    num_marks: Any = browser.evaluate("shown.marks.length")
    assert num_marks > MANY / 2
    assert browser.evaluate("document.querySelectorAll('*').length") < 2_000
    rows = "[rail, ...shown.lanes.slice(0, labels.children.length)]"
    behind = browser.evaluate(f"{rows}.reduce((sum, row) => sum + row.marks.length, 0)")
    assert 100 < count_glyphs(browser) < behind * 0.6
    browser.evaluate("zoom(0.02); drawNow()")
    assert count_glyphs(browser) < 600
    browser.evaluate("scroller.scrollTop = 3000; drawNow()")
    assert browser.evaluate("labels.firstChild.textContent") != "1"
    assert browser.evaluate("labels.children.length") < 40
    browser.evaluate("list.focus()")
    browser.press("End")
    assert browser.evaluate("active.mark.place") == num_marks - 1
    assert browser.evaluate("view.begin < active.mark.at && active.mark.at < view.end")
    held = len(picture.holds)
    assert held > 3
    assert browser.evaluate("document.querySelectorAll('.hold').length") == min(held, 100)
    browser.press("0")
    browser.click(*middle(browser, "byId('in-view')"))
    browser.evaluate("zoom(0.05, picture.end_ns); drawNow()")
    assert 0 < browser.evaluate("shown.lanes.length") < len(picture.lanes) / 3
    assert browser.evaluate("shown.lanes.every((lane) => lane.lastAt >= view.begin)")
    browser.press("Home", "ArrowRight", "ArrowRight")
    browser.evaluate("activate(lanes[0].marks[0])")
    assert browser.evaluate("shown.lanes.includes(lanes[0])")


def test_between_two_events_are_the_lanes_and_the_hold(browser: Browser, tmp_path: Path) -> None:
    records = story("every_rung")
    started = the("every_rung", events.RequestPaused)
    place = next(
        place
        for place, record in enumerate(records)
        if record.seq > started.seq and records[place + 1].at_ns - record.at_ns > 10**6
    )
    before, after = records[place], records[place + 1]
    window = Window("a while", 1, MAX_SEQ, before.at_ns + 1_000, after.at_ns - 1_000)
    show(browser, tmp_path, drawn(records, window))
    assert pixels(browser, "lanes", "paused") > 20
    assert browser.evaluate("shown.marks.length") == 0
    assert f"between seq {before.seq} and {after.seq}" in browser.evaluate(
        "byId('window').textContent"
    )
    assert "1 request held 1 time" in browser.evaluate("byId('gist').textContent")
