"""The browser's Back: one step at a time through what was visited, whichever way it was opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page

from binade.app.pages.registry import PAGES
from binade.app.sessions import session as sessions
from binade.app.sessions import storage
from tests.app import roots
from tests.browser.driver import chosen, press, serving, settle, turn_to

pytestmark = [pytest.mark.browser, pytest.mark.slow]
Visit = Callable[..., Page]


@pytest.fixture(scope="module")
def own_root(collected: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = roots.copy(collected, tmp_path_factory.mktemp("history") / "root")
    storage.create(root, sessions.new("Why", sessions.View("tensor", {"view": ["why"], "format": ["mxfp4"]})))
    return root


@pytest.fixture(scope="module")
def served(own_root: Path):
    with serving(own_root) as address:
        yield address


def place(page: Page) -> tuple[str, str, dict[str, list[str]]]:
    """(heading, path, parameters except the session), once path, underlined tab and heading name the same page."""
    settle(page)
    url = urlsplit(page.url)
    heading = page.locator("h1").inner_text()
    title = PAGES[url.path.strip("/") or "map"].title
    assert heading.startswith(f"{title} › "), (heading, page.url)
    assert page.locator(".st-key-header a strong").all_inner_texts() == [title]
    assert page.get_by_text("has no part").count() == 0
    query = chosen(page)
    assert "to" not in query
    return heading, url.path, {name: texts for name, texts in query.items() if name != "session"}


def click(page: Page, kind: str, name: str) -> None:
    page.get_by_role(kind, name=name, exact=True).first.click()  # type: ignore[arg-type]
    settle(page)


def select_on_the_map(page: Page) -> None:
    page.locator(".map .cell[tabindex='0']").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**cell=**")
    settle(page)


def open_tensor_on_the_map(page: Page) -> None:
    page.locator(".map .cell[tabindex='0']").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/tensor?**")


def search(page: Page) -> None:
    page.keyboard.press("Control+k")
    page.keyboard.type("sql")
    page.locator(".palette .search li").first.get_by_text("SQL").wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url("**/notebook?**sql**")


def next_format(page: Page) -> None:
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("f")
    page.wait_for_url(lambda url: "format=mxfp4" not in url)


STEPS: tuple[Callable[[Page], None], ...] = (
    lambda page: turn_to(page, "Notebook"),
    lambda page: click(page, "button", "Open"),  # a session of another page
    lambda page: turn_to(page, "Map"),
    select_on_the_map,
    open_tensor_on_the_map,
    lambda page: turn_to(page, "Notebook"),
    lambda page: press(page, "Edit"),
    lambda page: click(page, "button", "Open page"),
    lambda page: press(page, "What if"),
    next_format,
    search,
    lambda page: turn_to(page, "Explore"),
    lambda page: turn_to(page, "Runs"),
    lambda page: press(page, "Jobs"),
    lambda page: click(page, "link", "Launch one"),
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "steps", [[*STEPS[:5], search, *STEPS[-3:-1]], pytest.param(STEPS, marks=pytest.mark.thorough)], ids=len
)
def test_back_undoes_one_step_at_a_time(visit: Visit, served: str, steps: Sequence[Callable[[Page], None]]):
    page = visit("/", base=served, own=True)
    places = [place(page)]
    for step in steps:
        step(page)
        places.append(place(page))
    assert all(one != other for one, other in pairwise(places))
    for before in reversed(places[:-1]):
        page.go_back()
        assert place(page) == before
    for after in places[1:]:
        page.go_forward()
        assert place(page) == after
    assert not page.complaints  # type: ignore[attr-defined]
