"""One part of each layout, light and dark: nothing serious or critical of axe-core, nothing too wide for a phone, and
little that moves while a page loads."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Literal

import pytest
from playwright.sync_api import Locator, Page

from binade.app.pages.registry import DEFAULT_LAYOUT, PAGES
from tests.browser.driver import settle
from tests.browser.shots import ADDRESSES

pytestmark = [pytest.mark.browser, pytest.mark.slow]

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()
FOUND = """rules => axe.run(document, {resultTypes: ['violations'], ...rules}).then(({violations}) => violations
    .filter(({impact}) => ['serious', 'critical'].includes(impact))
    .flatMap(({id, nodes}) => nodes.map(({html}) => [id, html])))"""
# Of Vega: it gives the role of a picture to the group around its marks, which have names themselves.
MARKS = ("svg-img-alt", "role-mark")
CUT = """() => {
    const within = element => element.closest('[data-testid=stDataFrame], [data-testid=stCode], pre')?.parentElement;
    const texts = document.querySelectorAll('[data-testid=stMain] :is(p, h1, h2, h3, label, text)');
    const cut = [...texts].filter(element => {
        const {left, right, width} = element.getBoundingClientRect();
        return width && element.checkVisibility({opacityProperty: true, visibilityProperty: true})
            && !within(element) && (left < -1 || right > innerWidth + 1);
    });
    return cut.map(element => element.textContent);
}"""


# One part of each layout.
LOOKED_AT = {
    part.layout: ADDRESSES[f"{page.name}-{part.name}"]
    for page in PAGES.values()
    for part in reversed([*page.parts.values()])
} | {DEFAULT_LAYOUT: ADDRESSES["compare-difference"]}


# The page has the colors of the scheme, and no color is on its way to another: Streamlit's fade.
THEMED = """dark => {
    const [r, g, b] = getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor.match(/[0-9.]+/g);
    return (Number(r) + Number(g) + Number(b) < 384) === dark;
}"""
FADED = """() => Promise.allSettled(document.getAnimations().filter(each => each instanceof CSSTransition)
    .map(each => each.finished))"""


def show_in(page: Page, scheme: Literal["light", "dark"]) -> None:
    """Change the color scheme, and wait until the change is complete."""
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function(THEMED, arg=scheme == "dark")
    settle(page)
    page.evaluate(FADED)


@pytest.mark.thorough
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_axe_finds_nothing_serious_and_a_phone_shows_all(visit: Callable[..., Page], app: str, every: int):
    page = visit()
    found, csv = {}, []
    assert len(LOOKED_AT) == 12
    paths = [*LOOKED_AT.values()][every // 2 :: every]  # Tensor, Difference and SQL, or all
    for path in paths:
        page.set_viewport_size({"width": 1280, "height": 1000})
        page.goto(app + path)
        settle(page)
        csv += [button.is_visible() for button in page.get_by_label("Download as CSV", exact=True).all()]
        page.evaluate(AXE)
        seen = page.evaluate(FOUND, {})
        show_in(page, "dark")
        seen += page.evaluate(FOUND, {"runOnly": ["color-contrast"]})
        show_in(page, "light")
        page.set_viewport_size({"width": 390, "height": 844})
        settle(page)
        wide = page.evaluate("() => document.querySelector('[data-testid=stMain]').scrollWidth - innerWidth")
        serious = [f"{rule}: {html[:200]}" for rule, html in seen if rule != MARKS[0] or MARKS[1] not in html]
        found[path] = [*serious, *page.evaluate(CUT), *([f"{wide} pixels too wide"] if wide > 0 else [])]
    assert found == {path: [] for path in paths}
    assert csv and not any(csv)  # Streamlit's own CSV of a table, which contains formulas


NAMED = {"grid", "table", "list", "listbox", "radiogroup", "combobox", "slider", "graphics-document", "img", "image"}


@pytest.mark.parametrize("path", ["/", "/explore", "/tensor", "/tensor?view=whatif", "/tensor?view=pair"])
def test_grids_lists_and_charts_have_names(visit: Callable[..., Page], path: str):
    """In the tree that Chromium gives to screen readers, each has one, and no two grids or charts have the same."""
    page = visit(path)
    client = page.context.new_cdp_session(page)
    seen = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in client.send("Accessibility.getFullAXTree")["nodes"]
        if not node["ignored"] and node["role"]["value"] in NAMED
    ]
    assert [role for role, name in seen if not name or name == "Vega visualization"] == []
    drawn = [name for role, name in seen if role in ("grid", "graphics-document")]
    assert len(drawn) >= 3 and len(set(drawn)) == len(drawn)


# The sum of Chrome's scores, of all that moved without a click.
MOVED = """() => new Promise(done => new PerformanceObserver(list => done(list.getEntries()
    .filter(entry => !entry.hadRecentInput).reduce((sum, entry) => sum + entry.value, 0)))
    .observe({type: 'layout-shift', buffered: true}) || setTimeout(() => done(0), 1000))"""


@pytest.mark.thorough
@pytest.mark.parametrize("path", ["/", "/explore", "/tensor", "/tensor?view=whatif", "/runs", "/runs?view=recipes"])
def test_little_moves_while_a_page_loads(visit: Callable[..., Page], path: str):
    """0.1 is the limit of what Chrome's Web Vitals call good."""
    page = visit(path)
    assert page.evaluate(MOVED) <= 0.1


