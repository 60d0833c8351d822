"""Every view drawn again from its page and parameters: the same as the page shows, and a word for what is missing."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from streamlit.testing.v1 import AppTest

from binade.app.draw.figure import Drawn, Figure
from binade.app.pages.registry import PAGES
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.selection import Of
from binade.app.sessions import pins
from binade.app.sessions.session import Pin
from binade.data.index.catalog import Catalog
from binade.data.words.filter import FIELDS
from tests.app import roots
from tests.app.test_pages import Visit, chart_data, first, rerun, words

pytestmark = pytest.mark.slow

# Parameters of each question: other than the defaults where these show little.
ASKED = {
    "map": [{}, {"metric": "absmax", "across": "iteration"}, {"format": "mxfp4", "versus": "mxfp8"}],
    "distribution": [{"by": "layer_index", "quant_type": "mxfp4", "axis": "linear"}, {"law": "laplace"}],
    "recipes": [{"of": "cost"}, {"of": "gradients", "gradient": "grad_input"}],
    "difference": [{"tolerance": "bitwise"}],
    "why": [{"format": "mxfp8", "recipe": "mxfp4"}, {"format": "mxfp4", "range": "-3.5..1", "channel": "3"}],
}
OF_TENSOR = [{"format": "mxfp8", "recipe": "mxfp4"}]
CASES = [
    (question.page, question.address | more)
    for question in QUESTIONS
    if question.name not in ("provenance", "cost")  # of other runs: test_provenance and test_cost
    for more in ASKED.get(question.name, OF_TENSOR if question.of is Of.TENSOR else [{}])
]

SECTIONS = {question.view for question in QUESTIONS if question.room}  # of a page that shows other answers, too
MAP = "binade_map"  # the component of the Map
DRESS = {"config", "$schema", "datasets", "width", "height", "autosize", "padding", "usermeta", "name", "views"}


def bare(spec: Any) -> Any:
    """A chart's marks, encodings and titles, without the names and sizes that Altair and the page give."""
    if isinstance(spec, dict) and str(spec.get("expr")).startswith("width < "):  # broken into lines where it is narrow
        spec = json.loads("[" + spec["expr"].partition("] : [")[2])
        return spec[0] if len(spec) == 1 else spec
    if isinstance(spec, dict):
        return {key: bare(value) for key, value in spec.items() if key not in DRESS and not _named(key, value)}
    if isinstance(spec, list):
        return [bare(each) for each in spec]
    return None if spec == " " else spec  # Streamlit writes an empty title so


def _named(key: str, value: Any) -> bool:
    return key == "data" and isinstance(value, dict) and set(value) == {"name"}


def rows(table: pd.DataFrame) -> str:
    """A data set, whoever carried it: numbers to twelve digits."""

    def text(value: Any) -> str:
        if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
            return "null"
        if isinstance(value, np.ndarray):
            value = value.tolist()
        return f"{value:.12g}" if isinstance(value, numbers.Number) and not isinstance(value, bool) else str(value)

    return json.dumps([{key: text(row[key]) for key in sorted(row)} for row in table.to_dict("records")])


def shown_on(at: AppTest) -> list[tuple[str, list[str]]]:
    """(the chart, its data) of every chart of a page, as they go to the browser."""
    found = []
    for chart in chart_data(at):
        tables = [pd.DataFrame(one["columns"]) for one in chart["tables"].values()]
        found.append((json.dumps(bare(json.loads(chart["spec"])), sort_keys=True), sorted(map(rows, tables))))
    return sorted(found)


def drawn_again(figures: Sequence[Figure]) -> list[tuple[str, list[str]]]:
    found = []
    for figure in figures:
        spec = figure.spec
        tables = [pd.DataFrame(one) for one in spec.get("datasets", {}).values()]
        found.append((json.dumps(bare(spec), sort_keys=True), sorted(map(rows, tables))))
    return sorted(found)


def same_rows(drawn: pd.DataFrame, shown: pd.DataFrame) -> bool:
    """Whether a page's table shows these rows: as many, and in at least one column the very same values."""
    common = [name for name in drawn if name in shown and drawn[name].tolist() == shown[name].tolist()]
    return len(drawn) == len(shown) and bool(common)


def lists(view: dict[str, str]) -> dict[str, list[str]]:
    return {name: [text] for name, text in view.items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("page", "view"), CASES, ids=[f"{page}-{'-'.join(view.values())}" for page, view in CASES])
