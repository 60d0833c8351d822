"""The real app in a real browser on real runs: what a user clicks, sees and shares."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser, Page
from torch import Tensor

from binade.app.questions.shared import distributions
from binade.app.view import View
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.text import number_text
from tests.app import roots
from tests.bench.make_root import make_root
from tests.browser.driver import choose, chosen, new_page, press, serving, settle, turn_to
from tests.collector.conftest import SMALL
from tests.conftest import RECIPES, run_collector

pytestmark = [pytest.mark.browser, pytest.mark.slow]
Visit = Callable[..., Page]
WHERE = Filter(quant_type=["mxfp8"], layer_index=[1], operation=["forward"])
QUERY = "/explore?quant_type=mxfp8&layer_index=1&operation=forward"


def scope(page: Page) -> str:
    """What the answer is of: "90 tensors · 1 of 4 runs · iteration 3"."""
    return page.get_by_text(re.compile(r"^[\d,]+ tensors? · ")).inner_text()


def chips(page: Page) -> list[str]:
    """The fields that restrict the filter, in the bar."""
    chip = "[class*=st-key-chip_on_] [class*=st-key-chip_of_] button:visible"  # a button with help is there twice
    return [text.removesuffix(" ▾") for text in page.locator(chip).all_inner_texts()]


def marks(page: Page, chart: int = 0) -> list[dict[str, str]]:
    """What a chart has drawn: of each mark with a description, its fields as the browser tells them."""
    labels = page.locator("[data-testid=stVegaLiteChart]").nth(chart).locator("path[aria-label]").evaluate_all(
        "paths => paths.map(path => path.getAttribute('aria-label'))"
    )  # fmt: skip
    return [dict(part.split(": ", 1) for part in label.split("; ") if ": " in part) for label in labels]


SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def number(text: str) -> float:
    """A number as Vega writes it: a true minus sign, grouping commas, percent."""
    value = text.replace("−", "-").replace(",", "")
    value = re.sub("·10([⁻⁰¹²³⁴-⁹]+)", lambda power: "e" + power[1].translate(SUPERSCRIPTS), value)
    return float(value[:-1]) / 100 if value.endswith("%") else float(value)


def chart_text(page: Page, chart: int = 0) -> str:
    return page.locator("[data-testid=stVegaLiteChart]").nth(chart).locator("svg").evaluate("svg => svg.textContent")


def select_row(page: Page, row: int) -> None:
    """Click the checkbox of a row: the table is a canvas, its first column the checkboxes."""
    table = page.get_by_test_id("stDataFrame").first
    table.scroll_into_view_if_needed()
    box = table.bounding_box()
    assert box
    table.click(position={"x": 18, "y": 36 + 28 * row + 14})
    page.wait_for_function("() => location.search.includes('tensor=')")
    settle(page)


def query(page: Page) -> dict[str, list[str]]:
    return chosen(page)


def background(page: Page) -> str:
    return page.get_by_test_id("stApp").evaluate("app => getComputedStyle(app).backgroundColor")


@pytest.mark.thorough
def test_a_filter_set_by_clicking_is_in_the_address_and_a_copy_shows_the_same(visit: Visit, catalog: Catalog):
    """It survives a look at another page too; nothing leaves the machine and nothing complains."""
    page = visit("/explore")
    assert background(page) == "rgb(255, 255, 255)"
    assert " · 1 of 4 runs · iteration " in scope(page)
    choose(page, "Quant type", "mxfp8")
    choose(page, "Layer", "1")
    choose(page, "Operation", "forward")
    address = page.url
    last = int(catalog.distinct(("iteration",), WHERE)["iteration"].max())
    tensors = catalog.totals(replace(WHERE, iteration=(last,))).tensors
    assert scope(page) == f"{tensors} tensors · 1 run · iteration {last} · all with values"
    assert query(page) == WHERE.to_query()
    assert chips(page) == ["Layer: 1", "Operation: forward", "Quant type: mxfp8"]

    copy = visit(address.removeprefix(address.split("/explore?")[0]))
    assert copy.url == address
    assert scope(copy) == scope(page) and chips(copy) == chips(page)
    drawn = [marks(page, index) for index in range(3)]
    assert all(drawn) and [marks(copy, index) for index in range(3)] == drawn

    turn_to(page, "Runs")
    turn_to(page, "Explore")
    page.wait_for_url(address)
    settle(page)
    assert scope(page) == scope(copy)
    page.locator(".st-key-clear_layer_index button:visible").click()
    page.wait_for_function("() => !location.search.includes('layer_index')")
    settle(page)
    assert query(page) == {name: texts for name, texts in WHERE.to_query().items() if name != "layer_index"}
    # A blob is made by a page of its own origin, which its address names.
    asked = [url.removeprefix("blob:") for url in page.requests if not url.startswith("data:")]
    outside = [url for url in asked if urlsplit(url).hostname != "127.0.0.1"]
    assert outside == []
    assert page.complaints == []


def test_ticks_marks_ranges_and_the_address_select_each_other(visit: Visit, catalog: Catalog):
    """A tick draws the tensor, a dot ticks its tensor, a drag over the formats keeps a range of errors, and Ctrl Z
    undoes each."""
    page = visit("/?format=mxfp4")  # from the front door, as above
    turn_to(page, "Explore")
    before = scope(page)
    select_row(page, 0)
    (ticked,) = query(page)["tensor"]
    dots = page.locator(".st-key-chart_formats path[aria-label*='minus normal']")
    dot = dots.nth(dots.count() // 2)
    dot.click(force=True)
    page.wait_for_function("before => !location.search.includes(encodeURIComponent(before))", arg=ticked)
    settle(page)
    (other,) = query(page)["tensor"]
    assert other != ticked
    page.keyboard.press("Control+z")
    page.wait_for_function("before => location.search.includes(encodeURIComponent(before))", arg=ticked)
    settle(page)
    page.locator(".st-key-clear_ticks button:visible").click()
    page.wait_for_function("() => !location.search.includes('tensor=')")
    settle(page)
    boxes = [dot.bounding_box() for dot in dots.all()[::20]]
    first, last = (sorted(boxes, key=lambda box: box["x"])[index] for index in (0, len(boxes) // 2))
    page.mouse.move(first["x"] - 2, last["y"] + 12)  # between two formats
    page.mouse.down()
    page.mouse.move(last["x"] + 2, last["y"] + 12, steps=8)
    page.mouse.up()
    page.wait_for_function("() => location.search.includes('delta=')")
    settle(page)
    low, high = (float(end) for end in query(page)["delta"][0].split(".."))
    shown = View("explore", query(page)).draw(catalog).tables["tensors"]
    assert len(shown) and ((shown["delta"] >= low) & (shown["delta"] < high)).all()
    page.locator(".st-key-clear_delta button:visible").click()
    page.wait_for_function("() => !location.search.includes('delta=')")
    settle(page)
    assert scope(page) == before and page.complaints == []


@pytest.mark.thorough
def test_a_run_collected_meanwhile_shows_itself_and_what_is_selected_stays(
    visit: Visit, collected: Path, tmp_path: Path
):
    root = roots.copy(collected, tmp_path / "runs")
    with serving(root) as address:
        page = visit("/explore?layer_index=1&operation=forward&by=recipe", address)
        assert " · 4 runs · " in scope(page)
        select_row(page, 1)
        selected = query(page)["tensor"]
        done = run_collector("run", *SMALL, "--quantization", "nvfp4", root=root)
        assert done.returncode == 0, done.stderr
        page.get_by_text(" · 5 runs · ").wait_for()
        settle(page)
        assert query(page)["tensor"] == selected


def bars(page: Page) -> list[tuple[float, dict[str, float]]]:
    """The bars of the first chart from left to right: where each starts (log₂), and its rectangle in the window."""
    chart = page.locator("[data-testid=stVegaLiteChart]").first
    chart.scroll_into_view_if_needed()
    found = chart.locator("path[aria-label*='log₂ from']").evaluate_all(
        "paths => paths.map(path => [path.getAttribute('aria-label'), path.getBoundingClientRect().toJSON()])"
    )
    starts = [number(re.search(r"log₂ from: ([^;]+)", label)[1]) for label, _ in found]
    return sorted(zip(starts, [box for _, box in found], strict=True), key=lambda bar: bar[0])


def drag_over_bars(page: Page) -> tuple[list[tuple[float, dict[str, float]]], int, int]:
    """Drag from the middle of a bar to that of another: (all bars, the index of the first of the two, the last)."""
    drawn = bars(page)
    first, last = len(drawn) // 2, len(drawn) * 3 // 4
    left, right = (drawn[index][1] for index in (first, last))
    page.mouse.move(left["x"] + left["width"] / 2, left["bottom"] - 2)
    page.mouse.down()
    page.mouse.move(right["x"] + right["width"] / 2, left["bottom"] - 2, steps=8)
    page.mouse.up()
    return drawn, first, last


def a_range_that_is_dragged_over_shows_how_many_values_lie_in_it(page: Page, x: Tensor) -> None:
    exponents = x.float().abs().log2()
    drawn, first, last = drag_over_bars(page)
    texts = page.locator("[data-testid=stVegaLiteChart]").first.locator("svg text")
    counted = texts.filter(has_text=re.compile(r"%  .* values$")).first
    counted.wait_for()
    share, count = re.match(r"([\d.]+)%  ([\d,]+) ", counted.text_content()).groups()
    values = number(count)
    inside = ((exponents >= drawn[first + 1][0]) & (exponents < drawn[last][0])).sum().item()
    touched = ((exponents >= drawn[first][0]) & (exponents < drawn[last + 1][0])).sum().item()
    assert 0 < inside < values < touched
    assert float(share) / 100 == pytest.approx(values / exponents.numel(), rel=0.02)


@pytest.mark.thorough
def test_a_selected_tensor_is_drawn_exactly(visit: Visit, catalog: Catalog):
    page = visit(f"{QUERY}&values=raw")
    select_row(page, 1)
    (tensor_id,) = query(page)["tensor"]
    assert tensor_id == View("explore", query(page)).draw(catalog).tables["tensors"]["tensor_id"].iloc[1]

    wanted = distributions.log2_histogram([distributions.distribution_of("x", catalog.load(tensor_id))])
    drawn = [mark for mark in marks(page) if "log₂ from" in mark]
    assert len(drawn) == len(wanted)
    for mark, (_, bin_) in zip(drawn, wanted.iterrows(), strict=True):
        assert number(mark["log₂ from"]) == pytest.approx(bin_["low"], abs=6e-4)
        assert number(mark["share of values per binade"]) == pytest.approx(bin_["share"], rel=6e-3)

    a_range_that_is_dragged_over_shows_how_many_values_lie_in_it(page, catalog.load(tensor_id))

    press(page, "value")
    page.wait_for_function("() => location.search.includes('axis=linear')")
    settle(page)
    wanted = distributions.linear_histogram([distributions.distribution_of("x", catalog.load(tensor_id))])
    drawn = [mark for mark in marks(page) if "from" in mark]
    assert [number(mark["from"]) for mark in drawn] == [number(number_text(low)) for low in wanted["low"]]
    assert [number(mark["share of values"]) for mark in drawn] == pytest.approx(wanted["share"].tolist(), rel=6e-3)
    assert "Distribution of values" in chart_text(page)


@pytest.mark.thorough
def test_a_second_app_on_the_same_root(visit: Visit, collected: Path):
    """Opened at the runs first. The table is a canvas, with its cells as text for screen readers."""
    first = visit(QUERY)
    with serving(collected) as second:
        page = visit("/runs", second)
        page.wait_for_function(
            """words => {
                const table = document.querySelector('[data-testid=stDataFrame]');
                return words.every(word => table.textContent.includes(word));
            }""",
            arg=list(RECIPES),
        )
        assert len([mark for mark in marks(page) if "loss (nats per token)" in mark]) >= 4
        page = visit(QUERY, second)
        assert scope(page) == scope(first) and marks(page) == marks(first)


@pytest.mark.thorough
def test_labels_are_light_on_dark_and_whole(visit: Visit, catalog: Catalog):
    """Ten long names: every text of a chart lies within its picture."""
    ids = catalog.tensors()["tensor_id"].tolist()[::50][:10]
    page = visit("/explore?" + "&".join(f"tensor={tensor_id}" for tensor_id in ids), color_scheme="dark")
    assert background(page) == "rgb(15, 18, 25)"
    fills = page.locator("[data-testid=stVegaLiteChart] text").evaluate_all(
        "texts => texts.filter(text => text.textContent.trim()).map(text => getComputedStyle(text).fill)"
    )
    assert fills
    for fill in set(fills):
        red, green, blue = (int(part) for part in re.findall(r"\d+", fill)[:3])
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue > 90, fill
    cut = page.locator("[data-testid=stVegaLiteChart] svg").evaluate_all(
        """pictures => pictures.flatMap(svg => {
            const frame = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('text')].filter(text => text.textContent.trim()).filter(text => {
                const box = text.getBoundingClientRect();
                return getComputedStyle(text).opacity !== '0' && (
                    box.left < frame.left - 2 || box.right > frame.right + 2 ||
                    box.top < frame.top - 2 || box.bottom > frame.bottom + 2);
            }).map(text => text.textContent);
        })"""
    )
    assert cut == []


@pytest.mark.thorough
def test_a_click_with_shift_filters_by_the_mark(visit: Visit, catalog: Catalog):
    page = visit("/explore?layer_index=1&operation=forward&by=quant_type")
    bars(page)
    lines = page.locator("[data-testid=stVegaLiteChart]").first.locator("path[aria-label*='quant type: ']")
    found = lines.evaluate_all(  # points of lines that no other line covers
        """lines => lines.flatMap(line => [0.5, 0.55, 0.6, 0.65, 0.7, 0.75].map(part => {
            const at = line.getPointAtLength(part * line.getTotalLength()).matrixTransform(line.getScreenCTM())
            const top = document.elementFromPoint(at.x, at.y) === line
            return top && [line.getAttribute('aria-label'), at.x, at.y]
        })).filter(Boolean)"""
    )
    label, x, y = found[0]
    page.keyboard.down("Shift")
    page.mouse.click(x, y)
    page.keyboard.up("Shift")
    page.wait_for_function("() => location.search.includes('quant_type=')")
    settle(page)
    clicked = re.search(r"quant type: ([^;]+)", label)[1]
    where = Filter(quant_type=[clicked], layer_index=[1], operation=["forward"])
    assert query(page) == where.to_query() | {"by": ["quant_type"]}
    last = int(catalog.distinct(("iteration",), where)["iteration"].max())
    assert scope(page).startswith(f"{catalog.totals(replace(where, iteration=(last,))).tensors} tensors · ")


@pytest.mark.thorough
def test_a_drag_over_magnitudes_finds_their_channels_and_a_click_on_one_its_magnitudes(visit: Visit, catalog: Catalog):
    tensor_id = catalog.tensors(Filter(module=["fc1"], tensor_name=["input"])).iloc[0]["tensor_id"]
    x = catalog.load(tensor_id).double().numpy()
    with np.errstate(divide="ignore"):
        log2 = np.log2(np.abs(x.reshape(-1, x.shape[-1])))  # HiFloat8 has no scale
    page = visit(f"/tensor?view=why&format=hifp8&tensor={quote(tensor_id)}")
    drawn, first, last = drag_over_bars(page)
    page.wait_for_function("() => location.search.includes('range=')")
    settle(page)
    low, high = (float(end) for end in query(page)["range"][0].split(".."))
    assert drawn[first][0] < low < drawn[first + 1][0] and drawn[last][0] < high < drawn[last + 1][0]
    inside = (log2 >= low) & (log2 < high)
    said = page.get_by_text("of the sum of squares.")
    counted = f": {inside.sum():,} values, {inside.mean() * 100:.3g}% of all, in {inside.any(0).sum()} of "
    assert counted in said.inner_text() and inside.sum() > 0
    page.reload()
    settle(page)
    assert counted in said.inner_text()

    counts = inside.sum(0)
    channel = int(counts.argmax())
    channels = page.locator(".st-key-chart_channels")
    bar = channels.locator(f"path[aria-label^='channel (last axis): {channel};']")
    assert f"values in the range: {counts[channel]};" in bar.get_attribute("aria-label")
    bar.click()
    page.wait_for_function("() => location.search.includes('channel=')")
    settle(page)
    assert query(page)["channel"] == [str(channel)]
    assert f"channel {channel} only" in chart_text(page)
    assert f" {counts[channel]:,} of them are in channel {channel}: " in said.inner_text()
    bar.click()
    page.wait_for_function("() => !location.search.includes('channel=')")
    settle(page)
    assert "only" not in chart_text(page)
    at = bars(page)[last][1]  # where it is now that the page has scrolled
    page.mouse.dblclick(at["x"] - 3, at["bottom"] - 150)  # on the range
    page.wait_for_function("() => !location.search.includes('range=')")
    settle(page)
    assert said.count() == 0 and "Largest magnitude by channel" in channels.locator("svg.marks").evaluate(
        "svg => svg.textContent"
    )


@pytest.mark.thorough
def test_hovering_over_a_heat_map_says_what_it_shows(visit: Callable[..., Page]):
    """Its cells in words, in place of the picture's URL; the toolbar of the chart covers nothing above the chart."""
    page = visit("/tensor?view=why")
    chart = page.locator(".st-key-chart_tokens")
    chart.hover()
    shown = page.locator("#vg-tooltip-element.visible")
    shown.wait_for()
    assert re.fullmatch(
        r"token\s+[\d,]+( to [\d,]+)?\s+channel\s+\d+( to \d+)?\s+log₂ \|value\|\s+.*", shown.inner_text()
    )
    toolbar = chart.locator("[data-testid=stElementToolbar]").bounding_box()
    card = page.locator(".st-key-card_tokens").bounding_box()
    assert toolbar and card and toolbar["y"] >= card["y"] - 1


@pytest.mark.thorough
def test_a_chart_of_thousands_of_marks_can_be_saved_as_a_picture(browser: Browser, tmp_path: Path):
    """Streamlit draws more than 2,000 on a canvas, of which no picture with a caption can be made."""
    make_root(tmp_path, 10_000, runs=2)
    with serving(tmp_path) as address:
        page = new_page(browser.new_context())
        page.goto(f"{address}/explore")
        settle(page)
        chart = page.locator(".st-key-card_formats")
        assert chart.locator("svg.marks path").count() > 2000
        with page.expect_download() as download:
            chart.get_by_role("button", name="Save or pin").click()
            chart.get_by_role("button", name="Save as SVG", exact=True).click()
        assert download.value.path().read_text().count("<path") > 2000