def tab_to(page: Page, wanted: Locator) -> None:
    """Press Tab until the element, or a cell of this table, has the focus."""
    seen = []
    for _ in range(100):
        page.keyboard.press("Tab")
        if wanted.evaluate("element => element.contains(element.getRootNode().activeElement)"):
            return
        seen.append(page.evaluate("document.activeElement.ariaLabel || document.activeElement.innerText"))
    pytest.fail(f"Tab does not reach it, but {seen}")


# The outline of what has the focus, or of what it is part of: of a list of Streamlit's, its input is inside.
RING = """() => {
    let element = document.activeElement;
    while (element.shadowRoot?.activeElement) element = element.shadowRoot.activeElement;
    for (let part = element, up = 0; part && up < 4; part = part.parentElement, up += 1) {
        const { outlineStyle, outlineWidth } = getComputedStyle(part);
        if (outlineStyle === 'solid' && parseFloat(outlineWidth) >= 2) return '';
    }
    return element === document.body ? '' : element.outerHTML.slice(0, 200);
}"""


def test_every_focus_has_a_ring(visit: Callable[..., Page]):
    page = visit("/explore")
    without = []
    for _ in range(36):
        page.keyboard.press("Tab")
        without.append(page.evaluate(RING))
    assert [element for element in without if element] == []


@pytest.mark.parametrize(
    ("path", "link", "reached"),
    [
        ("/explore", "filter", ".st-key-scope"),
        ("/explore", "table", ".explore tbody"),
        ("/explore", "charts", ".explore section.histogram"),
        ("/", "filter", ".st-key-scope"),
        ("/", "table", "[class*=st-key-map]"),
        ("/", "charts", "[class*=st-key-map]"),
    ],
)
def test_filter_table_and_charts_are_few_stops_away(visit: Callable[..., Page], path: str, link: str, reached: str):
    """Space ticks the row."""
    page = visit(path)
    for _ in range(11):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.innerText") == f"Skip to the {link}":
            break
    page.keyboard.press("Enter")
    wanted = page.locator(reached).first
    assert wanted.evaluate("element => element.contains(document.activeElement)")
    if link == "table" and path == "/explore":
        page.keyboard.press("Space")
        page.wait_for_url("**tensor=**")


@pytest.mark.parametrize("path", ["/explore", "/"])
def test_a_page_that_is_zoomed_to_200_percent_fits(visit: Callable[..., Page], path: str):
    """A window of 1280 pixels then has 640."""
    page = visit()
    page.set_viewport_size({"width": 640, "height": 800})
    page.goto(page.url.split("?")[0].rstrip("/") + path)
    settle(page)
    assert page.evaluate("() => document.querySelector('[data-testid=stMain]').scrollWidth - innerWidth") <= 0
    assert page.evaluate(CUT) == []
    page.set_viewport_size({"width": 1280, "height": 1000})


@pytest.mark.thorough
def test_filter_table_and_chart_menu_without_a_mouse(visit: Callable[..., Page], app: str):
    page = visit("/explore")
    tab_to(page, page.get_by_role("button", name="Quant type ▾"))
    page.keyboard.press("Enter")
    value = page.locator(".st-key-chip_values").get_by_role("button", name="mxfp4", exact=True)
    value.wait_for()
    settle(page)
    tab_to(page, page.locator(".st-key-chip_values").get_by_role("button").nth(1))  # after the help
    for _ in range(6):
        if value.evaluate("element => element === document.activeElement"):
            break
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url("**quant_type=mxfp4")
    settle(page)

    tab_to(page, page.locator(".explore tbody"))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    page.wait_for_url("**tensor=**")
    settle(page)

    menu = page.get_by_role("button", name="Save or pin").first
    tab_to(page, menu)
    page.keyboard.press("Enter")
    save = page.get_by_role("button", name="Save as SVG").first
    tab_to(page, save)
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.path().read_text().startswith("<svg")


@pytest.mark.thorough
def test_pages_without_a_mouse(visit: Callable[..., Page], app: str):
    page = visit("/explore?quant_type=mxfp4")
    tab_to(page, page.get_by_role("link", name="Tensor", exact=True))
    page.keyboard.press("Enter")
    page.wait_for_url("**/tensor?**quant_type=mxfp4**")
    settle(page)
    assert page.get_by_role("heading", name="Tensor › In the format").is_visible()
