"""The questions as functions of a catalog and a filter, and the notebook of the documentation that calls them."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from binade import plots
from binade.app.pages.registry import PART
from binade.app.questions.question import Question
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.scope import scoped
from binade.app.sessions import pins
from binade.app.sessions.session import Pin
from binade.app.view.view import View
from binade.data.exchange.python import package_environment
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow


@pytest.mark.sampled(1)
@pytest.mark.parametrize(  # those are of other runs: test_provenance and test_cost
    "question",
    [each for each in QUESTIONS if each.name not in ("provenance", "cost")],
    ids=lambda question: question.name,
)
def test_a_question_answers_alone_as_the_app_does(question: Question, catalog: Catalog):
    ask = getattr(plots, question.name)
    answer = ask(catalog)
    view = View(question.page, {PART: [question.view]})
    shown = pins.draw(catalog, Pin(view.page, view.params))
    assert (answer.verdict, answer.sentences) == (shown.verdict, shown.sentences)
    assert answer.charts and all(chart.to_dict() for chart in answer.charts)  # no more rows than Altair takes
    takes = [*inspect.signature(ask).parameters][2:]
    own = {*question.params(catalog), *question.scope} - ({*question.selects} - {*question.takes})
    assert {*takes} == own
    assert question.text in ask.__doc__ and all(f"    {name}: " in ask.__doc__ for name in takes)
    assert question.name in dir(plots)


@pytest.mark.thorough
def test_filter_and_parameters(catalog: Catalog):
    backward = Filter(operation=["backward"])
    answer = plots.map(catalog, backward, metric="absmax")
    places = answer.tables["places"]
    rows = catalog.tensors(scoped(catalog, backward))
    operands = rows[rows["contracted_axis"].notna()]
    assert set(places["tensor_id"]) <= set(operands["tensor_id"])
    assert places["value"].iloc[0] == operands["absmax"].max()
    versus = (
        plots.map(catalog, metric="sqnr_db", format="mxfp4", versus="mxfp8").get("map").table
    )  # scored tensor by tensor
    apart = (versus["own"] - versus["other"]).to_numpy()
    assert (apart < -5).mean() > 0.9 and (versus["value"] == apart).all()
    assert "absmax" in answer.charts[0].to_dict()["title"]["text"].lower()
    two = rows["tensor_id"].iloc[:2].tolist()
    assert plots.explore(catalog, tensor=two).tables["Statistics"]["tensors"].tolist() == [1, 1]
    assert two[1] in plots.why(catalog, tensor=two[1]).figures[0].caption
    assert plots.what_if(catalog, formats=["nvfp4"]).tables["trials"]["label"].tolist() == ["nvfp4"]
    assert plots.why(catalog, Filter(layer_index=[99])).problems == (f"No tensor in {catalog.root} matches: layer 99.",)


@pytest.mark.parametrize(
    ("name", "given", "named"),
    [
        ("map", {"formt": "mxfp4"}, "'formt'.* metric, versus"),
        ("map", {"view": "map"}, "'view'"),
        ("map", {"format": "mxfp9"}, r"'mxfp9'.* a format"),
        ("map", {"metric": "sqnr"}, r"'sqnr'.* sqnr_db, .*absmax"),
        ("map", {"versus": "gone"}, "'gone'"),
        ("what_if", {"formats": ["mxfp4", "int2"]}, "'int2'.* mxfp4"),
        ("why", {"tensor": "no/r00-1"}, "'no/r00-1'"),
        ("explore", {"tensor": ["no/r00-1"]}, "'no/r00-1'"),
        ("attention", {"head": 0}, "'0'.* from 1 "),
        ("runs", {"format": "mxfp4"}, "'format'"),
    ],
)
def test_what_is_not_known_is_refused(catalog: Catalog, name: str, given: dict[str, object], named: str):
    with pytest.raises(ValueError, match=re.compile(f"^{name}.*{named}")):
        getattr(plots, name)(catalog, **given)
    with pytest.raises(AttributeError, match=r"'rankin'.* map, "):
        _ = plots.rankin


@pytest.mark.thorough
def test_the_notebook_of_the_documentation(collected: Path, tmp_path: Path):
    """It runs from start to end, and has the outputs that it was saved with, of the same kinds."""
    saved = nbformat.read(PROJECT / "docs" / "notebook.ipynb", as_version=4)
    fresh = copy.deepcopy(saved)
    fresh.cells.append(nbformat.v4.new_code_cell("import sys\nassert 'streamlit' not in sys.modules"))
    environment = package_environment() | {"TENSOR_SAVE_DIR": str(collected), "IPYTHONDIR": str(tmp_path)}
    NotebookClient(fresh, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute(env=environment)
    assert kinds(fresh)[:-1] == kinds(saved)
    assert sum("image/png" in kind for _, results in kinds(saved) for kind in results) >= 3


def kinds(notebook: nbformat.NotebookNode) -> list[tuple[set[str], list[list[str]]]]:
    """Of each cell with code: the streams that it prints to, in however many pieces, and the kinds of its results."""
    return [
        (
            {output.name for output in cell.outputs if output.output_type == "stream"},
            [sorted(output.get("data", {})) for output in cell.outputs if output.output_type != "stream"],
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
