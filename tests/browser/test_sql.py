"""Notebook › SQL in a real browser: from a row to its tensor, and from columns to a chart."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from playwright.sync_api import Page, expect

from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.browser.driver import pick, settle

pytestmark = [pytest.mark.browser, pytest.mark.slow]
NAMES = ('<b>a.b["0"]', "m['1'].n")
COLUMNS = ['"{}"'.format(name.replace('"', '""')) for name in NAMES]
SQL = f"""SELECT tensor_id, run_id, sqnr_db AS {COLUMNS[0]}, module AS {COLUMNS[1]}
FROM tensor WHERE format = 'mxfp4' ORDER BY tensor_id"""


def choose_row(page: Page, row: int) -> None:
    """Click the checkbox of a row: the table is a canvas."""
    page.get_by_test_id("stDataFrame").last.click(position={"x": 18, "y": 35 * (row + 1) + 17})
    page.get_by_role("link", name="Open tensor").wait_for()
    settle(page)


@pytest.mark.thorough
def test_a_row_of_a_query_opens_its_tensor_and_its_run(visit: Callable[..., Page], catalog: Catalog):
    rows = catalog.tensors(Filter(quant_type=["mxfp4"]))
    wanted = rows[rows["format"] == "mxfp4"].sort_values("tensor_id").iloc[2]
    page = visit("/notebook?" + urlencode({"view": "sql", "q": SQL}))
    assert not page.get_by_role("link", name="Open tensor").count()
    choose_row(page, 2)
    page.get_by_role("link", name="Open tensor").click()
    page.wait_for_url("**/tensor?**")
    settle(page)
    assert parse_qs(urlsplit(page.url).query)["tensor"] == [wanted["tensor_id"]]
    assert page.locator(".chart").count()
    page.go_back()
    page.wait_for_url("**/notebook?**")
    settle(page)
    choose_row(page, 2)
    page.get_by_role("link", name="Open in the Map").click()
    page.wait_for_url("**run_id=**")
    settle(page)
    assert parse_qs(urlsplit(page.url).query)["run_id"] == [wanted["run_id"]]


@pytest.mark.thorough
def test_columns_with_odd_names_are_chosen_drawn_and_kept_in_the_address(visit: Callable[..., Page], catalog: Catalog):
    page = visit("/notebook?" + urlencode({"view": "sql", "q": SQL}))
    y, x = NAMES
    pick(page, "x", x)
    pick(page, "y", y)
    chart = page.locator(".chart")
    rows = catalog.tensors(Filter(quant_type=["mxfp4"]))
    rows = rows[rows["format"] == "mxfp4"]
    expect(chart.locator("path[aria-roledescription=point]")).to_have_count(len(rows))
    label = chart.locator("path[aria-roledescription=point]").first.get_attribute("aria-label")
    assert y in label and x in label and "group" not in label
    chart.locator("path[aria-roledescription=point]").last.hover()
    tip = page.locator("#vg-tooltip-element")
    tip.locator(".value").first.wait_for()
    assert y in tip.inner_text() and not tip.locator("b").count()
    address = urlsplit(page.url)
    assert parse_qs(address.query)["y"] == [y]
    again = visit(f"{address.path}?{address.query}")
    expect(again.locator(".chart").locator("path[aria-roledescription=point]")).to_have_count(len(rows))
    pick(again, "x", "none")
    expect(again.locator(".chart")).to_have_count(0)
    assert "x" not in parse_qs(urlsplit(again.url).query)
