"""The page that a real engine serves, while it answers."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvtiers.cli import main
from tests.ui.browser import Page, Tab
from tests.ui.engine import TIERS, Engine

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def page(browser: Tab, engine: Engine) -> Iterator[Page]:
    with browser() as page:
        page.size(1400)
        page.open(engine.observer)
        page.wait("document.body.dataset.engine === 'live'")
        yield page
        assert page.complaints == []


def asked(page: Page) -> list[dict[str, Any]]:
    return json.loads(page.js("fetch('requests?limit=50').then((answer) => answer.text())"))[
        "requests"
    ]


def test_flows_and_hit_rates_of_a_real_engine(page: Page, engine: Engine) -> None:
    engine.rounds(5)
    page.wait("/store [\\d.]*[1-9][\\d.]* chunks/.test(document.body.innerText)")
    page.wait("/load [\\d.]*[1-9][\\d.]* chunks/.test(document.body.innerText)")
    for tier in ("0:primary", "1:fs"):
        ever = f"document.querySelector('[data-tier=\"{tier}\"] .ever').textContent"
        page.wait(f"/^[1-9]\\d? %$/.test({ever})")
        room = f"document.querySelector('[data-tier=\"{tier}\"] .room').textContent"
        page.wait(f"/^[1-9][\\d.]* MiB of [\\d.]+ MiB$/.test({room})")
    assert "Disk: absent" in page.text()


def test_a_request_that_was_on_the_disk(page: Page, engine: Engine) -> None:
    engine.rounds(5)
    name = next(r["request_id"] for r in asked(page) if "1:fs" in r["tokens"]["by_source"])
    page.wait(f"document.querySelector('[data-request=\"{name}\"]')")
    page.js(f"document.querySelector('[data-request=\"{name}\"]').focus()")
    page.press("Enter")
    page.wait("document.getElementById('life').innerText.includes('Loaded from Disk')")
    life = page.js("document.getElementById('life').innerText")
    assert f"Request {name}" in life
    assert "chunks found" in life
    assert "0:primary miss (absent)" in life


def test_a_request_that_nobody_had(page: Page, engine: Engine) -> None:
    engine.rounds(1)
    name = next(r["request_id"] for r in asked(page) if not r["tokens"]["by_source"])
    page.js("document.getElementById('wanted').focus()")
    page.type(name)
    page.press("Enter")
    page.wait("document.getElementById('life').innerText.includes('nothing is loaded')")
    assert "missing" in page.js("document.querySelector('.why').textContent")


def test_top_reads_the_observer_too(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.rounds(2)
    assert main(["top", "--once", "--interval", "0.2", "--json", "--url", engine.observer]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [tier["label"] for tier in seen["tiers"]] == [*TIERS]
    assert seen["tiers"][1]["used_share"] > 0
    assert [count["labels"] for count in seen["tokens"]]
