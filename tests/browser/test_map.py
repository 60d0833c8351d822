"""The Map in a real browser: what a user points at, clicks, types and plays, against what the catalog has."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page

from binade import quant
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.browser.driver import chosen, pick, press, settle, turn_to

pytestmark = [pytest.mark.browser, pytest.mark.slow]
Visit = Callable[..., Page]
CELL = "forward/fc1/input/2"  # a cell: GEMM, module, tensor, layer


@pytest.fixture(scope="module")
def run(catalog: Catalog) -> str:
    """The run that the map shows if none is chosen: the newest."""
    return str(catalog.runs()["run_id"].iloc[0])


def cell(page: Page, name: str) -> Locator:
    return page.locator(f".map .cell[data-id='{name}']")


def panel(page: Page) -> str:
    return page.locator(".map .panel").inner_text()


def query(page: Page) -> dict[str, str]:
    return {name: texts[0] for name, texts in chosen(page).items()}


def tooltip(page: Page, name: str) -> list[str]:
    cell(page, name).hover()
    tip = page.locator(".map .tip")
    tip.wait_for()
    return tip.inner_text().splitlines()


def press_key(page: Page, key: str) -> None:
    """A key on the map, which waits for the last of several before it asks for the cell's panel."""
    before = page.url
    page.keyboard.press(key)
    page.wait_for_function("before => location.href !== before", arg=before)
    settle(page)


def reload(page: Page) -> None:
    """Load the page again, which adds nothing to the browser's history."""
    before = page.evaluate("history.length")
    page.reload()
    settle(page)
    assert page.evaluate("history.length") == before


def fc1_input(catalog: Catalog, run: str, layer: int, iteration: int) -> str:
    where = Filter(run_id=(run,), layer_index=(layer,), module=("fc1",), tensor_name=("input",), iteration=(iteration,))
    (tensor_id,) = catalog.tensors(where)["tensor_id"]
    return str(tensor_id)


def test_a_cell_is_read_chosen_and_opened(visit: Visit, catalog: Catalog, run: str):
    page = visit("/?metric=sqnr_db")
    sqnr = {layer: quant.score(catalog.load(fc1_input(catalog, run, layer, 1)), "mxfp4").sqnr_db for layer in (1, 2)}
    assert tooltip(page, CELL) == ["fc1 input · forward GEMM", "layer 2", f"{sqnr[2]:.1f} dB"]

    cell(page, CELL).click()
    page.wait_for_url("**cell=**")
    settle(page)
    assert query(page) == {"metric": "sqnr_db", "cell": CELL}
    assert page.locator(".map .tip").is_hidden(), "the panel has moved the cells"
    assert "L2 fc1 input · forward GEMM" in panel(page) and f"SQNR\n{sqnr[2]:.1f} dB" in panel(page)
    assert page.locator(".map .cell.on").get_attribute("data-id") == CELL
    named = page.get_by_role("grid", name="forward GEMM").get_by_role(
        "gridcell", name=f"fc1 input, forward GEMM, layer 2: {sqnr[2]:.1f} dB"
    )
    assert named.get_attribute("aria-selected") == "true" and named.get_attribute("data-id") == CELL

    cell(page, query(page)["cell"]).focus()
    for key, name in (("ArrowLeft", "L1 fc1 input"), ("ArrowDown", "L1 fc1 weight"), ("ArrowUp", "L1 fc1 input")):
        press_key(page, key)
        assert f"{name} · forward GEMM" in panel(page)
    assert query(page)["cell"] == "forward/fc1/input/1" and f"{sqnr[1]:.1f} dB" in panel(page)

    reload(page)
    assert query(page)["cell"] == "forward/fc1/input/1" and query(page)["run_id"] == run
    assert "L1 fc1 input · forward GEMM" in panel(page)

    page.get_by_role("button", name="Open tensor").click()
    page.wait_for_url("**/tensor?**")
    settle(page)
    assert query(page)["tensor"] == fc1_input(catalog, run, 1, 1)
    assert page.get_by_text(f"In mxfp4 (as recorded): SQNR {sqnr[1]:.1f} dB").is_visible()
    page.go_back()
    settle(page)
    assert query(page)["cell"] == "forward/fc1/input/1" and "L1 fc1 input · forward GEMM" in panel(page)
    cell(page, query(page)["cell"]).focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/tensor?**")


def test_the_panel_stands_beside_the_map_whose_columns_align(visit: Visit):
    """At 1280 × 800 nothing of the panel but a long list of formats has to be scrolled to."""
    page = visit("/")
    page.set_viewport_size({"width": 1280, "height": 800})
    cell(page, CELL).click()
    page.wait_for_url("**cell=**")
    settle(page)
    box = page.locator(".map .panel").bounding_box()
    assert box and box["x"] + box["width"] <= 1280 and box["y"] + box["height"] <= 800
    assert page.locator(".map .panel").evaluate("panel => panel.scrollHeight <= panel.clientHeight")
    lefts = page.locator(".map .rows").evaluate_all(
        "all => all.map(rows => rows.querySelector('.cell').getBoundingClientRect().x - rows.getBoundingClientRect().x)"
    )
    assert len(lefts) == 3 and max(lefts) - min(lefts) < 0.5


