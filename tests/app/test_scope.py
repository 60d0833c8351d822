"""What is shown is what was used: an answer returns its scope, and bar, tables and captions have that one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from binade.app.draw.figure import Drawn
from binade.app.pages.registry import PART
from binade.app.questions.question import Question
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.runs import labels_of
from binade.app.questions.shared.selection import Of
from binade.app.report import contents
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from binade.data.words.text import counted
from tests.app.planted import normal, operand, over_seeds, parts
from tests.data.builder import make_run

pytestmark = pytest.mark.slow
Visit = Callable[..., AppTest]


def rows(*names: str) -> Callable[[Drawn], list[int]]:
    """How many rows these tables have, those that the answer has."""
    return lambda answer: [len(answer.tables[name]) for name in names if name in answer.tables]


LISTED: dict[str, Callable[[Drawn], list[int]]] = {
    "map": rows("places"),
    "explore": rows("tensors"),
    "runs": lambda answer: [answer.get("losses").table["group"].nunique()],
    "recipes": rows("recipes"),
    "difference": lambda answer: [len(answer.get("difference").table)],
}
"""How many there are of what the tables of an answer list."""
ELSEWHERE = {"cost", "provenance"}  # test_cost and test_provenance have the roots for these
SEVERAL = [each for each in QUESTIONS if each.of is not Of.TENSOR and each.name not in ELSEWHERE]


def view_of(question: Question, **params: str) -> View:
    return View(question.page, {PART: [question.view]} | {name: [text] for name, text in params.items()})


def test_every_question_about_several_tensors_or_runs_is_listed():
    assert {each.name for each in SEVERAL} == set(LISTED)


@pytest.mark.parametrize("question", SEVERAL, ids=lambda each: each.name)
def test_the_scope_counts_what_the_tables_list(catalog: Catalog, question: Question):
    answer = view_of(question).draw(catalog)
    assert answer.figures, answer.problems
    scope = answer.scope
    assert [count for count, _ in scope.counts] == LISTED[question.name](answer)
    assert scope.sentence.startswith(" and ".join(counted(*count) for count in scope.counts))
    assert set(scope.where.run_id) <= set(catalog.runs()["run_id"]) and scope.runs <= scope.of_runs
    for frame in answer.tables.values():
        used = scope.where.run_id or tuple(catalog.runs()["run_id"])
        ids = frame["tensor_id"].dropna().tolist() if "tensor_id" in frame else []
        named = set(catalog.rows_of(ids)["run_id"]) | (set(frame["run_id"]) if "run_id" in frame else set())
        assert named <= set(used)


@pytest.mark.parametrize("name", ["map", "explore"])
def test_captions_name_the_filter_that_was_used(catalog: Catalog, name: str):
    (question,) = (each for each in QUESTIONS if each.name == name)
    answer = view_of(question).draw(catalog)
    assert answer.scope.where.sentence() in answer.figures[0].caption


@pytest.mark.sampled(2)
@pytest.mark.parametrize("question", SEVERAL, ids=lambda each: each.name)
def test_the_bar_shows_the_scope_of_the_answer(visit: Visit, collected: Path, catalog: Catalog, question: Question):
    at = visit(collected, question.page, view=question.view)
    expected = view_of(question).draw(catalog).scope.sentence
    assert expected in [text.value.replace("\\", "") for text in at.caption]


def test_tables_of_a_report_state_the_scope(catalog: Catalog, monkeypatch: pytest.MonkeyPatch):
    (question,) = (each for each in QUESTIONS if each.name == "recipes")
    monkeypatch.setattr(contents, "QUESTIONS", [question])  # to save time
    section = next(contents.contributions(catalog, Filter(), "here"))
    scope = view_of(question).draw(catalog).scope
    assert section.tables[0].note.startswith(f"Of {scope.sentence}.")


def test_what_is_tried_on_several_operands_is_tried_on_those_of_the_scope(tmp_path: Path):
    first = [operand(normal(at, 32, 64), at) for at in (1, 2, 3)]
    make_run(tmp_path, first)
    newest = make_run(
        tmp_path, [operand(normal(10 + at, 32, 64), at, iteration) for at in (1, 2) for iteration in (0, 1)]
    )
    with Catalog.open(tmp_path) as opened:
        view = View("tensor", {PART: ["whatif"], "over": ["selection"], "formats": ["mxfp4"]})
        scope = view.draw(opened).scope
    assert scope.counts == ((2, "operand"),)
    assert (scope.where.run_id, scope.where.iteration) == ((newest.run_id,), (1,))


def test_the_bar_names_the_run_of_the_tensor(visit: Visit, collected: Path, catalog: Catalog):
    rows = catalog.tensors(Filter(iteration=(0,), tensor_name=("weight",)))
    row = rows[rows["run_id"] != catalog.runs()["run_id"][0]].iloc[0]
    at = visit(collected, "tensor", tensor=row["tensor_id"])
    shown = [at.selectbox(key=f"filter_scope_{name}").placeholder for name in ("run_id", "iteration")]
    assert shown == [labels_of(catalog)[row["run_id"]], "0"]


def test_recipes_count_the_runs_that_were_compared(tmp_path: Path):
    means = {"linear": 0.01, "PV": 0.04}
    parts(tmp_path, means)
    with Catalog.open(tmp_path) as opened:
        scope = view_of(next(each for each in QUESTIONS if each.name == "recipes")).draw(opened).scope
    seeds = len(over_seeds(0.0, 1.0))
    assert scope.counts == ((len(means), "recipe"),)
    assert scope.runs == scope.of_runs == seeds * (len(means) + 1)


@pytest.mark.parametrize("page", ["map", "explore", "tensor", "runs"])
def test_a_page_resolves_its_view_once(visit: Visit, collected: Path, monkeypatch: pytest.MonkeyPatch, page: str):
    read: list[View] = []
    resolve = View.read
    monkeypatch.setattr(View, "read", lambda view, catalog: (read.append(view), resolve(view, catalog))[1])
    at = visit(collected, page)
    assert not at.exception
    assert [view.page for view in read] == [page]