def test_a_view_drawn_again_is_what_the_page_shows(
    visit: Visit, collected: Path, catalog: Catalog, page: str, view: dict[str, str]
):
    at = visit(collected, page, **view)
    shown_view = at.session_state["shown_view"].explicit(catalog)
    assert shown_view.page == page and shown_view.params["view"] == [view["view"]]
    saved = dict(shown_view.params)
    drawn = pins.draw(catalog, Pin(page, saved))
    headline = view["view"] == "map"  # which the component draws
    if headline:
        check_map(at, drawn)
    else:
        shown, again = shown_on(at), drawn_again(drawn.figures)
        if view["view"] in SECTIONS:
            assert again and all(each in shown for each in again)
        else:
            assert shown and [chart for chart, _ in again] == [chart for chart, _ in shown]
            assert [data for _, data in again] == [data for _, data in shown]
    page_words = words(at)
    assert (headline or drawn.verdict in page_words) and all(sentence in page_words for sentence in drawn.problems)
    if page != "runs":
        if view["view"] == "map":
            at.toggle(key="map_tables").set_value(True)
            rerun(at)
        tables = [element.value for element in at.dataframe]
        assert len(tables) == len(drawn.tables) or (view["view"] in SECTIONS and len(tables) > len(drawn.tables))
        for wanted in drawn.tables.values():
            assert any(same_rows(wanted, table) for table in tables)
    one = pins.draw(catalog, Pin(page, saved, drawn.figures[-1].name))
    assert [figure.name for figure in one.figures] == [drawn.figures[-1].name]
    assert not [problem for problem in drawn.problems if "asks for" in problem]


def check_map(at: AppTest, drawn: Drawn) -> None:
    """The component has the cells of the figure: row, column, color, value in words, and number of tensors."""
    (sent,) = (json.loads(each.proto.json) for each in at.get("bidi_component") if each.proto.component_name == MAP)
    cells = {
        (row["id"], column, *cell[:2], cell[3])
        for block in sent["blocks"]
        for row in block["rows"]
        for column, cell in zip(sent["columns"], row["cells"], strict=True)
        if cell
    }
    figure = drawn.get("map")
    across = "iteration" if sent["word"] == "iteration" else "layer_index"
    marks = [mark for data in figure.spec["datasets"].values() for mark in data]
    shades = [None if mark["shade"] is None else round(mark["shade"], 3) for mark in marks]
    assert len(cells) == len(marks) == len(figure.table)
    assert cells == {
        (mark["row"], mark[across], shade, mark["label"], mark["tensors"])
        for mark, shade in zip(marks, shades, strict=True)
    }
    assert sent["metric"] == figure.title.split("\n")[0]
    assert "".join(text for text, _ in sent["headline"]) == drawn.verdict


def test_chosen_tensors_are_drawn_from_their_values(catalog: Catalog, collected: Path):
    tensor_id = first(collected, tensor_name=["weight"])
    chosen = {"view": ["explore"], "tensor": [tensor_id, "gone/r00-000001"]}
    drawn = pins.draw(catalog, Pin("explore", chosen, "histogram"))
    assert "exact" in drawn.figures[0].caption and "'gone/r00-000001'" in drawn.problems[0]


@pytest.fixture(scope="module")
def smaller(collected: Path, tmp_path_factory: pytest.TempPathFactory):
    """A root of two of the runs: what the keeper of a session had."""
    root = tmp_path_factory.mktemp("smaller")
    for run in roots.runs_of(collected):
        if "bf16" in run.name or "mxfp8" in run.name:
            roots.copy_run(run, root / run.name)
    with Catalog.open(root) as opened:
        yield opened


