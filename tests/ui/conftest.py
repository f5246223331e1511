"""A browser for all tests, a tab and an observer for each."""

from collections.abc import Iterator

import pytest

from tests.ui.browser import Page, Tab, chromium
from tests.ui.engine import Engine, running
from tests.ui.observer import Observer, serving


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.fixture
def observer() -> Observer:
    return Observer()


@pytest.fixture
def url(observer: Observer) -> Iterator[str]:
    with serving(observer) as address:
        yield address


@pytest.fixture
def tab(browser: Tab) -> Iterator[Page]:
    """An empty tab; what it opens asks ten times as often as people's would."""
    with browser() as page:
        page.hasten(10)
        page.size(1400)
        page.prefer("light")
        yield page


@pytest.fixture
def page(tab: Page, url: str) -> Page:
    """The page, once rates are known."""
    tab.open(url)
    tab.wait("document.querySelector('[data-tier=\"0:primary\"] .asked')?.textContent === '10'")
    return tab
