"""The real app in a real browser on real runs: what a user clicks, sees and shares."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from binade.app.questions.shared import distributions
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.run.directory import list_runs
from binade.data.run.losses import read_losses
from binade.data.words.filter import Filter
from tests.app import roots
from tests.bench.make_root import make_root
from tests.browser.driver import choose, chosen, new_page, serving, settle, turn_to
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
    labels = page.locator(".chart").nth(chart).locator("path[aria-label]").evaluate_all(
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
    return page.locator(".chart").nth(chart).locator("svg").evaluate("svg => svg.textContent")


def hear(page: Page) -> None:
    """Wait until Python has heard of the ticks, which it does when the user pauses."""
    page.wait_for_function("() => !document.querySelector('.explore').page.timer")
    settle(page)


def select_row(page: Page, row: int) -> None:
    """Tick a row, and wait until Python has heard of it."""
    page.locator(f".explore tbody tr[data-index='{row}']").click()
    page.wait_for_function("() => location.search.includes('tensor=')")
    hear(page)


def lines(page: Page) -> dict[str, list[tuple[float, float]]]:
    """(log₂ or value, share) of the points of each line of the histogram, as the browser holds them."""
    rows = page.locator(".explore section.histogram .chart").evaluate(
        "chart => chart.getRootNode().querySelector('.explore').page.places.histogram.plot.view.data('d0')"
        ".map(row => [row.group, row.low, row.share])"
    )
    found: dict[str, list[tuple[float, float]]] = {}
    for group, low, share in rows:
        found.setdefault(group, []).append((low, share))
    return found


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
    assert copy.url == address.partition("&resolved=")[0]  # what the page left open is chosen in a copy
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
    dots = page.locator(".explore section.formats path[aria-label*='minus normal']")
    dots.nth(dots.count() // 2).click(force=True)
    page.wait_for_function("() => new URLSearchParams(location.search).getAll('tensor').length === 2")
    hear(page)
    first, other = query(page)["tensor"]
    assert first == ticked and other != ticked
    assert page.locator(".explore .legend [role=listitem]").count() == 2
    page.keyboard.press("Control+z")
    page.wait_for_function("() => new URLSearchParams(location.search).getAll('tensor').length === 1")
    settle(page)
    assert query(page)["tensor"] == [ticked]
    page.get_by_role("button", name="Clear 1 ✕").click()
    page.wait_for_function("() => !location.search.includes('tensor=')")
    hear(page)
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
    page.get_by_title("Show the operands outside this range too").click()
    page.wait_for_function("() => !location.search.includes('delta=')")
    settle(page)
    page.get_by_text(before, exact=True).wait_for()  # a part of the page asks for the whole page
    assert page.complaints == []


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
    """The bars of the values in the first chart from left to right: where each starts (log₂), and its rectangle in the
    window."""
    chart = page.locator(".chart").first
    chart.scroll_into_view_if_needed()
    found = chart.locator("path[aria-label*='log₂ from'][aria-label*='share of values']").evaluate_all(
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


def test_a_tick_is_drawn_before_python_hears_of_it_then_from_the_values(visit: Visit, catalog: Catalog):
    """With the server stopped in between: the browser draws from what it has, and the address follows."""
    page = visit(f"{QUERY}&values=raw")
    page.evaluate("() => { window.later = window.setTimeout; window.setTimeout = (act, ms, ...more) => "
                  "window.later(act, ms === 700 ? 20000 : ms, ...more); }")  # fmt: skip
    page.locator(".explore tbody tr[data-index='1']").click()
    page.wait_for_function("() => location.search.includes('tensor=')")
    name = page.locator(".explore tbody tr[data-index='1'] td.name").inner_text()
    expect(page.locator(".explore .legend [role=listitem]")).to_have_text([name])
    (tensor_id,) = query(page)["tensor"]
    assert tensor_id == View("explore", query(page)).draw(catalog).tables["tensors"]["tensor_id"].iloc[1]
    x = catalog.load(tensor_id).double().numpy().ravel()
    own = np.log2(np.abs(x[x != 0]))

    def shares(drawn: list[tuple[float, float]], slack: float) -> None:
        edges = [low for low, _ in drawn]
        counts, _ = np.histogram(own, edges)
        wanted = counts / len(x) / np.diff(edges)
        np.testing.assert_allclose([share for _, share in drawn[:-1]], wanted, atol=slack)

    shares(lines(page)[name], 0.02)  # a bin of a sketch that is cut by an edge is split evenly
    page.reload()
    settle(page)
    shares(lines(page)[name], 1e-4)


def test_values_and_axis_are_drawn_at_once(visit: Visit, catalog: Catalog):
    page = visit(f"{QUERY}&values=raw")
    select_row(page, 1)
    (tensor_id,) = query(page)["tensor"]
    page.get_by_role("button", name="value", exact=True).click()
    page.wait_for_function("() => location.search.includes('axis=linear')")
    hear(page)
    wanted = distributions.linear_histogram([distributions.distribution_of("x", catalog.load(tensor_id))])
    (drawn,) = lines(page).values()
    assert [low for low, _ in drawn[:-1]] == pytest.approx(wanted["low"].tolist(), abs=1e-6)
    assert [share for _, share in drawn[:-1]] == pytest.approx(wanted["share"].tolist(), abs=1e-5)
    assert page.locator(".explore section.histogram h4").inner_text() == "Distribution of values"
    page.get_by_role("button", name="÷ σ", exact=True).click()
    page.wait_for_function("() => !location.search.includes('values=')")


def test_the_list_without_a_mouse(visit: Visit):
    """One stop for the whole list: arrows move, Space ticks, Enter opens the tensor."""
    page = visit("/explore")
    rows = page.locator(".explore tbody tr[data-index]")
    rows.first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    expect(rows.nth(1)).to_have_attribute("aria-selected", "true")
    assert rows.locator("[tabindex='0']").count() == 0 and page.locator(".explore tbody tr[tabindex='0']").count() == 1
    page.keyboard.press("End")
    total = int(page.locator(".explore table").get_attribute("aria-rowcount") or 0)
    expect(page.locator(".explore tbody tr[tabindex='0']")).to_have_attribute("aria-rowindex", str(total))
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.wait_for_url("**/tensor?**")


def test_no_cell_of_the_list_is_cut(visit: Visit):
    page = visit("/explore?by=run_id")
    cut = page.locator(".explore td").evaluate_all(
        "cells => cells.filter(c => c.scrollWidth > c.clientWidth + 1).length"
    )
    assert cut == 0


@pytest.mark.thorough
def test_the_same_tensor_in_all_runs(visit: Visit):
    page = visit("/explore?tensor_name=weight&quant_type=mxfp4")  # the other runs have other formats
    select_row(page, 0)
    page.get_by_role("button", name="In all runs").click()
    page.wait_for_function("() => location.search.includes('by=run_id')")
    settle(page)
    assert scope(page).startswith("4 tensors · 4 runs · iteration ")
    assert page.locator(".explore .legend [role=listitem]").count() == 4


@pytest.mark.thorough
def test_a_second_app_on_the_same_root(visit: Visit, collected: Path):
    """Opened at the runs first."""
    first = visit(QUERY)
    with serving(collected) as second:
        page = visit("/runs", second)
        table = page.get_by_role("treegrid")
        for recipe in RECIPES:
            expect(table).to_contain_text(recipe)
        assert len([mark for mark in marks(page) if "loss (nats per token)" in mark]) >= 4
        page = visit(QUERY, second)
        assert scope(page) == scope(first) and marks(page) == marks(first)


@pytest.mark.thorough
def test_labels_are_light_on_dark_and_whole(visit: Visit, catalog: Catalog):
    """Ten long names: every text of a chart lies within its picture."""
    ids = catalog.tensors()["tensor_id"].tolist()[::50][:10]
    page = visit("/explore?" + "&".join(f"tensor={tensor_id}" for tensor_id in ids), color_scheme="dark")
    assert background(page) == "rgb(15, 18, 25)"
    fills = page.locator(".chart text").evaluate_all(
        "texts => texts.filter(text => text.textContent.trim()).map(text => getComputedStyle(text).fill)"
    )
    assert fills
    for fill in set(fills):
        red, green, blue = (int(part) for part in re.findall(r"\d+", fill)[:3])
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue > 90, fill
    cut = page.locator(".chart svg").evaluate_all(
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
def test_a_group_of_the_legend_filters_to_it(visit: Visit, catalog: Catalog):
    page = visit("/explore?layer_index=1&operation=forward&by=quant_type")
    group = page.locator(".explore .legend button").first
    clicked = group.inner_text()
    group.click()
    page.wait_for_function("() => location.search.includes('quant_type=')")
    settle(page)
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


@pytest.mark.parametrize(("part", "name"), [("table", "losses"), ("recipes", "gaps")])
def test_hovering_over_lines_says_the_value_of_each(visit: Callable[..., Page], collected: Path, part: str, name: str):
    """Of the nearest iteration, as loss.jsonl has it."""
    page = visit(f"/runs?view={part}")
    chart = page.locator(f".st-key-chart_{name} svg.marks")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box
    shown = page.locator("#vg-tooltip-element.visible")
    for place in (0.3, 0.31):
        page.mouse.move(box["x"] + place * box["width"], box["y"] + 0.5 * box["height"])
    shown.wait_for()
    (_, at), *rows = (row.inner_text().split("\t") for row in shown.get_by_role("row").all())
    losses = {
        run.run_id: step["loss"] for run in list_runs(collected)[0] for step in read_losses(run.directory)
        if step["iteration"] == int(at.strip().replace("−", "-"))
    }  # fmt: skip
    (base,) = (losses[run.run_id] for run in list_runs(collected)[0] if run.config["recipe"] == "bf16")
    expected = {value - base if name == "gaps" else value for value in losses.values()}
    values = {value.strip().replace("−", "-") for _, value in rows}
    assert len(rows) > 1 and values <= {f"{value:.4f}" for value in expected} and len(values) > 1


@pytest.mark.thorough
def test_hovering_over_a_heat_map_says_what_it_shows(visit: Callable[..., Page]):
    """Its cells in words, in place of the picture's URL."""
    page = visit("/tensor?view=why")
    chart = page.locator(".st-key-chart_tokens")
    chart.hover()
    shown = page.locator("#vg-tooltip-element.visible")
    shown.wait_for()
    assert re.fullmatch(
        r"token\s+[\d,]+( to [\d,]+)?\s+channel\s+\d+( to \d+)?\s+log₂ \|value\|\s+.*", shown.inner_text()
    )


@pytest.mark.thorough
def test_a_chart_of_thousands_of_marks_can_be_saved_as_a_picture(browser: Browser, tmp_path: Path):
    """Streamlit draws more than 2,000 on a canvas, of which no picture with a caption can be made."""
    make_root(tmp_path, 10_000, runs=2)
    with serving(tmp_path) as address:
        page = new_page(browser.new_context())
        page.goto(f"{address}/explore")
        settle(page)
        chart = page.locator(".explore section.formats")
        assert chart.locator("svg.marks path").count() > 2000
        with page.expect_download() as download:
            chart.get_by_role("button", name="Save or pin").click()
            chart.get_by_role("button", name="Save as SVG", exact=True).click()
        assert download.value.path().read_text().count("<path") > 2000
