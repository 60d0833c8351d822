"""The table of runs in a browser: what is chosen, and what a redraw keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.app import roots
from tests.browser.driver import settle

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_group_of_one_run_is_chosen_by_its_run(visit: Callable[..., Page], collected: Path) -> None:
    """As links of other pages name it. bf16, drawn beside it, has its full swatch. Unticked, neither is chosen."""
    run_id = next(run.name for run in roots.runs_of(collected) if "mxfp4" in run.name)
    page = visit(f"/runs?chosen={run_id}")
    ticked = page.locator(".runs tr.row input:checked")
    expect(ticked).to_have_count(1)
    expect(page.locator(".runs tr.row i:not(.off)")).to_have_count(2)  # it and bf16
    ticked.click()
    settle(page)
    expect(ticked).to_have_count(0)
    expect(page.locator(".runs tr.row i.off")).to_have_count(0)
    assert "chosen" not in page.url


def test_a_search_without_a_hit_says_so_and_links_have_addresses(visit: Callable[..., Page]) -> None:
    page = visit("/runs")
    page.locator(".runs input[type=search]").fill("no such run")
    expect(page.locator(".runs [role=status]")).to_contain_text("No run has")
    assert not page.locator(".runs a:not([href])").count()
