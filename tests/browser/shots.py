"""python -m tests.browser.shots URL OUTDIR: pictures of every part of every page, whole, at two widths, light and dark.

URL may carry a filter; it is kept for the page it names and left out for the others. --page takes one of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from playwright.sync_api import Browser, Page, sync_playwright

from binade.app.pages.registry import PAGES
from tests.browser.driver import launch, new_page, settle

# Every part of every page, and views of a part that look different.
ADDRESSES = {
    **{f"{page}-{part}": f"/{page}?view={part}" for page in PAGES for part in PAGES[page].parts},
    **{f"map-{part}": f"/?view={part}" for part in PAGES["map"].parts},  # the page at the root's address
    "compare-gradients": "/runs?view=recipes&of=gradients",
    "compare-ladder": "/runs?view=recipes&of=ladder",
    "compare-difference": "/runs?view=difference&tolerance=bitwise",
}
WIDTHS = (1280, 1920)
SCHEMES = ("light", "dark")


def grow(page: Page, height: int = 0) -> None:
    """Make the window as high as the page, which scrolls inside it, so that a picture shows all of it."""
    for _ in range(3):
        needed = page.evaluate("() => document.querySelector('[data-testid=stMain]').scrollHeight")
        size = page.viewport_size
        assert size
        if needed <= size["height"]:
            return
        page.set_viewport_size({"width": size["width"], "height": max(needed, height)})
        settle(page)


def shoot(browser: Browser, url: str, file: Path, width: int, scheme: str, height: int = 900) -> None:
    """One picture of one address."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        page = new_page(context)
        page.goto(url)
        settle(page)
        grow(page)
        page.screenshot(path=file)
    finally:
        context.close()


def addresses(url: str) -> dict[str, str]:
    """Name to address: of the page that the URL names with its query, of the others without."""
    parts = urlsplit(url)
    found = {}
    for name, address in ADDRESSES.items():
        path, _, view = address.partition("?")
        given = parts.query if path == (parts.path or "/") else ""
        query = "&".join(filter(None, (view, given)))
        found[name] = urlunsplit((parts.scheme, parts.netloc, path, query, ""))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="shots", description="Take pictures of every page of a running app.")
    parser.add_argument("url", help="for example http://127.0.0.1:8501/?quant_type=mxfp8")
    parser.add_argument("outdir", type=Path)
    parser.add_argument("--page", choices=[*ADDRESSES], help="this page only")
    parser.add_argument("--quick", action="store_true", help="one width and the light scheme only")
    given = parser.parse_args(argv)
    given.outdir.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = launch(playwright)
        for name, address in addresses(given.url).items():
            if given.page in (None, name):
                for width in WIDTHS[:1] if given.quick else WIDTHS:
                    for scheme in SCHEMES[:1] if given.quick else SCHEMES:
                        file = given.outdir / f"{name}-{width}-{scheme}.png"
                        shoot(browser, address, file, width, scheme)
                        print(file)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
