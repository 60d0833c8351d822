"""Every page and view over real, odd and missing runs: no exception, and an answer in words."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from binade.app.pages import tensor, worst
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.selection import Selection
from binade.collector import Recorder
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from tests.app import roots
from tests.app.test_pages import Visit, charts, first, words

pytestmark = pytest.mark.slow


def test_the_overview_asks_all_questions(visit: Visit, collected: Path):
    at = visit(collected, "overview")
    links = [link.proto.label for link in at.main.get("page_link")]
    assert [link for link in links if not link[0].isdigit()] == [  # those with numbers are the tour's
        question.text for question in QUESTIONS if question.on_overview
    ]
    assert charts(at) == 5 and "Every tensor has its values" in words(at)


@pytest.mark.parametrize("view", worst.VIEWS)
@pytest.mark.parametrize("metric", ["flush_to_zero", "kurtosis"])
def test_worst(visit: Visit, collected: Path, view: str, metric: str):
    at = visit(collected, "worst", view=view, metric=metric, quant_type="mxfp4")
    assert charts(at) == {"board": 1, "depth": 1, "channels": 3, "noise": 3}.get(view, 2)
    assert not at.warning and "quant type mxfp4" in words(at)


def test_what_is_there_instead_of_scores_is_said(visit: Visit, collected: Path, tmp_path: Path):
    at = visit(collected, "worst", phase="post", layer_type="linear")
    assert re.match(r"The filter selects [\d,]+ tensors, but no operand of a GEMM;", at.info[0].value)
    assert "The filter hides what this view shows." in words(at)
    with Recorder(tmp_path) as recorder:
        for layer, scores in ((1, ()), (1, ()), (2, ("mxfp4",))):
            where = {"layer": layer, "module": "fc1", "operation": "forward", "phase": "pre", "dim": -1}
            recorder.record("input", torch.ones(2, 32), **where, scores=scores)
    with Catalog.open(tmp_path) as catalog:
        unscored = Selection(catalog, Filter(layer_index=(1,)))
        said = worst.draw(unscored, {"view": "board", "metric": "sqnr_db", "format": "mxfp4"}).problems[0]
        assert "2 selected operands were recorded with scores=()" in said and "absmax" in said
        assert worst.draw(unscored, {"view": "board", "metric": "absmax", "format": "mxfp4"}).figures
        other = worst.draw(Selection(catalog, Filter()), {"view": "board", "metric": "sqnr_db", "format": "nvfp4"})
        assert "3 selected operands are scored in mxfp4, not in nvfp4" in other.problems[0]


@pytest.mark.parametrize("page", ["overview", "worst", "surfaces", "difference"])
def test_a_filter_without_tensors_is_said_on_every_page(visit: Visit, collected: Path, page: str):
    at = visit(collected, page, operation="backward", tensor_name="input")
    assert [info.value for info in at.info] == ["No tensor matches: operation backward, tensor input."]
    assert charts(at) == 0 and any(button.label.startswith("Clear the filter: ") for button in at.button)


def test_what_was_not_recorded_is_not_blamed_on_the_filter(visit: Visit, collected: Path):
    at = visit(collected, "provenance", layer_index="1")
    assert "has recorded a NaN" in at.info[0].value and "not due to the filter" in words(at)
    assert not any(button.label.startswith("Clear the filter: ") for button in at.button)


@pytest.mark.parametrize("view", tensor.VIEWS)
def test_tensor(visit: Visit, collected: Path, view: str):
    at = visit(collected, "tensor", view=view, quant_type="mxfp4")
    assert charts(at) >= 1 and not at.error
    assert any(element.value.startswith("**") for element in at.markdown)  # the headline of the verdict
    with Catalog.open(collected) as catalog:
        row = catalog.rows_of([at.session_state["tensor"]]).iloc[0]
    assert row["quant_type"] == "mxfp4"


@pytest.mark.parametrize("view", tensor.VIEWS)
@pytest.mark.parametrize("name", ["all NaN", "zeros", "some NaN", "huge", "single", "empty"])
def test_odd_tensors(visit: Visit, odd_root: Path, view: str, name: str):
    layer = list(roots.odd_tensors()).index(name) + 1
    at = visit(odd_root, "tensor", view=view, tensor=first(odd_root, layer_index=[layer]))
    assert charts(at) or at.info


@pytest.mark.parametrize("law", ["laplace", "student_t", "uniform", "tensor", "selection"])
def test_laws(visit: Visit, collected: Path, law: str):
    at = visit(collected, "tensor", view="law", law=law, quant_type="mxfp4")
    assert charts(at) == 2
    assert ("sketch" in words(at)) == (law == "selection")


def test_what_if_over_the_selection_with_every_knob(visit: Visit, collected: Path):
    knobs = {"scale": "ceil", "rounding": "half_away", "block_size": "16", "hadamard": "16", "overflow": "inf"}
    asked = {"formats": ["mxfp4", "hifp8"], "over": "selection", "quant_type": "mxfp4", "layer_index": "1"}
    at = visit(collected, "tensor", view="whatif", **asked, **knobs)
    table = at.dataframe[0].value
    assert table["label"].tolist() == [
        *("mxfp4", "mxfp4(block=1x16, scale=ceil, rounding=half_away, hadamard=16)"),
        *("hifp8", "hifp8(overflow=inf, hadamard=16)"),
    ]
    assert "does not apply to hifp8" in words(at)
    at.run()  # the second time from memory
    assert not at.exception


def test_a_tensor_outside_the_filter_gives_way_to_the_filters_worst(visit: Visit, collected: Path):
    asked = first(collected, quant_type=["hifp8"])
    at = visit(collected, "tensor", tensor=asked, quant_type="mxfp4")
    with Catalog.open(collected) as catalog:
        ids = set(catalog.tensors(Filter(quant_type=["mxfp4"]))["tensor_id"])
    assert at.session_state["tensor"] in ids


def test_values_that_were_not_kept(visit: Visit, tmp_path: Path):
    roots.record(tmp_path, [roots.odd_tensors()["some NaN"]], raw=False)
    at = visit(tmp_path, "tensor")
    assert "were not kept" in at.info[0].value
    assert "have no values on disk" in words(visit(tmp_path, "overview"))


@pytest.mark.parametrize("view", ["cost", "gradients"])
def test_recipes(visit: Visit, collected: Path, view: str):
    at = visit(collected, "recipes", view=view)
    assert charts(at) == 2 and not at.info


@pytest.fixture(scope="module")
def damaged_root(collected: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run but the last is damaged in its own way."""
    root = tmp_path_factory.mktemp("damaged")
    shutil.copytree(collected, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("index.duckdb*"))
    runs = sorted(path.parent for path in root.glob("*/run.json"))
    (runs[0] / "run.json").write_text(
        (runs[0] / "run.json").read_text().replace('"capture_every": 1', '"capture_every": "x"').replace("crc32", "")
    )
    (runs[1] / "loss.jsonl").write_bytes(b"[" * 200_000)
    bad = ('{"iteration": 0, "loss": "high"}', '{"iteration": "x", "loss": 5.0, "seconds": 1, "recorded": true}')
    bad += ('{"iteration": 0, "loss": 5.0, "seconds": "long", "recorded": true}',)
    (runs[2] / "loss.jsonl").write_text("\n".join(bad))
    return root


@pytest.mark.parametrize("page", ["overview", "runs", "recipes", "worst", "collect"])
def test_damaged_runs_break_no_page(visit: Visit, damaged_root: Path, page: str):
    at = visit(damaged_root, page, **({"view": "training"} if page == "worst" else {}))
    assert page == "collect" or "capture_every" in words(at) + str([text.value for text in at.text])


def test_recipes_without_a_reference(visit: Visit, odd_root: Path):
    assert "None of these runs was quantized" in visit(odd_root, "recipes").info[0].value


def test_sql(visit: Visit, collected: Path):
    at = visit(collected, "sql", q="SELECT recipe FROM run ORDER BY recipe")
    assert at.dataframe[-1].value["recipe"].tolist() == ["bf16", "hifp8", "mxfp4", "mxfp8"]
    assert "only SELECT" in visit(collected, "sql", q="DROP TABLE run").error[0].value
