"""The built-in page in a real browser, against recorded answers of an engine."""

import itertools
import re

import pytest

from tests.ui.browser import Page
from tests.ui.observer import Observer, record, serving, tier

UNKNOWN = "\N{EN DASH}"
HOSTILE = '<script>window.hacked = 1</script><img src="x" onerror="window.hacked = 2">'

_CONTRAST = """
(() => {
  const channel = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) =>
    0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = numbers(getComputedStyle(e).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (["SCRIPT", "NOSCRIPT"].includes(element.tagName)) continue;
    const [one, other] = [
      luminance(numbers(getComputedStyle(element).color)),
      luminance(ground(element)),
    ].sort((a, b) => b - a);
    found.push([(one + 0.05) / (other + 0.05), walker.currentNode.data.trim()]);
  }
  return found;
})()
"""
"""Of each text that is seen: contrast with what is behind it (WCAG 2.2, 1.4.3), and the text."""

_FOCUS = """
(() => {
  const e = document.activeElement;
  const style = getComputedStyle(e);
  return {
    what: e.dataset.request ? `request ${e.dataset.request}` : e.id || e.textContent.trim(),
    outline: style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth),
  };
})()
"""


def tile(label: str, figure: str) -> str:
    return f"document.querySelector('[data-tier=\"{label}\"] .{figure}')"


def figure(page: Page, label: str, name: str) -> str:
    return str(page.js(f"{tile(label, name)}.textContent"))


def links(page: Page) -> list[str]:
    return list(page.js("[...document.querySelectorAll('.link')].map(e => e.innerText)"))


def open_life(page: Page, name: str = "cmpl-2") -> None:
    page.js(f"document.querySelector('[data-request=\"{name}\"]').click()")
    page.wait("!document.getElementById('life').hidden")


def tab_to(page: Page, what: str) -> list[dict[str, object]]:
    """Press Tab until that has the focus; each stop on the way."""
    stops: list[dict[str, object]] = []
    while not stops or stops[-1]["what"] != what:
        assert len(stops) < 20, stops
        page.press("Tab")
        stops.append(page.js(_FOCUS))
    return stops


# -- values ----------------------------------------------------------------------------------------


def test_tiers_are_a_flow_with_live_rates(page: Page) -> None:
    shown = page.js("[...document.querySelectorAll('.tier h3')].map(e => e.textContent)")
    assert shown == ["Device ", "Host memory 0:primary", "Disk 1:fs", "Peers 2:p2p"]
    assert figure(page, "0:primary", "hit") == "80 %"
    assert figure(page, "0:primary", "room") == "48.0 MiB of 64.0 MiB"
    assert figure(page, "1:fs", "full") == "25 %"
    _, disk, _ = links(page)
    assert "cascade 2.50 GB/s" in disk
    assert "promote 5.0 MB/s, 3 in flight" in disk
    assert page.complaints == []


def test_what_is_not_known_is_not_claimed(page: Page) -> None:
    assert page.js(f"{tile('2:p2p', 'room')}.parentElement.hidden")
    assert figure(page, "2:p2p", "hit") == UNKNOWN


def test_values_change_without_loading_the_page_anew(page: Page, observer: Observer) -> None:
    page.js("window.here = true")
    observer.tiers[0]["resident_bytes"] = 32 << 20
    page.wait(f"{tile('0:primary', 'room')}.textContent.startsWith('32.0 MiB')")
    assert page.js("window.here")


def test_a_tier_that_is_left_alone_stands_out(page: Page, observer: Observer) -> None:
    assert "left alone" in page.js("document.querySelector('.tier.alone').innerText")
    observer.tiers[2]["state"] = "on trial"
    page.wait("!document.querySelector('.tier.alone')")
    assert "on trial" in page.js("document.querySelector('[data-tier=\"2:p2p\"]').innerText")


def test_tiers_that_come_are_drawn(page: Page, observer: Observer) -> None:
    observer.tiers.append(tier("3:obj", "STORAGE"))
    page.wait("document.querySelector('[data-tier=\"3:obj\"]')")
    observer.tiers = []
    page.wait("document.querySelectorAll('.tier').length === 1")


def test_misses_and_troubles_are_told_by_reason(page: Page) -> None:
    text = page.text()
    assert "Disk: absent: 10 chunks" in text
    assert "pressure: 3 chunks" in text


def test_an_engine_that_began_anew_has_no_rates_of_the_one_before(
    page: Page, observer: Observer
) -> None:
    asked = tile("0:primary", "asked")
    page.js(f"""
        window.seen = [];
        new MutationObserver(() => seen.push({asked}.textContent))
          .observe({asked}, {{ childList: true }})
    """)
    observer.counters = dict.fromkeys(observer.counters, 0)
    observer.begun = observer.now
    page.wait("seen.length >= 2")
    assert page.js("seen.slice(0, 2)") == [UNKNOWN, "10"]


