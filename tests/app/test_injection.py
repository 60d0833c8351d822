"""What runs and sessions of others say is text in every chart: no expression, no field, no address."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import vl_convert

from binade.app.draw.figure import Drawn
from binade.app.pages.registry import PAGES, PART
from binade.app.sessions import pins
from binade.app.sessions.session import Pin
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.words.filter import FIELDS
from tests.app.reports import tensors
from tests.app.test_pins import CASES
from tests.data.builder import make_run

pytestmark = pytest.mark.slow
MARK = "203.0.113.9"
PAYLOADS = (
    f"'] || warn('{MARK}') || datum['x",
    f'"; fetch("http://{MARK}/a"); "',
    f"http://{MARK}/b.png",
    f'{{"expr": "data({MARK})"}}',
    f"datum.x:Q[0]\\.{MARK}",
)
# Of a specification: where text is shown or compared as it is. Everything else has a meaning of its own.
TEXTS = {"title", "text", "subtitle", "domain", "sort", "values", "datum"}


def make_hostile(root: Path) -> None:
    """Two runs whose names, modules and tensors are payloads."""
    for seed, payload in enumerate(PAYLOADS[:2]):
        named = [(x, {"module": PAYLOADS[2 + i % 3], **about}) for i, (x, about) in enumerate(tensors(seed))]
        make_run(root, named, dataset=payload, model=PAYLOADS[2], size=PAYLOADS[3], recipe="mxfp8", command=payload)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    root: Path = tmp_path_factory.mktemp("hostile")
    make_hostile(root)
    with Catalog.open(root) as catalog:
        yield catalog


def marked(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all texts and names that have MARK."""
    if isinstance(node, dict):
        for name, value in node.items():
            if MARK in name:
                yield (*path, "the name of a field")
            yield from marked(value, (*path, name))
    elif isinstance(node, list):
        for value in node:
            yield from marked(value, path)
    elif isinstance(node, str) and MARK in node:
        yield path


def check(drawn: Drawn) -> int:
    """How many of the figures show a payload; none of them means anything but text."""
    for figure in drawn.figures:
        rows = [row for table in figure.spec.get("datasets", {}).values() for row in table]
        assert not {path for row in rows for path in marked(row) if path[-1] in ("url", "the name of a field")}
        spec = {name: value for name, value in figure.spec.items() if name != "datasets"}
        assert not [path for path in marked(spec) if path[-1] not in TEXTS], figure.name
    return sum(MARK in json.dumps(figure.spec) for figure in drawn.figures)


def check_pictures(drawn: Drawn) -> None:
    """No figure asks for an address, and no picture links to one or runs anything."""
    for figure in drawn.figures:
        svg = vl_convert.vegalite_to_svg(figure.sized_chart.to_dict(), allowed_base_urls=[])  # raises for any request
        for element in ElementTree.fromstring(svg).iter():
            links = [text for name, text in element.attrib.items() if name.endswith("href")]
            assert all(text.startswith(("data:image/png;base64,", "#")) for text in links)
            assert not any(name.startswith("on") for name in element.attrib)


@pytest.mark.thorough
def test_payloads_in_runs_are_text(opened: Catalog):
    shown = 0
    for number, (page, view) in enumerate(CASES):
        drawn = pins.draw(opened, Pin(page, {name: [text] for name, text in view.items()}))
        shown += check(drawn)
        if number % 4 == 0:  # to draw takes as long as all else
            check_pictures(drawn)
    assert shown > 5


@pytest.mark.thorough
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_payloads_in_pins_are_refused(opened: Catalog, alone: bool):
    """A pin that asks for what is not here draws what it draws without it, or nothing, and says so."""
    for view in (View(page.name, {PART: [name]}) for page in PAGES.values() for name in page.parts):
        own = {*view.params_in(opened)} - {"cell", *FIELDS}  # a cell can be any text: nothing is drawn from it
        for names in ({name} for name in {*FIELDS, *own}) if alone else ({*FIELDS}, own):
            asked = {name: [f"{PAYLOADS[number % 5]} or another"] for number, name in enumerate(sorted(names))}
            drawn = pins.draw(opened, Pin(view.page, view.params | asked, caption=PAYLOADS[0]))
            check(drawn)
            assert "another" not in json.dumps([figure.spec for figure in drawn.figures])
            assert drawn.problems or not names
