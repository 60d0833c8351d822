"""The exported report, opened from disk with the network off: its charts, their data, tooltips, exports and colours."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pypdfium2
import pytest
from playwright.sync_api import Browser, Page

from binade.app.sessions import session as sessions
from binade.app.sessions import storage
from binade.app.sessions.pins import draw, refreshed
from binade.app.sessions.session import Pin
from binade.data.index.catalog import Catalog
from tests.app import roots
from tests.app.reports import reported
from tests.app.test_exports import letter_size
from tests.browser.driver import PATIENCE, serving, turn_to
from tests.conftest import MadeOnce

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CHART = "binade-distributions-histogram-layer-index"
ENTRY = "distributions/histogram_layer_index.csv"
SHARES = (  # the rows that a histogram is drawn from
    "name => binade.view(name).then(view => { const state = view.getState({data: () => true}).data;"
    " return Object.values(state).flat().filter(row => row && row.share > 0)"
    ".map(row => [row.group, row.low, row.high, row.share]); })"
)


@pytest.fixture(scope="module")
def exported(made_once: MadeOnce) -> Path:
    return reported(made_once) / "draw"


@pytest.fixture
def page(browser: Browser, exported: Path, tmp_path: Path) -> Iterator[Page]:
    """The report alone in a folder, in a browser that is offline."""
    alone = tmp_path / "report.html"
    alone.write_bytes((exported / "index.html").read_bytes())
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 1000}, color_scheme="light")
    page = context.new_page()
    page.requests, page.complaints = [], []  # type: ignore[attr-defined]
    page.on("request", lambda request: page.requests.append(request.url))
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.goto(alone.as_uri())
    yield page
    assert page.complaints == []
    outside = [url for url in page.requests if not url.startswith(("data:", "blob:")) and url != alone.as_uri()]
    assert outside == []
    context.close()


@pytest.mark.thorough
def test_every_chart_is_drawn_and_printed_with_its_caption_from_the_file_alone(page):
    """To a real PDF, from the button: A4 at its own size, and no page ends between a chart and its caption."""
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.emulate_media(color_scheme="dark")
    page.evaluate("() => { window.print = () => { window.asked = true; }; }")
    page.get_by_role("button", name="Print").click(timeout=PATIENCE * 1000)
    page.wait_for_function("() => window.asked", timeout=PATIENCE * 1000)
    empty = page.evaluate(
        "() => [...document.querySelectorAll('.chart')].filter(c => c.querySelectorAll('svg path, image').length < 3)"
        ".map(c => c.dataset.name)"
    )
    assert empty == []
    charts = page.locator("figure").evaluate_all(
        "figures => figures.map(f => [f.querySelector('.role-title-text').textContent,"
        " f.querySelector('figcaption div').textContent].map(text => text.split(/\\s+/).join(' ').trim()))"
    )
    pages = list(pypdfium2.PdfDocument(page.pdf(prefer_css_page_size=True)))
    read = [each.get_textpage() for each in pages]
    texts = [" ".join(each.get_text_range().split()) for each in read]
    for title, caption in charts:
        assert any(title[:20] in text and caption[:60] in text for text in texts), (title, caption)
    assert sum(text.count("Data: ") for text in texts) == len(charts) > 50
    assert {tuple(round(side / 72 * 25.4) for side in each.get_size()) for each in pages} == {(210, 297)}
    heading, _ = read[0].search("Tensors of").get_next()
    assert letter_size(read[0], heading) == pytest.approx(19, rel=0.02)  # 1.9 times 10 pt: no table was too wide


@pytest.mark.parametrize("width", [1280, 1920])
def test_no_chart_is_wider_than_its_card(page, width):
    page.set_viewport_size({"width": width, "height": 1000})
    names = page.locator(".chart").evaluate_all("charts => charts.map(chart => chart.dataset.name)")
    for name in names:
        page.evaluate("name => binade.view(name).then(() => 1)", name)
    wide = page.locator(".chart").evaluate_all(
        "charts => charts.filter(chart => chart.scrollWidth > chart.clientWidth || chart.querySelector('svg.marks')"
        ".getBoundingClientRect().right > chart.getBoundingClientRect().right + 1).map(chart => chart.dataset.name)"
    )
    assert wide == [] and page.locator("figure.several").count() > 5


def test_a_charts_data_are_those_of_its_file(page, exported):
    shown = page.evaluate(SHARES, CHART)
    lines = [line for line in (exported / ENTRY).read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    expected = {(row["group"], float(row["low"]), float(row["high"]), float(row["share"])) for row in rows}
    expected = {row for row in expected if row[-1] > 0}
    assert {tuple(row) for row in shown} == expected and len(expected) > 50


def test_a_mark_answers_and_a_chart_saves_itself(page):
    name = "binade-heatmaps-map-sqnr-db-mxfp4"
    page.evaluate("name => binade.view(name).then(() => 1)", name)
    chart = page.locator(f'.chart[data-name="{name}"]')
    chart.scroll_into_view_if_needed()
    bar = chart.locator("svg .mark-rect path").first
    bar.hover()
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert "SQNR (dB)" in tooltip.inner_text()
    figure = page.locator("figure", has=chart)
    for kind, first in (("SVG", b"<svg"), ("PNG", b"\x89PNG"), ("CSV", b"# Data: ")):
        with page.expect_download() as saved:
            figure.get_by_role("button", name=kind).click()
        content = Path(saved.value.path()).read_bytes()
        assert content.startswith(first) and saved.value.suggested_filename == f"{name}.{kind.lower()}"
        assert len(content) > 500
        if kind == "SVG":
            assert b"Data: " in content and b"SQNR in mxfp4" in content


def test_light_and_dark(page):
    page.evaluate("name => binade.view(name).then(() => 1)", CHART)
    ground = "() => getComputedStyle(document.querySelector('figure')).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Light or dark").click()
    page.wait_for_function(f"old => ({ground})() !== old", arg=light)
    page.evaluate("name => binade.view(name).then(() => 1)", CHART)
    assert page.evaluate("() => document.documentElement.dataset.scheme") == "dark"
    text = f"""() => document.querySelector('.chart[data-name="{CHART}"] .role-title-text text').getAttribute('fill')"""
    assert page.evaluate(text) == "#e4e7ef"


@pytest.mark.thorough
def test_a_sessions_report_travels(collected: Path, visit: Callable[..., Page], browser: Browser, tmp_path: Path):
    """Made by clicking in the app; the file alone, offline, shows the pinned chart with the numbers of the app's."""
    root = roots.copy(collected, tmp_path / "root")
    pins = (Pin("explore", {"quant_type": ["mxfp4"], "by": ["layer_index"]}, "histogram", "Layer **by** layer"),)
    with Catalog.open(root) as opened:
        kept = sessions.new("It travels", sessions.View("map"), notes="**Look** here", pins=pins)
        storage.create(root, refreshed(opened, kept))
        table = draw(opened, pins[0]).figures[0].table
    with serving(root) as address:
        page = visit("/", base=address)
        turn_to(page, "Notebook")
        page.get_by_role("button", name="Share").first.click()
        page.get_by_role("button", name="Create report").click()
        page.get_by_role("link", name="Save the report (HTML)").wait_for(timeout=120_000)
        with page.expect_download() as saved:
            page.get_by_role("link", name="Save the report (HTML)").click()
        saved.value.save_as(tmp_path / "it.html")
        assert not page.complaints
    context = browser.new_context(offline=True)
    alone = context.new_page()
    complaints: list[str] = []
    alone.on("console", lambda message: complaints.append(message.text))
    alone.goto((tmp_path / "it.html").as_uri())
    shown = set(map(tuple, alone.evaluate(SHARES, "binade-pins-01-histogram")))
    expected = table[table["share"] > 0]
    assert shown == set(zip(expected["group"], expected["low"], expected["high"], expected["share"], strict=True))
    assert alone.locator("h1").inner_text() == "It travels" and alone.locator("strong").inner_text() == "Look"
    assert alone.get_by_text("Layer **by** layer").count() and not complaints
    context.close()
