"""Every page and view over real, odd and missing runs: no exception, and an answer in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from streamlit.testing.v1 import AppTest

from binade.app.draw.figure import Figure
from binade.app.draw.formatting import plain
from binade.app.measures.registry import MAP_MEASURES
from binade.app.pages.registry import PAGES
from binade.app.view.view import View
from binade.collector import Recorder
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.app import roots
from tests.app.test_pages import Visit, address, charts, chips, first, rerun, words

RECORDED = tuple(
    metric for metric in MAP_MEASURES if metric not in ("effect", "parity_change", "tensor_scale", "oscillating")
)  # which only some runs have

pytestmark = pytest.mark.slow

VIEWS = tuple(PAGES["tensor"].parts)


def drawn_map(at: AppTest) -> dict[str, Any] | None:
    """What the map shows; None if there is none."""
    data = [json.loads(each.proto.json) for each in at.get("bidi_component") if each.proto.json]
    return next((each for each in data if "blocks" in each), None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("metric", "across"),
    [*((metric, "layer_index") for metric in RECORDED), ("sqnr_db", "iteration")],
)
def test_map(visit: Visit, collected: Path, metric: str, across: str):
    at = visit(collected, "map", metric=metric, across=across, quant_type="mxfp4")
    shown = drawn_map(at)
    assert shown and not at.warning and not at.info
    with Catalog.open(collected) as catalog:
        tensors = catalog.tensors(Filter(quant_type=["mxfp4"]))
        view = View("map", {"metric": [metric], "across": [across], "quant_type": ["mxfp4"]})
        answer = view.draw(catalog)
    cells, below = answer.tables["places"], answer.items[1]
    assert shown["columns"] == sorted(tensors[across].unique())
    filled = [cell for block in shown["blocks"] for row in block["rows"] for cell in row["cells"] if cell]
    assert len(filled) == len(cells) > 0
    assert sorted(cell[1] for cell in filled) == sorted(cells["label"])
    at.toggle(key="map_tables").set_value(True)
    assert len(cells) in [len(frame.value) for frame in rerun(at).dataframe]
    assert charts(at) == 1 + (isinstance(below, Figure))


def test_the_map_in_another_format_iteration_and_as_a_difference(visit: Visit, collected: Path):
    at = visit(collected, "map")
    assert (
        drawn_map(at)["metric"] == "SQNR against normal values as used" and drawn_map(at)["iterations"]["current"] == 1
    )
    at.selectbox(key="filter_format").set_value("mxfp8")
    at.selectbox(key="filter_scope_iteration").set_value(0)
    rerun(at)
    assert address(at) == {"format": ["mxfp8"], "iteration": ["0"]}
    shown = drawn_map(at)
    assert shown["metric"] == "SQNR against normal values in mxfp8" and shown["iterations"]["current"] == 0
    at.selectbox(key="filter_versus").set_value("hifp8")
    rerun(at)
    metric = "SQNR against normal values in mxfp8, difference to hifp8"
    assert drawn_map(at)["metric"] == metric and drawn_map(at)["legend"]["difference"]
    at.selectbox(key="filter_metric").set_value("absmax")
    assert "does not depend on a format: compare with another run" in words(rerun(at))


OF_SOME_RUNS = tuple(name for name in MAP_MEASURES if MAP_MEASURES[name].extra)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metric", OF_SOME_RUNS)
def test_what_is_below_the_map(visit: Visit, collected: Path, metric: str):
    at = visit(collected, "map", metric=metric, quant_type="mxfp4", layer_index="1")
    assert drawn_map(at)["metric"].startswith(MAP_MEASURES[metric].measure.label) and not at.warning and not at.error
    with Catalog.open(collected) as catalog:
        extra = View("map", {"metric": [metric], "quant_type": ["mxfp4"], "layer_index": ["1"]}).draw(catalog).items[1]
    assert charts(at) == isinstance(extra, Figure)
    assert "Quant type: mxfp4" in chips(at)


def test_parts_keep_the_scope_and_what_each_showed_last(visit: Visit, collected: Path):
    at = visit(collected, "tensor", layer_index="1", view="whatif")
    at.segmented_control(key="page_part").set_value("why")
    rerun(at)
    assert address(at)["layer_index"] == ["1"] and "view" not in address(at)
    at.segmented_control(key="page_part").set_value("whatif")
    assert address(rerun(at))["layer_index"] == ["1"] and address(at)["view"] == ["whatif"]


def test_what_is_there_instead_of_scores_is_said(visit: Visit, collected: Path, tmp_path: Path):
    at = visit(collected, "map", phase="post", layer_type="linear")
    assert at.info[0].value.startswith("The filter selects no operand of a GEMM")
    assert "No data for this view under the current filter." in words(at)
    with Recorder(tmp_path, max_bytes=0) as recorder:
        for layer, scores in ((1, ()), (1, ()), (2, ("mxfp4",))):
            where = {"layer": layer, "module": "fc1", "operation": "forward", "phase": "pre", "dim": -1}
            recorder.record("input", torch.ones(2, 32), **where, scores=scores)
    with Catalog.open(tmp_path) as catalog:
        unscored = View("map", {"metric": ["sqnr_db"], "format": ["mxfp4"], "layer_index": ["1"]})
        said = unscored.draw(catalog).problems[0]
        assert "2 selected operands were recorded with scores=()" in said and "absmax" in said
        assert unscored.changed(metric="absmax").draw(catalog).figures
        other = unscored.changed(layer_index=None, format="nvfp4").draw(catalog)
        assert "operands are scored in mxfp4, not in nvfp4" in other.problems[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", ["map", "explore", "difference", "tensor"])
def test_a_filter_without_tensors_is_said_on_every_page(visit: Visit, collected: Path, page: str):
    at = visit(collected, page, operation="backward", tensor_name="input")
    assert [info.value for info in at.info] == ["No tensor matches: operation backward, tensor input."]
    assert charts(at) == 0 and at.button(key="offer_to_clear")


def test_what_was_not_recorded_is_not_blamed_on_the_filter(visit: Visit, collected: Path):
    at = visit(collected, "provenance", layer_index="1")
    assert "has recorded a NaN" in at.info[0].value and "These runs have no data for this view." in words(at)
    assert not any(button.key == "offer_to_clear" for button in at.button)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("view", VIEWS)
def test_tensor(visit: Visit, collected: Path, view: str):
    at = visit(collected, "tensor", view=view, quant_type="mxfp4")
    assert charts(at) >= 1 and not at.error
    assert any(element.value.startswith("**") for element in at.markdown)  # the headline of the verdict
    with Catalog.open(collected) as catalog:
        row = catalog.rows_of([at.session_state["tensor"]]).iloc[0]
    assert row["quant_type"] == "mxfp4"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("view", VIEWS)
def test_odd_tensors(odd_root: Path, view: str, every: int):
    """Something is drawn, as JSON without NaN, or said. every: each view has a third of the tensors, each of them some
    views."""
    with Catalog.open(odd_root) as catalog:
        for tensor_id in catalog.tensors()["tensor_id"][VIEWS.index(view) % every :: every]:
            drawn = View("tensor", {"view": [view], "tensor": [tensor_id]}).draw(catalog)
            assert drawn.figures or drawn.problems or drawn.verdict, tensor_id
            json.dumps([figure.spec for figure in drawn.figures], allow_nan=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("law", ["laplace", "student_t", "uniform"])
def test_laws(visit: Visit, collected: Path, law: str):
    at = visit(collected, "tensor", view="law", law=law, quant_type="mxfp4")
    assert charts(at) == 2


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


def test_a_tensor_outside_the_filter_is_not_replaced_by_another(visit: Visit, collected: Path):
    asked = first(collected, quant_type=["hifp8"])
    at = visit(collected, "tensor", tensor=asked, quant_type="mxfp4")
    assert at.session_state["tensor"] == asked and charts(at) == 0
    assert f"The tensor {asked} does not match the filter: quant type mxfp4." in words(at)
    (worst,) = [button for button in at.button if button.label == "Show the worst tensor of the filter"]
    worst.click()
    at.run()
    shown = at.session_state["tensor"]
    with Catalog.open(collected) as catalog:
        assert shown in catalog.tensors(Filter(quant_type=["mxfp4"]))["tensor_id"].tolist()
    assert "tensor" not in address(at) and charts(at) and not at.exception
    at = visit(collected, "tensor", tensor=asked, quant_type="mxfp4")
    at.button(key="offer_to_clear").click()
    at.run()
    assert at.session_state["tensor"] == asked and charts(at) and "quant_type" not in at.query_params


def test_a_format_that_does_not_exist_is_refused_and_the_page_stays(visit: Visit, collected: Path):
    at = visit(collected, "map", format="mxfp8")
    box = at.selectbox(key="filter_format")
    box.options.append("mxfp99")  # as typed
    box.set_value("mxfp99")
    at.run()
    assert [toast.value for toast in at.toast] == [plain("There is no format 'mxfp99'.")]
    (box,) = [box for box in at.selectbox if box.label == "Format"]
    assert box.value == "mxfp8" and at.query_params["format"] in ("mxfp8", ["mxfp8"])
    assert not at.error and not at.exception


def test_what_a_browser_sends_before_it_has_drawn_a_new_value_is_no_choice(visit: Visit, collected: Path):
    """A link has changed the format, and the browser asks for something else with the box that it still shows."""
    at = visit(collected, "explore", layer_index="1")
    before = at._tree
    for box in at.selectbox:
        box.set_value(box.value)  # what the browser shows and sends
    assert "format" in str(at.query_params["resolved"])  # the view leaves it open
    at.query_params["format"], at.query_params["resolved"] = "mxfp8", []
    at.run()
    assert [box.value for box in at.selectbox if box.label == "Format"] == ["mxfp8"]
    at._tree = before
    at.run()
    assert at.query_params["format"] in ("mxfp8", ["mxfp8"]) and not at.exception
    (box,) = [box for box in at.selectbox if box.label == "Format"]
    assert box.value == "mxfp8"
    box.select("mxfp4").run()  # a choice of the user still is one
    assert at.query_params["format"] in ("mxfp4", ["mxfp4"])


def test_values_that_were_not_kept(visit: Visit, tmp_path: Path):
    roots.record(tmp_path, [roots.odd_tensors()["some NaN"]], max_bytes=0)
    at = visit(tmp_path, "tensor")
    assert "were not kept" in at.info[0].value


@pytest.mark.sampled(1)
@pytest.mark.parametrize("of", ["cost", "gradients"])
def test_recipes(visit: Visit, collected: Path, of: str):
    at = visit(collected, "recipes", of=of)
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", ["map", "runs", "recipes", "cost", "collect"])
def test_damaged_runs_break_no_page(visit: Visit, damaged_root: Path, page: str):
    at = visit(damaged_root, page)
    assert page == "collect" or "capture_every" in words(at) + str([text.value for text in at.text])


def test_recipes_without_a_reference(visit: Visit, odd_root: Path):
    assert "None of these runs was quantized" in visit(odd_root, "recipes").info[0].value


def test_sql(visit: Visit, collected: Path):
    at = visit(collected, "sql", q="SELECT recipe FROM run ORDER BY recipe")
    assert at.dataframe[-1].value["recipe"].tolist() == ["bf16", "hifp8", "mxfp4", "mxfp8"]
    assert "only SELECT" in visit(collected, "sql", q="DROP TABLE run").error[0].value


@pytest.mark.parametrize(
    ("page", "query", "named"),
    [
        ("runs", {"view": "loss"}, "Runs has no part 'loss'."),
        ("runs", {"view": "predictions"}, "Runs has no part 'predictions'."),
        ("map", {"metric": "loss_change"}, "metric 'loss_change', which does not exist"),
        ("map", {"view": "map", "device": "B200"}, "'device'"),
    ],
    ids=["loss", "predictions", "color", "device"],
)
def test_an_address_of_what_earlier_versions_had_is_said_in_one_line(
    visit: Visit, collected: Path, page: str, query: dict[str, str], named: str
):
    at = visit(collected, page, **query)
    said = [each.value.replace("\\", "") for each in (*at.error, *at.warning)]
    assert not at.exception and len([each for each in said if named in each]) == 1, said
