"""Components of ours: their scripts are files that the browser gets once, by routes of the server. Streamlit would send
an inline script again with every element."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import streamlit as st
import vl_convert
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from binade.app.draw import theme

APP = Path(__file__).parents[1]
PATH = "/binade-scripts/"
# Vega's modules and vega-embed, as the library that draws the pictures of reports has them: pages draw the same.
VEGA = "vega.js"
EXPORT = "draw/export"
CHART = "draw/chart"
EXPLORE = "questions/explore/explore"
_TABLE_MENU = """
export default ({ data, parentElement, setTriggerValue }) => {
    const root = parentElement.querySelector('.export');
    if (!root.childElementCount) root.innerHTML = MENU;
    root.dataset.state = 'drawn';
    exportMenu(root, data, setTriggerValue);
};
"""
_STYLES = "\nexport const styles = new CSSStyleSheet();\nstyles.replaceSync(%s);\n"


def text_of(name: str) -> str:
    """The contents of a file of the app."""
    return APP.joinpath(name).read_text(encoding="utf-8")


def _strings(**texts: str) -> str:
    return "".join(f"const {name} = {json.dumps(text)};\n" for name, text in texts.items())


@cache
def _scripts() -> dict[str, str]:
    """The text of each script that a browser asks for, by its name, by which they import each other. `styles` of a
    script are those of its component."""
    themes = json.dumps({each.name: each.config() for each in theme.THEMES.values()})
    menu = _strings(MENU=text_of(f"{EXPORT}.html")) + text_of("draw/picture.js") + text_of(f"{EXPORT}.js")
    styles = {name: text_of(f"{name}.css") for name in (EXPORT, CHART, EXPLORE)}
    of_chart = styles[EXPORT] + styles[CHART]
    return {
        "export.js": menu + _TABLE_MENU + _STYLES % json.dumps(styles[EXPORT]),
        "chart.js": f"{menu}const THEMES = {themes};\n"
        + _strings(VEGA=VEGA)
        + text_of(f"{CHART}.js")
        + _STYLES % json.dumps(of_chart),
        "explore.js": text_of(f"{EXPLORE}.js") + _STYLES % json.dumps(of_chart + styles[EXPLORE]),
    }


@cache
def _vega() -> str:
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub asks for the snippet
    return bundle


@cache
def _version() -> str:
    """Another one for other contents, so that browsers keep what they have."""
    return hashlib.sha256(repr((version("vl-convert-python"), _scripts())).encode()).hexdigest()[:16]


async def _serve(request: Request) -> Response:
    name = request.path_params["name"]
    script = _vega() if name == VEGA else _scripts().get(name)
    if script is None:
        return PlainTextResponse("There is no such script.\n", status_code=404)
    kept = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(script, media_type="text/javascript", headers=kept)


def routes(base_path: str) -> list[Route]:
    """The routes of the scripts beneath the path that a proxy serves the app under."""
    return [Route(base_path + PATH + "{version}/{name}", _serve)]


# one_address.py says where the app is, also behind a proxy that removes a prefix.
_LOADER = """
const scripts = window.__streamlit.BACKEND_BASE_URL + '%s';
const loaded = import(scripts + '%s.js');
export default function (component) {
    let left = false, leave;
    loaded.then(script => {
        if (!document.adoptedStyleSheets.includes(script.styles)) document.adoptedStyleSheets.push(script.styles);
        if (!left) leave = script.default(component, scripts);
    });
    return () => { left = true; leave?.(); };
}
"""


def address() -> str:
    """Where the scripts are, beneath the address of the app."""
    return f"{PATH}{_version()}/"


def component(name: str, css: str = "") -> Callable[..., Any]:
    """A component whose script is `name`.js; its default export takes Streamlit's component, whose root is an element
    of this class, and the address of the scripts. css: what its place looks like before the script is here."""
    script = _LOADER % (address(), name)
    html = f'<div class="{name}" data-state="drawing"></div>'
    # In the page itself: the browser's search, screen readers and scripts of others find what is drawn.
    return st.components.v2.component(
        f"binade_{name}", html=html, css=css or None, js=script, isolate_styles=False
    )  # fmt: skip


@st.cache_resource
def inline(name: str, files: str) -> Callable[..., Any]:
    """A component whose root is an element of this class, with the script and the styles of the app's files of this
    name, which it gets with the page."""
    html, css, js = f'<div class="{name}"></div>', text_of(f"{files}.css"), text_of(f"{files}.js")
    return st.components.v2.component(f"binade_{name}", html=html, css=css, js=js)
