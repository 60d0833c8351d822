"""Streamlit draws a table on a canvas: what it draws of each cell is heard, and compared with the cell's width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page

from binade.app.draw.show import WIDEST
from tests.browser.driver import settle
from tests.browser.shots import ADDRESSES, grow

pytestmark = [pytest.mark.browser, pytest.mark.slow]

# Each text of a table: its pixels outside of the rectangle that the canvas is clipped to, which is that of its cell.
LISTEN = """
window.cells = [];
const clips = new WeakMap(), areas = new WeakMap(), context = CanvasRenderingContext2D.prototype;
const clipsOf = canvas => clips.get(canvas) ?? clips.set(canvas, [null]).get(canvas);
const before = (name, hear) => {
    const own = context[name];
    context[name] = function (...values) { hear(this, ...values); return own.apply(this, values); };
};
const across = (canvas, x) => { const { a, e } = canvas.getTransform(); return e / a + x; };
before('save', canvas => clipsOf(canvas).push(clipsOf(canvas).at(-1)));
before('restore', canvas => { if (clipsOf(canvas).length > 1) clipsOf(canvas).pop(); });
before('beginPath', canvas => areas.delete(canvas));
before('rect', (canvas, x, y, width) => areas.set(canvas, [across(canvas, x), width]));
before('clip', canvas => { if (areas.has(canvas)) clipsOf(canvas).splice(-1, 1, areas.get(canvas)); });
before('fillText', (canvas, text, x) => {
    const tables = [...document.querySelectorAll('[data-testid=stDataFrame]')];
    const table = tables.findIndex(each => each.contains(canvas.canvas));
    if (table < 0) return;
    const { width } = canvas.measureText(text), clip = clipsOf(canvas).at(-1);
    const left = across(canvas, x) - width * ({ right: 1, end: 1, center: .5 }[canvas.textAlign] ?? 0);
    const outside = clip ? Math.max(clip[0] - left, left + width - clip[0] - clip[1]) : NaN;
    window.cells.push({ table, text: String(text), outside, width: clip?.[1] });
});
"""
SCROLLED = """scroller => new Promise(done => {
    const down = scroller.scrollTop + scroller.clientHeight < scroller.scrollHeight - 1;
    const right = scroller.scrollLeft + scroller.clientWidth < scroller.scrollWidth - 1;
    if (!down && !right) return done(false);
    if (down) scroller.scrollTop += scroller.clientHeight / 2;
    else { scroller.scrollTop = 0; scroller.scrollLeft += Math.min(scroller.clientWidth / 3, 80); }
    requestAnimationFrame(() => requestAnimationFrame(() => done(true)));
})"""
# Parts of pages with tables of statistics, bars, and recipes.
PARTS = ("tensor-pair", "tensor-blocks", "runs-recipes")


def cells(page: Page) -> list[dict[str, Any]]:
    """What the tables of the page draw, each scrolled from end to end."""
    for scroller in page.locator("[data-testid=stDataFrame] .dvn-scroller").all():
        before = page.evaluate("window.cells.length")
        while scroller.evaluate(SCROLLED):
            page.wait_for_function("before => window.cells.length > before", arg=before)
            before = page.evaluate("window.cells.length")
    return page.evaluate("window.cells")


def cut(drawn: list[dict[str, Any]]) -> list[tuple[int, str, float]]:
    """(table, text, pixels outside) of cells that are cut wherever their table is scrolled to: the first and the last
    column in view may reach beyond the table. A text that is longer than the widest column is left out."""
    least: dict[tuple[int, str], float] = {}
    for cell in drawn:
        if cell["width"] < WIDEST:
            place = cell["table"], cell["text"]
            least[place] = min(least.get(place, cell["outside"]), cell["outside"])
    return [(*place, outside) for place, outside in least.items() if outside > 0.5]


def test_no_cell_of_a_table_is_cut(visit: Callable[..., Page], app: str):
    """Only a text that is longer than the widest column may be."""
    page = visit()
    page.add_init_script(f"{{{LISTEN}}}")
    found: dict[str, list[tuple[int, str, float]]] = {}
    for name in PARTS:
        page.goto(app + ADDRESSES[name])
        settle(page)
        grow(page)
        drawn = cells(page)
        assert len(drawn) > 20 and all(cell["width"] for cell in drawn), name
        found[name] = cut(drawn)
    assert found == {name: [] for name in PARTS}


# Buttons that the toolbar that is shown lies over.
COVERED = """() => {
    const box = element => element.getBoundingClientRect();
    const seen = element => element.checkVisibility({opacityProperty: true}) && box(element).width > 0;
    const bars = [...document.querySelectorAll('[data-testid=stElementToolbar]')].filter(seen).map(box);
    const all = [...document.querySelectorAll('[data-testid=stMain] :is(button, a, input, summary)')].filter(
        element => seen(element) && !element.closest('[data-testid=stElementToolbar]'));
    return [bars.length, all.filter(element => bars.some(bar => {
        const { left, right, top, bottom } = box(element);
        return left < bar.right && bar.left < right && top < bar.bottom && bar.top < bottom;
    })).map(element => element.innerText || element.ariaLabel)];
}"""


@pytest.mark.thorough
def test_the_toolbar_of_a_table_covers_no_button(visit: Callable[..., Page], app: str):
    """The tables of a tensor, at the start of a section or between other things, and of recipes."""
    page = visit()
    covered = {}
    for path in ("/tensor?format=mxfp4", *(ADDRESSES[part] for part in PARTS)):
        page.goto(app + path)
        settle(page)
        tables = page.get_by_test_id("stDataFrame").filter(visible=True).all()
        assert tables, path
        for number, table in enumerate(tables):
            table.scroll_into_view_if_needed()
            table.hover()
            page.wait_for_function(f"() => ({COVERED})()[0] === 1")
            covered[path, number] = page.evaluate(COVERED)[1]
    assert len(covered) > 4 and not any(covered.values()), covered
