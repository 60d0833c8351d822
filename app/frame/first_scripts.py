"""The scripts that the first view of a page needs. A browser would learn of them only from the answer, and then of what
they import: named in the document, they are compiled while the answer is computed."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from binade.app.draw import components

STATIC = Path(str(files("streamlit"))) / "static"
ELEMENTS = ("Html", "PageLink", "BidiComponent", "Selectbox", "Button", "Checkbox")  # of Streamlit's, on each page
CHART = ("chart.js", components.VEGA)
OF_PAGE = {"explore": ("explore.js", *CHART), "tensor": CHART}
IMPORTED = re.compile(r'(?:from|import)"\./([^"/]+\.js)"')
LINK = '<link rel="modulepreload" crossorigin href=".%s">'


def links(page: str) -> bytes:
    """What the head of the document of a page names, by the page's name in the address: relative, as Streamlit's own
    scripts are."""
    ours = [f"{components.address()}{name}" for name in OF_PAGE.get(page, ())]
    return "".join(LINK % path for path in (*ours, *_of_streamlit())).encode()


@cache
def _of_streamlit() -> tuple[str, ...]:
    """The files of ELEMENTS, and what they import that the document does not name already."""
    folder = STATIC / "static" / "js"
    known = set(re.findall(r"\./static/js/([^\"]+)", (STATIC / "index.html").read_text(encoding="utf-8")))
    left = [path.name for element in ELEMENTS for path in folder.glob(f"{element}.*.js")]
    found: dict[str, None] = {}
    while left:
        name = left.pop(0)
        if name not in known and name not in found and (folder / name).is_file():
            found[name] = None
            left += IMPORTED.findall((folder / name).read_text(encoding="utf-8"))
    return tuple(f"/static/js/{name}" for name in found)