# -- silence ---------------------------------------------------------------------------------------


def test_a_silent_engine_is_said_to_be_silent_since_when(page: Page, observer: Observer) -> None:
    observer.silent = True
    page.wait("document.body.dataset.engine === 'silent'")
    said = page.js("document.getElementById('status').textContent")
    assert re.fullmatch(r"No answer since \d\d:\d\d:\d\d", said)
    assert figure(page, "0:primary", "hit") == UNKNOWN
    assert figure(page, "0:primary", "room") == "48.0 MiB of 64.0 MiB"
    observer.silent = False
    page.wait("document.body.dataset.engine === 'live'")
    page.wait(f"{tile('0:primary', 'hit')}.textContent === '80 %'")


def test_an_engine_that_is_gone(tab: Page, observer: Observer) -> None:
    with serving(observer) as url:
        tab.open(url)
        tab.wait("document.body.dataset.engine === 'live'")
    tab.wait("document.getElementById('status').textContent.startsWith('No answer since')")
    assert "SmolLM2" in tab.text()


def test_an_engine_that_switched_offloading_off(page: Page, observer: Observer) -> None:
    observer.inert = True
    page.wait("document.getElementById('status').textContent.startsWith('Offloading is switched')")


def test_an_engine_that_never_answered(tab: Page, observer: Observer, url: str) -> None:
    observer.silent = True
    tab.open(url)
    tab.wait("document.getElementById('status').textContent === 'No answer yet'")


def test_pause_keeps_what_stands_there(page: Page, observer: Observer) -> None:
    page.js("document.getElementById('pause').focus()")
    page.press(" ")
    page.wait("document.body.dataset.engine === 'paused'")
    asked = observer.now
    page.js("new Promise((resolve) => setTimeout(resolve, 5000))")
    assert observer.now - asked <= 1  # one question may have been on its way
    assert page.js("document.body.dataset.engine") == "paused"
    page.press("Enter")
    page.wait("document.body.dataset.engine === 'live'")


# -- the life of a request -------------------------------------------------------------------------


def test_the_life_of_a_request(page: Page) -> None:
    open_life(page)
    life = page.js("document.getElementById('life').innerText")
    assert "Request cmpl-2" in life
    assert "384 of 1152 tokens were computed" in life
    assert "Loaded from Disk: 256 tokens" in life
    assert "Disk (1:fs): 2 chunks found, 3 corrupt" in life
    assert "after 210.0 ms" in life
    rows = page.js("[...document.querySelectorAll('#life tbody tr')].map(r => r.innerText)")
    assert len(rows) == 3
    assert "and 5 more chunks" in life
    assert page.complaints == []


def test_a_request_by_its_id(page: Page) -> None:
    page.js("document.getElementById('wanted').focus()")
    page.type("cmpl-1")
    page.press("Enter")
    page.wait("document.getElementById('life-title').textContent === 'Request cmpl-1'")
    page.js("document.getElementById('wanted').select(); document.getElementById('wanted').focus()")
    page.type("never seen")
    page.press("Enter")
    page.wait("document.getElementById('life').innerText.includes('Nothing is known of it')")


def test_a_request_that_settles_while_it_is_looked_at(page: Page, observer: Observer) -> None:
    observer.records.insert(0, {**record("cmpl-3", arrived=70), "settled_at": None})
    page.wait("document.querySelector('[data-request=\"cmpl-3\"]')")
    open_life(page, "cmpl-3")
    assert "not over yet" in page.text()
    observer.records[0] = record("cmpl-3", arrived=70)
    page.wait("document.getElementById('life').innerText.includes('384 are computed')")


# -- by keyboard -----------------------------------------------------------------------------------


def test_the_life_of_a_request_by_keyboard_alone(page: Page) -> None:
    stops = tab_to(page, "request cmpl-2")
    names = [stop["what"] for stop in stops]
    assert names[:4] == ["Skip to the requests", "pause", "wanted", "Show"]
    assert all(stop["outline"] >= 2 for stop in stops)
    page.press("Enter")
    page.wait("document.activeElement.id === 'life-title'")
    page.press("Escape")
    page.wait("document.getElementById('life').hidden")
    assert page.js(_FOCUS)["what"] == "request cmpl-2"
    page.press("Tab", shift=True)
    assert page.js(_FOCUS)["what"] == "Show"


