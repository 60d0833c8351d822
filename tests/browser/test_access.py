"""Every page, light and dark: no serious or critical finding of axe-core. On a phone: nothing wider than the window."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import pytest
from playwright.sync_api import Page

from tests.browser.driver import settle
from tests.browser.shots import PAGES

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


def test_axe_finds_nothing_serious_and_a_phone_shows_all(visit: Callable[..., Page], app: str):
    page = visit()
    found = {}
    for name, path in PAGES.items():
        if name.partition("-")[0] in {shown.partition("-")[0] for shown in found}:
            continue  # another view of a page that was looked at
        page.set_viewport_size({"width": 1280, "height": 1000})
        page.emulate_media(color_scheme="light")
        page.goto(app + path)
        settle(page)
        page.evaluate(AXE)
        seen = page.evaluate(FOUND, {})
        page.emulate_media(color_scheme="dark")
        settle(page)
        seen += page.evaluate(FOUND, {"runOnly": ["color-contrast"]})
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 390, "height": 844})
        settle(page)
        wide = page.evaluate("() => document.querySelector('[data-testid=stMain]').scrollWidth - innerWidth")
        serious = [f"{rule}: {html[:200]}" for rule, html in seen if rule != MARKS[0] or MARKS[1] not in html]
        found[name] = [*serious, *page.evaluate(CUT), *([f"{wide} pixels too wide"] if wide > 0 else [])]
    assert found == {name: [] for name in found} and len(found) == 14
