"""The palette and the keys: what they find is what the index has, by plain SQL, and it can be opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from binade.app.frame import palette
from binade.app.pages.registry import PAGES
from binade.app.questions.registry import QUESTIONS
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter

HOME = View("map")


def tensors(catalog: Catalog, text: str, view: View = HOME) -> list[str]:
    found = palette.find(catalog, view, text)
    return [entry.view.params["tensor"][0] for entry in found if entry.kind == "tensor"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("text", "where", "name"),
    [
        ("fc2 grad L2", {"module": ["fc2"], "layer_index": [2]}, "grad"),
        ("fc2 grad_output L2", {"module": ["fc2"], "layer_index": [2]}, "grad_output"),
        ("l1 qkv weight", {"module": ["qkv"], "layer_index": [1]}, "weight"),
        ("layer 2 fc2", {"module": ["fc2"], "layer_index": [2]}, ""),
        ("fc2 grad layer 2", {"module": ["fc2"], "layer_index": [2]}, "grad"),
        ("grad_output layer2 proj", {"module": ["proj"], "layer_index": [2]}, "grad_output"),
    ],
)
def test_finds_the_tensors_that_have_all_words(catalog: Catalog, text: str, where: dict, name: str):
    found = catalog.rows_of(tensors(catalog, text))
    assert len(found) and found["run_id"].nunique() == found["iteration"].nunique() == 1
    within = Filter(**where, run_id=found["run_id"][:1].tolist(), iteration=found["iteration"][:1].tolist())
    rows = catalog.tensors(within)
    assert set(found["tensor_id"]) == set(rows["tensor_id"][rows["tensor_name"].str.contains(name)])


def test_values_of_fields_are_a_filter(catalog: Catalog):
    view = View("explore")
    first = palette.find(catalog, view, "L2 backward")[0]
    assert (first.kind, first.title) == ("filter", Filter(layer_index=[2], operation=["backward"]).sentence())
    assert first.view == view.changed(layer_index=[2], operation="backward")
    named = palette.find(catalog, view, "fc2 grad_output L2")
    assert named[0].kind == "tensor" and [entry.kind for entry in named].count("filter") == 1
    for text in ("L2 backwards", "L7 backward", "L2 mxfp5"):  # not all words are values
        assert "filter" not in {entry.kind for entry in palette.find(catalog, view, text)}


def test_a_layer_is_not_a_part_of_a_number(catalog: Catalog):
    assert tensors(catalog, "fc1 L1") and not tensors(catalog, "fc1 L11")


@pytest.mark.thorough
@pytest.mark.slow
def test_finds_runs_formats_pages_questions_and_actions(catalog: Catalog):
    def first(text: str, kind: str) -> View:
        return next(entry.view for entry in palette.find(catalog, HOME, text) if entry.kind == kind)

    run_id = catalog.runs()["run_id"][0]
    assert first(run_id, "run") == View("map", {"run_id": [run_id]})
    assert first("nvfp4", "format") == View("map", {"format": ["nvfp4"]})
    assert first("crest", "metric") == View("map", {"metric": ["crest_factor"]})
    assert first("jobs", "page") == View("runs", {"view": ["jobs"]})
    assert first("new collection", "action") == View("runs", {"view": ["collect"]})
    for question in QUESTIONS:
        assert first(question.text, "question") == HOME.at(question.page, question.view)
    assert not palette.find(catalog, HOME, "no such thing anywhere")
    assert {entry.kind for entry in palette.find(catalog, HOME, "")} == {"page", "question", "action"}


@pytest.mark.thorough
@pytest.mark.slow
def test_every_entry_can_be_read_and_keeps_the_filter(catalog: Catalog):
    view = View("explore", {"layer_index": ["2"], "format": ["mxfp8"]})
    for text in ("", "l2", "m", "fc1"):
        for entry in palette.find(catalog, view, text):
            assert entry.view.page in PAGES and not entry.view.read(catalog).gone
            assert entry.view.params["layer_index"] == ["2"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["'", "%_", "\\", "a" * 5000, "l99999", ";DROP TABLE run", "🙂", "\0"])
def test_any_text_is_a_text(catalog: Catalog, text: str):
    before = catalog.totals()
    palette.find(catalog, HOME, text)
    assert catalog.totals() == before


class TestKeys:
    def test_next_and_previous_tensor(self, catalog: Catalog):
        view = View("tensor", {"module": ["fc1"]})
        first = view.read(catalog).values["tensor"]
        after = palette.pressed(catalog, view, "j")
        assert after and after.params["tensor"] != [first] and after.params["module"] == ["fc1"]
        back = palette.pressed(catalog, after, "k")
        assert back and back.params["tensor"] == [first]

    def test_the_same_operand_in_another_layer(self, catalog: Catalog):
        rows = catalog.tensors(Filter(layer_index=[1], module=["fc2"], tensor_name=["grad_output"]))
        view = View("tensor", {"tensor": [rows["tensor_id"][0]]})
        deeper = palette.pressed(catalog, view, "]")
        assert deeper
        row, other = rows.iloc[0], catalog.rows_of(deeper.params["tensor"]).iloc[0]
        same = ["run_id", "iteration", "module", "tensor_name", "operation", "micro_batch"]
        assert other["layer_index"] == 2 and (row[same] == other[same]).all()
        assert palette.pressed(catalog, deeper, "[") == view
        assert palette.pressed(catalog, deeper, "]") is None  # the last layer

    def test_formats_in_turn(self, catalog: Catalog):
        view, seen = HOME, []
        for _ in catalog.scored_formats():
            after = palette.pressed(catalog, view, "f")
            assert after
            view = after
            seen += view.params["format"]
        assert sorted(seen) == sorted(catalog.scored_formats())

    def test_mean_nothing_elsewhere(self, catalog: Catalog):
        assert palette.pressed(catalog, HOME, "j") is None


def test_an_empty_root_has_pages_but_no_tensors(tmp_path: Path):
    with Catalog.open(tmp_path) as empty:
        assert {entry.kind for entry in palette.find(empty, HOME, "map")} >= {"question"}
        assert palette.pressed(empty, HOME, "f") is None and palette.pressed(empty, View("tensor"), "j") is None