@pytest.mark.thorough
def test_the_scope_is_chosen_in_the_bar_and_stays(visit: Visit, catalog: Catalog, run: str):
    """Format, metric and iteration, each of which the browser's Back undoes; another page has the same scope."""
    page = visit(f"/?cell={CELL}")
    pick(page, "Format", "nvfp4")
    pick(page, "Color", "Flushed to zero")
    legend = page.locator(".map .legend")
    assert re.match(r"Flushed to zero in nvfp4\n.* · iteration 1\n0%\n100%$", legend.inner_text())
    chosen = {"cell": CELL, "format": "nvfp4", "metric": "flush_to_zero"}
    assert query(page) == chosen

    def flushed(iteration: int) -> str:
        share = quant.score(catalog.load(fc1_input(catalog, run, 2, iteration)), "nvfp4").flush_to_zero
        return tooltip(page, CELL)[2] if f"{100 * share:.3g}%" == tooltip(page, CELL)[2] else f"not {100 * share:.3g}%"

    slider = page.get_by_role("slider", name="iteration")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_url("**iteration=0")
    settle(page)
    assert query(page) == chosen | {"iteration": "0"}
    first = flushed(0)
    page.get_by_role("button", name="Play").click()  # to the last iteration, where it stops
    page.wait_for_url("**iteration=1")
    settle(page)
    page.get_by_role("button", name="Play").wait_for()
    last = flushed(1)
    assert first.endswith("%") and last.endswith("%") and "not" not in first + last

    reload(page)  # in a new session, the run that was shown is named, and stays
    assert query(page) == chosen | {"iteration": "1", "run_id": run} and legend.inner_text().startswith(
        "Flushed to zero in nvfp4"
    )
    assert "L2 fc1 input · forward GEMM" in panel(page) and slider.input_value() == "1"
    page.go_back()
    settle(page)
    assert query(page) == chosen | {"iteration": "0"} and tooltip(page, CELL)[2] == first
    turn_to(page, "Tensor")
    assert {name: query(page)[name] for name in ("format", "iteration")} == {"format": "nvfp4", "iteration": "0"}
    turn_to(page, "Map")
    assert query(page) == chosen | {"iteration": "0"}


@pytest.mark.thorough
def test_a_difference_and_columns_of_iterations(visit: Visit, catalog: Catalog, run: str):
    page = visit("/?format=mxfp8&metric=sqnr_db")
    pick(page, "Compared with", "mxfp4")
    x = catalog.load(fc1_input(catalog, run, 2, 1))
    gain = quant.score(x, "mxfp8").sqnr_db - quant.score(x, "mxfp4").sqnr_db
    chosen = {"format": "mxfp8", "metric": "sqnr_db", "versus": "mxfp4"}
    assert tooltip(page, CELL)[2] == f"+{gain:.1f} dB" and query(page) == chosen
    page.get_by_role("button", name="+ Filter").click()
    page.get_by_role("button", name="Layer", exact=True).click()
    page.locator(".st-key-chip_values").get_by_role("button", name="2", exact=True).click()
    page.wait_for_url("**layer_index=2**")
    settle(page)
    page.locator(".map .across").get_by_role("button", name="iterations").click()
    page.wait_for_url("**across=iteration**")
    settle(page)
    assert query(page) == chosen | {"layer_index": "2", "across": "iteration"}
    x = catalog.load(fc1_input(catalog, run, 2, 0))
    gain = quant.score(x, "mxfp8").sqnr_db - quant.score(x, "mxfp4").sqnr_db
    assert tooltip(page, "forward/fc1/input/0")[1:] == ["iteration 0", f"+{gain:.1f} dB"]
    assert not page.complaints


@pytest.mark.thorough
def test_a_variant_chosen_in_what_if_holds_on_other_pages(visit: Visit, catalog: Catalog, run: str):
    tensor_id = fc1_input(catalog, run, 2, 1)
    page = visit(f"/tensor?view=whatif&formats=mxfp4&block_size=16x16&tensor={tensor_id}")
    table = page.get_by_test_id("stDataFrame")
    table.locator("canvas").first.wait_for()
    table.scroll_into_view_if_needed()
    page.wait_for_timeout(500)  # a table is drawn after it is there
    table.click(position={"x": 18, "y": 35 * 2 + 17})  # the second row's box
    page.wait_for_url("**&format=mxfp4%28**")
    settle(page)
    assert query(page)["format"] == "mxfp4(block=16x16)" and query(page)["tensor"] == tensor_id
    press(page, "In the format")
    sqnr = quant.score(catalog.load(tensor_id), "mxfp4(block=16x16)").sqnr_db
    assert page.get_by_text(f"In mxfp4(block=16x16): SQNR {sqnr:.1f} dB").is_visible()
    turn_to(page, "Map")
    assert query(page)["format"] == "mxfp4(block=16x16)"
    assert "mxfp4(block=16x16)" in page.get_by_test_id("stApp").inner_text()