def test_back_is_reached_and_goes_back(page: Page) -> None:
    tab_to(page, "request cmpl-1")
    page.press(" ")
    page.wait("document.activeElement.id === 'life-title'")
    tab_to(page, "back")
    page.press("Enter")
    page.wait("document.getElementById('life').hidden")
    assert page.js(_FOCUS)["what"] == "request cmpl-1"


def test_the_focus_stays_while_requests_come(page: Page, observer: Observer) -> None:
    tab_to(page, "request cmpl-1")
    observer.records.insert(0, record("cmpl-3", arrived=70))
    page.wait("document.querySelector('[data-request=\"cmpl-3\"]')")
    assert page.js(_FOCUS)["what"] == "request cmpl-1"
    order = page.js("[...document.querySelectorAll('.request')].map(e => e.dataset.request)")
    assert order == ["cmpl-3", "cmpl-2", "cmpl-1"]


# -- for everybody ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(page: Page, observer: Observer, scheme: str) -> None:
    page.prefer(scheme)
    ground = page.js("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(16, 20, 24)"}[scheme]
    open_life(page)
    for silent in (False, True):
        observer.silent = silent
        page.wait(f"document.body.dataset.engine === '{'silent' if silent else 'live'}'")
        texts = page.js(_CONTRAST)
        assert len(texts) > 60
        assert [text for text in texts if text[0] < 4.5] == []


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_nothing_lies_outside_of_a_window(page: Page, observer: Observer, width: int) -> None:
    observer.records[0] = record("cmpl-" + 60 * "x", arrived=50)
    page.wait("document.querySelector('[data-request^=\"cmpl-xxx\"]')")
    open_life(page, str(observer.records[0]["request_id"]))
    page.size(width)
    page.wait(f"innerWidth === {width}")
    assert page.js("document.documentElement.scrollWidth") == width
    outside = """
    [...document.querySelectorAll("body *")]
      .filter((e) => e.checkVisibility() && !e.closest(".scroll") && e.className !== "skip")
      .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
      .map((e) => e.outerHTML.slice(0, 80))
    """
    assert page.js(outside) == []


def test_what_can_be_pressed_is_large_enough(page: Page) -> None:
    page.size(360)
    small = """
    [...document.querySelectorAll("button, input")]
      .filter((e) => e.checkVisibility())
      .map((e) => e.getBoundingClientRect())
      .filter((box) => box.height < 24 || box.width < 24).length
    """
    assert page.js(small) == 0


def test_structure_for_who_listens(page: Page) -> None:
    open_life(page)
    levels = page.js(
        "[...document.querySelectorAll('h1,h2,h3,h4')]"
        ".filter(e => e.checkVisibility()).map(e => +e.tagName[1])"
    )
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert page.js("document.documentElement.lang") == "en"
    assert page.js("document.getElementById('status').getAttribute('role')") == "status"
    assert page.js("document.getElementById('summary').getAttribute('aria-live')") == "polite"
    page.wait("document.getElementById('summary').textContent.includes('Host memory hit 80 %')")
    unnamed = "[...document.querySelectorAll('button')].filter(e => !e.textContent.trim()).length"
    assert page.js(unnamed) == 0
    assert page.js("document.querySelector('label[for=wanted]') !== null")


# -- what an engine sends --------------------------------------------------------------------------


def test_text_of_requests_is_text(page: Page, observer: Observer) -> None:
    observer.model = HOSTILE
    observer.records.insert(0, {**record(HOSTILE, arrived=70), "why": HOSTILE})
    observer.counters["lookup_misses", HOSTILE, HOSTILE] = 99
    observer.tiers.append({**tier(f"3:{HOSTILE}", "X"), "state": HOSTILE})
    page.wait("[...document.querySelectorAll('.id')].some(e => e.textContent.includes('<script>'))")
    page.js("document.querySelector('.request').click()")
    page.wait("document.querySelector('.why')?.textContent.includes('<script>')")
    assert page.js("window.hacked") is None
    assert page.js("document.querySelectorAll('img, main script').length") == 0
    assert page.complaints == []


@pytest.mark.parametrize("name", ["../state", "a/b?c=d#e", "%2e%2e%2fstate", "ü \u202e"])
def test_any_id_is_asked_for_as_it_is(page: Page, observer: Observer, name: str) -> None:
    observer.records.insert(0, record(name, arrived=70))
    page.js("document.getElementById('wanted').focus()")
    page.type(name)
    page.press("Enter")
    page.wait("document.querySelector('#life .why')?.textContent.startsWith('384 of 1152')")


def test_nothing_is_loaded_from_elsewhere(page: Page, url: str) -> None:
    asked = page.js("performance.getEntriesByType('resource').map(e => e.name)")
    assert asked
    assert [name for name in asked if not name.startswith(url)] == []
