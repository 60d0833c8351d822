"""Takes the pictures of docs/tutorial.md and recipes.md from the runs of `make run`: python docs/tutorial.py [URL]

Each is taken in both themes, as docs/tutorial/<name>-light.png and -dark.png. sources.json keeps a hash of
the code that draws each, by which the tests know a picture that is older than its page.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser.driver import launch, new_page, settle

TENSOR = "format=hifp8&layer_index=2&module=proj&tensor_name=grad_output"
CELL = "wgrad/proj/grad_output/2"
# Each picture's address, the folder that draws what it shows, and the figures that it shows; "" for the whole page.
PICTURES = {
    "map": ("/", "app/questions/map", ""),
    "hifp8": (f"/?format=hifp8&cell={CELL}", "app/questions/map", ""),
    "why": (f"/tensor?view=why&{TENSOR}", "app/questions/why", ""),
    "what-if": (f"/tensor?view=whatif&{TENSOR}", "app/questions/what_if", ""),
    "recipes": ("/runs?view=recipes&of=gradients", "app/questions/recipes", ""),
    "scales": (f"/tensor?view=whatif&{TENSOR}", "app/questions/what_if", "scales_hifp8 scale_shares_hifp8"),
}
FOLDER = Path(__file__).parent / "tutorial"
MANIFEST = FOLDER / "sources.json"


def sources() -> dict[str, str]:
    """A hash of the code that draws each picture. A picture is outdated if its hash in the manifest differs."""
    project = Path(__file__).parents[1]
    found = {}
    for name, (_, pattern, _) in PICTURES.items():
        files = sorted(file for end in ("py", "js", "css") for file in project.glob(f"{pattern}/*.{end}"))
        found[name] = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    return found


def _shots(page: Page, figures: list[str]) -> list[bytes]:
    """The page, or the figures of these names."""
    if not figures:
        return [page.screenshot()]
    return [page.locator(f".st-key-chart_{name}").screenshot() for name in figures]


def main(url: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = launch(playwright)
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme, base_url=url)
            page = new_page(context)
            for name, (address, _, figures) in PICTURES.items():
                page.goto(address)
                settle(page)
                shown = [Image.open(io.BytesIO(shot)) for shot in _shots(page, figures.split())]
                picture = Image.new("RGB", (shown[0].width, sum(each.height for each in shown)))
                for number, each in enumerate(shown):
                    picture.paste(each, (0, sum(before.height for before in shown[:number])))
                picture = picture.quantize(128)
                picture.save(FOLDER / f"{name}-{scheme}.png", optimize=True)
        browser.close()
    MANIFEST.write_text(json.dumps(sources(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8501")
