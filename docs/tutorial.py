"""Takes the tutorial's pictures from the app on the runs of `make run`: python docs/tutorial.py [URL]

Each is taken in both themes, as docs/tutorial/<name>-light.png and -dark.png.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser.driver import launch, new_page, settle

PICTURES = {
    "overview": "/",
    "worst": "/worst?format=mxfp4",
    "why": "/tensor?view=why&quant_type=mxfp4&format=mxfp4&tensor_name=grad_output&layer_index=1&module=fc1",
    "what-if": "/tensor?view=whatif&quant_type=mxfp4&tensor_name=grad_output&layer_index=1&module=fc1",
    "recipes": "/recipes",
}
FOLDER = Path(__file__).parent / "tutorial"


def main(url: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = launch(playwright)
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme, base_url=url)
            page = new_page(context)
            for name, address in PICTURES.items():
                page.goto(address)
                settle(page)
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(128)
                picture.save(FOLDER / f"{name}-{scheme}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8501")
