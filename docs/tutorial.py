"""Takes the tutorial's pictures from the app on the runs of `make run`: python docs/tutorial.py [URL]

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
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser.driver import launch, new_page, settle

TENSOR = "format=hifp8&layer_index=2&module=proj&tensor_name=grad_output"
CELL = "wgrad/proj/grad_output/2"
# Each picture's address, and the folder that draws what it shows.
PICTURES = {
    "map": ("/", "app/questions/map"),
    "hifp8": (f"/?format=hifp8&cell={CELL}", "app/questions/map"),
    "why": (f"/tensor?view=why&{TENSOR}", "app/questions/why"),
    "what-if": (f"/tensor?view=whatif&{TENSOR}", "app/questions/what_if"),
    "recipes": ("/compare?view=recipes&of=gradients", "app/questions/recipes"),
}
FOLDER = Path(__file__).parent / "tutorial"
MANIFEST = FOLDER / "sources.json"


def sources() -> dict[str, str]:
    """A hash of the code that draws each picture. A picture is outdated if its hash in the manifest differs."""
    project = Path(__file__).parents[1]
    found = {}
    for name, (_, pattern) in PICTURES.items():
        files = sorted(file for end in ("py", "js", "css") for file in project.glob(f"{pattern}/*.{end}"))
        found[name] = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    return found


def main(url: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = launch(playwright)
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme, base_url=url)
            page = new_page(context)
            for name, (address, _) in PICTURES.items():
                page.goto(address)
                settle(page)
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(128)
                picture.save(FOLDER / f"{name}-{scheme}.png", optimize=True)
        browser.close()
    MANIFEST.write_text(json.dumps(sources(), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8501")
