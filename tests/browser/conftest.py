"""One Chromium and one app a session, and a view of a page that tests read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.driver import launch, new_page, serving, settle


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


@pytest.fixture
def visit(browser: Browser, app: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Page]]:
    """visit(path="/", base=None, **context): a page in a browser of its own, at rest. `page.requests` and
    `page.complaints` (console errors, exceptions) are kept while it lives; what a failed test saw last is printed."""
    contexts = []

    def open_page(path: str = "/", base: str | None = None, **options) -> Page:
        context = browser.new_context(viewport={"width": 1280, "height": 1000}, **options)
        contexts.append(context)
        page = new_page(context)
        page.requests, page.complaints = [], []  # type: ignore[attr-defined]
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("console", lambda m: page.complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto((base or app) + path)
        settle(page)
        return page

    yield open_page
    for page in (page for context in contexts for page in context.pages if request.node.stash.get(FAILED, False)):
        script = page.evaluate("document.querySelector('[data-testid=stApp]')?.dataset.testScriptState")
        print(f"{page.url}, script {script}, complaints {page.complaints}:\n{page.locator('body').inner_text()[:5000]}")
    for context in contexts:
        context.close()
