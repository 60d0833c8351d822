"""One Chromium and one app a session, and a view of a page that tests read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.browser.driver import PATIENCE, launch, new_page, serving, settle

SIZE = {"width": 1280, "height": 1000}
expect.set_options(timeout=PATIENCE * 1000)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = launch(playwright)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def app(collected: Path) -> Iterator[str]:
    """The address of the app on the collected runs."""
    with serving(collected) as address:
        yield address


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(scope="session")
def profile(browser: Browser) -> Iterator[BrowserContext]:
    """One profile for most pages: in a new one, Streamlit's scripts are compiled again, half the work of a page."""
    with browser.new_context(viewport=SIZE) as context:
        yield context


@pytest.fixture
def visit(browser: Browser, profile: BrowserContext, request: pytest.FixtureRequest) -> Iterator[Callable[..., Page]]:
    """visit(path="/", base=None, own=False, color_scheme="light"): a page at rest of the session's app or that at base,
    in a profile of its own if asked. `page.requests` and `page.complaints` (console errors, exceptions) are kept while
    it lives; what a failed test saw last is printed."""
    pages = []

    def open_page(path: str = "/", base: str | None = None, *, own: bool = False, color_scheme: str = "light") -> Page:
        page = new_page(opened.enter_context(browser.new_context(viewport=SIZE)) if own else profile)
        pages.append(opened.enter_context(page))
        page.emulate_media(color_scheme=color_scheme)  # type: ignore[arg-type]
        page.requests, page.complaints = [], []  # type: ignore[attr-defined]
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("console", lambda m: page.complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto((base or request.getfixturevalue("app")) + path)
        settle(page)
        return page

    with ExitStack() as opened:
        yield open_page
        for page in pages if request.node.stash.get(FAILED, False) else ():
            script = page.evaluate("document.querySelector('[data-testid=stApp]')?.dataset.testScriptState")
            text = page.locator("body").inner_text()[:5000]
            print(f"{page.url}, script {script}, complaints {page.complaints}:\n{text}")
