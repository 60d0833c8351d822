"""The palette and the keys in a real browser."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.browser.driver import chosen, settle

pytestmark = [pytest.mark.browser, pytest.mark.slow]
Visit = Callable[..., Page]


def query(page: Page) -> dict[str, list[str]]:
    return chosen(page)


@pytest.mark.thorough
def test_what_is_typed_is_found_and_opened(visit: Visit, catalog: Catalog):
    """Enter may come before the answer."""
    page = visit()
    page.keyboard.press("Control+k")
    page.keyboard.type("l2 backward")
    page.keyboard.press("Enter")
    page.wait_for_url("**operation=backward**")
    settle(page)
    assert query(page) == {"layer_index": ["2"], "operation": ["backward"]}

    page.keyboard.press("Control+k")
    page.keyboard.type("fc2 grad_output")
    first = page.locator(".palette .search li").first
    expect(first).to_contain_text("L2 fc2 grad output")
    page.keyboard.press("Enter")
    page.wait_for_url("**/tensor?**")
    settle(page)
    (tensor_id,) = query(page)["tensor"]
    row = catalog.rows_of([tensor_id]).iloc[0]
    assert (row["module"], row["tensor_name"], row["layer_index"]) == ("fc2", "grad_output", 2)
    assert not page.complaints


@pytest.mark.thorough
def test_nothing_found_is_said_and_escape_closes(visit: Visit):
    page = visit()
    before = page.url
    page.keyboard.press("Control+k")
    page.keyboard.type("no such thing")
    page.keyboard.press("Enter")
    search = page.locator(".palette .search")
    expect(search.get_by_text("Nothing matches all words of “no such thing”.")).to_be_visible()
    page.keyboard.press("Escape")
    expect(search).to_be_hidden()
    assert page.url == before


@pytest.mark.thorough
def test_keys(visit: Visit, catalog: Catalog):
    where = Filter(run_id=(catalog.runs()["run_id"][0],), module=("fc2",), tensor_name=("grad_output",))
    rows = catalog.tensors(where)
    rows = rows[rows["iteration"] == rows["iteration"].max()].sort_values("layer_index")
    first, last = rows["tensor_id"].iloc[0], rows["tensor_id"].iloc[-1]
    page = visit(f"/tensor?tensor={first}&module=fc2&tensor_name=grad_output")
    page.keyboard.press("?")
    expect(page.locator(".palette .keys")).to_contain_text("next and previous tensor")
    page.keyboard.press("Escape")
    page.keyboard.press("]")
    page.wait_for_url(lambda url: query(page)["tensor"] == [last])
    settle(page)
    page.keyboard.press("f")
    page.wait_for_url("**format=**")
    settle(page)
    assert query(page)["format"][0] in catalog.scored_formats()


@pytest.mark.parametrize("path", ["/", "/runs?view=collect"], ids=["with a session", "without"])
def test_the_search_box_is_at_the_right_of_the_header(visit: Visit, path: str):
    page = visit(path)
    header, session = page.locator(".st-key-header"), page.locator(".st-key-header").get_by_test_id("stPopover")
    right = header.evaluate("row => row.getBoundingClientRect().right")
    if path == "/":
        right = session.evaluate("button => button.getBoundingClientRect().left")
    search = page.locator(".st-key-palette").evaluate("box => box.getBoundingClientRect().right")
    assert 0 <= right - search <= 20  # a gap of 16 pixels
