"""What takes long is stopped by a click, and started again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, expect

from binade.quant.formats import FORMATS
from tests.app.roots import record
from tests.browser.driver import serving, settle

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.thorough
def test_rounding_of_a_selection(visit: Callable[..., Page], tmp_path: Path):
    record(tmp_path, [torch.randn(512, 1024).bfloat16() for _ in range(3)])
    formats = "&".join(f"formats={name}" for name in FORMATS)
    with serving(tmp_path) as app:
        page = visit(f"/tensor?view=whatif&{formats}&hadamard=32", base=app)
        page.get_by_role("radio", name="the filter’s operands").click()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("Rounding: stopped.")).to_be_visible()
        settle(page)
        assert page.locator(".chart").count() == 0
        page.get_by_role("button", name="Start again").click()
        expect(page.get_by_text("SQNR with")).to_be_visible(timeout=240_000)
        settle(page)
        assert page.get_by_text("stopped").count() == 0 and page.locator(".chart").count() > 0
        assert page.get_by_test_id("stException").count() == 0


@pytest.mark.thorough
def test_a_map_that_is_computed_from_values(visit: Callable[..., Page], tmp_path: Path):
    """An answer that calls no steps says that it is computed, too."""
    record(tmp_path, [torch.randn(2048, 4096).bfloat16() for _ in range(4)], scores=())
    with serving(tmp_path) as app:
        page = visit("/runs", base=app)
        page.goto(f"{app}/map?format=nvfp4(scale=4over6)")
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("Map: stopped.")).to_be_visible()
        settle(page)
        page.get_by_role("button", name="Start again").click()
        page.locator(".map .cell[data-id]").first.wait_for()
        settle(page)
        assert page.get_by_text("stopped").count() == 0
        assert page.get_by_test_id("stException").count() == 0