EXPLORE, PAIR = {"by": ["operation"]}, {"view": ["pair"], "recipe": ["mxfp8"]}
KEPT = [
    ("map", {}),
    ("map", {"across": ["iteration"]}),
    ("explore", EXPLORE),
    ("explore", EXPLORE | {"by": ["recipe"], "layer_index": ["1"]}),
    ("tensor", PAIR),
    ("runs", {"view": ["recipes"], "quant_type": ["mxfp8"]}),
    ("runs", {}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("page", "params"), KEPT, ids=[f"{page}-{'-'.join(params)}" for page, params in KEPT])
def test_a_sessions_pin_shows_what_its_keeper_saw(catalog: Catalog, smaller: Catalog, page: str, params: dict):
    theirs = pins.draw(smaller, Pin(page, params))
    runs = pins.runs_of(smaller, [Pin(page, params)])
    ours = pins.draw(catalog, Pin(page, params), runs)
    assert theirs.figures and drawn_again(ours.figures) == drawn_again(theirs.figures)
    assert ours.verdict == theirs.verdict and ours.problems == theirs.problems
    if page == "map" or params.get("view") == ["explore"]:  # only the caption says which runs they are of
        every = set(catalog.runs()["run_id"])
        for figure in ours.figures:
            named = {run for run in every if run in figure.caption}
            assert named and named <= set(runs)


def test_runs_of_a_session_that_are_gone_are_said(catalog: Catalog, smaller: Catalog):
    runs = smaller.runs()["run_id"].tolist()
    half = pins.draw(catalog, Pin("explore", EXPLORE, "histogram"), [runs[0], "gone"])
    assert half.figures and half.problems == ("1 of its session's 2 runs is missing.",)
    assert not pins.draw(catalog, Pin("explore", EXPLORE, "histogram"), ["gone"]).figures
    named = pins.draw(catalog, Pin("explore", EXPLORE | {"run_id": [runs[1]]}, "histogram"), runs[:1])
    assert named.figures and not named.problems and runs[1] in named.figures[0].caption


@pytest.mark.thorough
def test_nothing_is_drawn_in_the_stead_of_what_is_gone(catalog: Catalog, collected: Path):
    here = first(collected, tensor_name=["weight"])
    for page, params in (
        ("explore", EXPLORE | {"run_id": ["gone_run"]}),
        ("explore", EXPLORE | {"quant_type": ["mxfp8"], "layer_index": ["77", "x"]}),
        ("explore", EXPLORE | {"tensor": ["nope/x"]}),
        ("explore", {"view": ["of another time"]}),
        ("tensor", {"tensor": ["nope/x"]}),
        ("tensor", {"tensor": [here], "view": ["pair"], "other": ["nope/x"]}),
        ("tensor", {"tensor": [here], "tensor_name": ["query"]}),
        ("map", {"metric": ["of another time"]}),
        ("map", {"versus": ["gone_run"]}),
    ):
        drawn = pins.draw(catalog, Pin(page, params))
        assert not drawn.figures and drawn.problems, (page, params)
    assert pins.draw(catalog, Pin("explore", EXPLORE | {"layer_index": ["1", "77"]}, "histogram")).figures


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("view", "asked", "name"), [("attention", "head", "head_map"), ("blocks", "block", "block_values")]
)
def test_a_head_or_a_block_beyond_the_last(
    visit: Visit, catalog: Catalog, collected: Path, view: str, asked: str, name: str
):
    params = {"tensor": first(collected, tensor_name=["query"]), "view": view}
    assert pins.draw(catalog, Pin("tensor", lists(params | {asked: "1"}), name)).figures
    drawn = pins.draw(catalog, Pin("tensor", lists(params | {asked: "999999"}), name))
    assert not drawn.figures and drawn.problems[0].startswith(f"There is no {asked} 9")
    at = visit(collected, "tensor", **params, **{asked: "999999"})
    assert f"There is no {asked} 9" in words(at)


@pytest.mark.thorough
def test_the_runs_and_tensors_behind_a_pin(catalog: Catalog):
    runs = catalog.runs().set_index("recipe")["run_id"]
    recipes = Pin("runs", {"view": ["recipes"], "recipe": ["mxfp4"]})
    assert pins.runs_of(catalog, [Pin("map", {"recipe": ["mxfp4"]})]) == [runs["mxfp4"]]
    assert set(pins.runs_of(catalog, [recipes])) == {runs["mxfp4"], runs["bf16"]}
    assert set(pins.runs_of(catalog, [Pin("notebook", {"view": ["sql"], "q": ["SELECT 1"]})])) == set(runs)
    assert pins.runs_of(catalog, []) == [] == pins.tensors_of(catalog, [Pin("map", {}), Pin("explore", EXPLORE)])
    read = pins.tensors_of(catalog, [Pin("tensor", {"view": ["pair"], "recipe": ["mxfp4"]}, "magnitudes")])
    assert {tensor_id.partition("/")[0] for tensor_id in read} == {runs["mxfp4"], runs["bf16"]}


ODD = ("mxfp4", "1", "-1", "9" * 30, "grad_input", "sequence", "off")
OWN = (
    "metric",
    "format",
    "versus",
    "across",
    "formats",
    "tensor",
    "other",
    "block",
    "head",
    "law",
    "over",
    "at",
    "cell",
)
PARTS = [(page, part) for page, each in PAGES.items() for part in each.parts] + [("explore", "x"), ("tensor", "")]
texts = some.lists(some.text(max_size=12) | some.sampled_from(ODD), max_size=3)
asked = some.dictionaries(some.sampled_from([*FIELDS, *OWN]), texts, max_size=4)


@pytest.mark.thorough
@settings(max_examples=30)
@given(place=some.sampled_from(PARTS), params=asked, chart=some.sampled_from(["", "qq", "x"]))
def test_whatever_a_pin_asks_is_drawn_or_said(
    catalog: Catalog, place: tuple[str, str], params: dict[str, list[str]], chart: str
):
    page, part = place
    drawn = pins.draw(catalog, Pin(page, params | {"view": [part]}, chart))
    assert drawn.figures or drawn.problems
    assert all("\n" not in problem and len(problem) < 400 for problem in drawn.problems)
