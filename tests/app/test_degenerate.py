"""Every question about operands without an error, without a finite value, without values or of one layer: it is drawn,
or its answer says why not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from binade.app.measures.registry import MAP_MEASURES
from binade.app.measures.values import ERRORS
from binade.app.pages.registry import PAGES, PART
from binade.app.questions.map import page
from binade.app.questions.map.question import map_of
from binade.app.view.view import View
from binade.data.index.cache import ResultCache
from binade.data.index.catalog import Catalog
from tests.app.planted import Placed, normal, operand
from tests.data.builder import make_run

pytestmark = pytest.mark.slow
QUESTIONS = [
    (page.name, part.name) for page in PAGES.values() for part in page.parts.values() if part.question and part.name
]
NAN, INF = torch.nan, torch.inf
VALUES: dict[str, tuple[Tensor, ...]] = {  # of one operand, by layer
    "exact": (torch.ones(32, 64), torch.ones(32, 64)),
    "NaN": (torch.full((32, 64), NAN), torch.full((32, 64), NAN)),
    "Inf": (torch.full((32, 64), INF), torch.full((32, 64), -INF)),
    "empty": (torch.empty(0, 64), torch.empty(0, 64)),
    "one layer": (normal(7, 32, 64),),
}
BESIDE = "beside a normal operand"


@pytest.fixture(scope="module", params=[*VALUES, BESIDE])
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """A run of an operand with these values, or of one operand of each kind beside a normal one."""
    root = tmp_path_factory.mktemp("planted")
    kinds = [("weight", request.param)]
    if request.param == BESIDE:
        kinds = list(zip(("weight", "input", "grad_output", "query", "value"), VALUES, strict=True))
    tensors: list[Placed] = [
        operand(x, layer, tensor_name=name, recipe="mxfp4") for name, kind in kinds for layer, x in _layers(kind)
    ]
    if request.param == BESIDE:
        tensors += [operand(normal(layer, 32, 64), layer, tensor_name="key", recipe="mxfp4") for layer in (1, 2)]
    run = make_run(root, tensors, recipe="mxfp4")
    for iteration in range(2):
        run.append_loss({"iteration": iteration, "loss": 5.0 - iteration, "time": 0.0})
    with Catalog.open(root) as opened:
        opened.cache = ResultCache(1 << 24)
        yield opened


def _layers(kind: str) -> Iterator[tuple[int, Tensor]]:
    return enumerate(VALUES[kind], 1)


def check(view: View, catalog: Catalog) -> None:
    drawn = view.draw(catalog)
    assert drawn.items or drawn.problems, view
    for problem in drawn.problems:
        assert problem.strip() and "\n" not in problem


def check_map(view: View, catalog: Catalog) -> None:
    """The answer, and what the page draws of it: its component takes JSON without NaN."""
    check(view, catalog)
    reading = view.read(catalog)
    found = map_of(catalog, reading.within, reading.values) if not reading.gone else ""
    if not isinstance(found, str):
        assert page._chosen(found, "") is None
        cell = page._chosen(found, str(found.cells.iloc[0]))
        assert cell is not None
        json.dumps([page._data(catalog, found), page.panel(catalog, found, cell, found.fmt)], allow_nan=False)


@pytest.mark.thorough
def test_every_metric_of_the_map(planted: Catalog) -> None:
    for metric in MAP_MEASURES:
        check_map(View("map", {"metric": [metric], "format": ["mxfp4"]}), planted)
    for metric in ERRORS:  # computed from the values
        check_map(View("map", {"metric": [metric], "format": ["nvfp4"], "across": ["iteration"]}), planted)


@pytest.mark.sampled(1)
def test_every_question(planted: Catalog) -> None:
    for name, part in QUESTIONS:
        check(View(name, {PART: [part]}), planted)
