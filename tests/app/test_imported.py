"""Pages over tensors that another tool logged: unknown words stay blank, corrections are told, all of it as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from streamlit.testing.v1 import AppTest

from binade.app.pages.registry import PAGES
from binade.app.view.view import View
from binade.collector import Recorder
from binade.collector.capture.clock import Moment
from binade.collector.imports import importer
from binade.collector.imports.files import walk
from binade.collector.imports.importer import import_logs
from binade.collector.imports.losses import find_logs, import_trainings, read_logs
from binade.collector.imports.readers.series import Columns
from binade.collector.models.site import Site
from binade.data.compare.difference import difference
from binade.data.index.catalog import Catalog
from binade.data.run.directory import list_runs
from tests.app.test_pages import Visit, charts, chips, listed
from tests.collector.logs_made import read_here, tensor, write
from tests.collector.statistics_made import LAYERS, ms_calls, ms_tensors, write_msprobe, write_te

pytestmark = pytest.mark.slow

IMAGE = "<img src=x onerror=alert(1)>"
LINK = "[click](javascript:alert(1))"
MISLABELLED = (
    "mxfp8/20250923_100149_0001_iter000_attention_L3_forward_pre_attention_mxfp8_rank00_group000_attention_probs.pt"
)
GRADIENT = "mxfp8/20250912_101010_0002_iter000_linear_L1_backward_pre_linear_mxfp8_rank00_sample000_group000_input.pt"
AFTER = "20250912_101010_0003_iter000_linear_L1_forward_pre_linear_mxfp_fp8_e4m3_quantized_rank00_group000_input.pt"
BARE = "debug_tensors/iter_1/fwd_in_1.pt"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of every kind and a hostile one, in a directory whose name is Markdown and HTML."""
    base = tmp_path_factory.mktemp("imported")
    logs = base / f"{LINK.replace('/', '')} **bold** {IMAGE}"
    write(logs / MISLABELLED, tensor(0, 1, 2, 8, 32), {})
    write(logs / GRADIENT, tensor(1), {"tensor_name": "input"})
    write(logs / AFTER, tensor(2), {})
    write(logs / BARE, tensor(3))
    hostile = {"tensor_name": IMAGE, "module": LINK, "quant_type": "www.evil.example", "layer_idx": "1; DROP TABLE run"}
    write(logs / "hostile.pt", tensor(4), hostile | {"layer_type": "x" * 1_000_000})
    np.save(logs / f"{IMAGE}.npy", np.ones((4, 32), np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importer, "scatter", read_here)
        import_logs(logs, base / "runs", scores=("mxfp4",), workers=1, say=lambda line: None)
    return base / "runs"


def row_of(root: Path, end: str) -> pd.Series:
    with Catalog.open(root) as catalog:
        rows = catalog.tensors()
    return rows[rows["path"].str.endswith(end)].iloc[0]


def card(visit: Visit, root: Path, end: str, **query: str) -> tuple[AppTest, list[str], pd.Series]:
    """The tensor's page, the sentences of its card, and its words."""
    at = visit(root, "tensor", tensor=row_of(root, end)["tensor_id"], **query)
    return at, [line for element in at.text for line in element.value.split("\n")], at.dataframe[0].value.iloc[0]


def interpreted(at: AppTest) -> list[str]:
    """All that a page gives to Streamlit as Markdown or HTML."""
    kinds = ("title", "subheader", "header", "caption", "markdown", "info", "warning", "error", "success", "html")
    found = [str(element.value) for kind in kinds for element in at.get(kind)]
    return found + [str(element.label) for element in at.get("expander")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("end", "said", "name"),
    [
        (MISLABELLED, "actually the query", "query"),
        (GRADIENT, "the gradient of the operation's output", "grad_output"),
    ],
    ids=["query", "grad_output"],
)
def test_a_correction_is_told_on_the_card(visit: Visit, imported: Path, end: str, said: str, name: str):
    at, sentences, words = card(visit, imported, end)
    assert any(said in sentence for sentence in sentences)
    assert words["Tensor"] == name and not at.exception


def test_unknown_words_are_blank(visit: Visit, imported: Path):
    _, sentences, words = card(visit, imported, BARE)
    assert words["Tensor"] == "input" and words["Iteration"] == 1
    assert words[["Layer", "Module", "Quant type", "Rank", "Micro-batch", "Logged at"]].isna().all()
    assert "Not recorded: quant type, layer type, layer, module, component, micro-batch, rank." in sentences


def test_before_and_after_quantization_are_told_apart(visit: Visit, imported: Path):
    at, sentences, words = card(visit, imported, AFTER, stage="after")
    assert chips(at) == ["Stage: after"]
    assert "Its log spells the quant type mxfp_fp8_e4m3_quantized." in sentences
    assert words["Quant type"] == "mxfp8" and words["Stage"] == "after"
    assert len(at.selectbox(key="tensor").options) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("end", ["hostile.pt", f"{IMAGE}.npy"])
@pytest.mark.parametrize("view", PAGES["tensor"].parts)
def test_what_a_log_says_is_text(visit: Visit, imported: Path, end: str, view: str):
    at, sentences, words = card(visit, imported, end, view=view)
    told = "\n".join(interpreted(at))
    for hostile in (IMAGE, LINK, "www.evil.example", "DROP TABLE", "**bold**"):
        assert hostile not in told
    assert any(IMAGE in sentence for sentence in sentences)  # the file's path, as text
    assert pd.isna(words["Layer"]) and max(map(len, sentences)) <= 1000


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("page", "view"), [("map", "map"), ("explore", "explore"), ("runs", "recipes"), ("runs", "table")]
)
def test_pages_over_imports_alone(visit: Visit, imported: Path, page: str, view: str):
    told = "\n".join(interpreted(visit(imported, page, view=view)))
    assert IMAGE not in told and LINK not in told and "www.evil.example" not in told


@pytest.mark.parametrize("view", [None, "recipes", "difference"])
def test_losses_of_an_unknown_recipe(visit: Visit, tmp_path: Path, view: str):
    log = tmp_path / "main.log"
    log.write_text("".join(f"s:{step} trl:{5 - step / 10} lr:0.1\n" for step in range(1, 21)))
    import_log(log, tmp_path / "runs", Columns(), recipe=None, start=dict.fromkeys(("model", "dataset", "seed")))
    at = visit(tmp_path / "runs", "runs", **({"view": view} if view else {}))
    assert not at.exception
    assert view or [cells["origin"][1].endswith("main.log") for cells in listed(at).values()] == [True]


def test_runs_name_the_directory(visit: Visit, imported: Path):
    at = visit(imported, "runs")
    (run,) = listed(at).values()
    assert run["state"][0] == "✓ done" and run["origin"][1].endswith(IMAGE)
    assert "seconds" not in run and run["tensors"][1] == 6


def import_log(path: Path, root: Path, columns: Columns, **settings: Any) -> None:
    import_trainings(read_logs(find_logs(walk(path, root)), columns).trainings, root, **settings)


def test_imported_losses_are_compared_with_their_bf16_run(visit: Visit, tmp_path: Path):
    start: dict[str, str | int | None] = {"model": IMAGE, "dataset": LINK, "seed": 1}
    for recipe, gap in (("bf16", 0.0), ("mxfp8", 0.25), ("my recipe", 0.5)):
        log = tmp_path / f"{recipe}.csv"
        pd.DataFrame({"step": range(1, 21), "loss": [20 / step + gap for step in range(1, 21)]}).to_csv(
            log, index=False
        )
        import_log(log, tmp_path / "runs", Columns(), recipe=recipe, start=start)
    import_log(log, tmp_path / "runs", Columns(loss="step"), recipe="mxfp4", start={})
    at = visit(tmp_path / "runs", "runs")
    with Catalog.open(tmp_path / "runs") as catalog:
        recipes = catalog.runs().set_index("run_id")["recipe"]
    cells = {recipes[run_id]: own for run_id, own in listed(at).items()}
    gaps = {recipe: round(own["gap"][1], 9) for recipe, own in cells.items() if "gap" in own}
    assert not at.exception and gaps == {"mxfp8": 0.25, "my recipe": 0.5}
    assert all(own["origin"][1].endswith(".csv") and len(own["course"][0]) == 20 for own in cells.values())
    told = "\n".join(interpreted(at))
    at = visit(tmp_path / "runs", "runs", view="recipes")
    costs = at.dataframe[0].value.set_index("label")
    assert not at.exception and costs["gap"].round(9).to_dict() == {"mxfp8": 0.25, "my recipe": 0.5}
    assert not {"linear", "QK", "PV", "router"} & set(costs.columns)  # nobody knows what was rounded
    told += "\n".join(interpreted(at))
    assert "no bf16 run saw the same data\\: mxfp4" in told and IMAGE not in told and LINK not in told


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics without values, as Transformer Engine and msprobe log them."""
    base = tmp_path_factory.mktemp("logged")
    write_te(
        base / "te", {(layer, "activation", i): tensor(i, dtype=torch.float32) for layer in LAYERS for i in (1, 2)}
    )
    write_te(
        base / "again", {(layer, "activation", 1): tensor(i, dtype=torch.float32) for i, layer in enumerate(LAYERS)}
    )
    write_msprobe(base / "ms", ms_calls(ms_tensors(torch.bfloat16)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importer, "scatter", read_here)
        for logs in ("te", "again", "ms"):
            import_logs(base / logs, base / "runs", workers=1, say=lambda line: None)
    return base / "runs"


def of_tool(root: Path, tool: str) -> pd.Series:
    with Catalog.open(root) as catalog:
        rows = catalog.tensors()
    return rows[(rows["source_version"] == tool) & (rows["tensor_name"] == "input")].iloc[0]


TOOLS = ("TransformerEngine", "msprobe")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("view", PAGES["tensor"].parts)
def test_a_tensor_without_values_says_so(visit: Visit, logged: Path, tool: str, view: str):
    row = of_tool(logged, tool)
    at = visit(logged, "tensor", tensor=row["tensor_id"], view=view)
    assert not at.exception and any("only statistics" in element.value for element in (*at.info, *at.warning))
    assert any("it has statistics and no values" in element.value for element in at.text)
    assert not charts(at)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("metric", "answer"),
    [("absmax", ""), ("kurtosis", "is not known for any of these tensors"), ("sqnr_db", "No operand is scored")],
)
def test_the_map_of_logged_statistics(visit: Visit, logged: Path, tool: str, metric: str, answer: str):
    row = of_tool(logged, tool)
    at = visit(logged, "map", run_id=row["run_id"], metric=metric)
    assert not at.exception and (not answer or any(answer in line for line in interpreted(at)))
    if not answer:  # the component draws it
        with Catalog.open(logged) as catalog:
            view = View("map", {"run_id": [row["run_id"]], "metric": [metric]})
            assert "edian absmax" in view.draw(catalog).verdict
        cell = f"forward/{row['module']}/input/{row['layer_index']}"
        assert not visit(logged, "map", run_id=row["run_id"], metric=metric, cell=cell).exception


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("metric", ["gradient_to_noise", "oscillating", "outlier_persistence", "block_sqnr_db"])
def test_comparing_logged_statistics(visit: Visit, logged: Path, tool: str, metric: str):
    assert not visit(logged, "map", metric=metric, run_id=of_tool(logged, tool)["run_id"]).exception


def test_the_difference_of_logged_statistics(logged: Path):
    first, second = (run for run in list_runs(logged)[0] if run.config["source"].endswith(("te", "again")))
    found = difference(first, second)
    assert [row.by for row in found.rows] == ["statistics"] * 2 and not found.incomplete
    assert [row.equal for row in found.rows] == [False, True]  # the second layer has the tensor of seed 1 in both
    assert 0 < found.rows[0].difference < 10 and found.rows[1].difference == 0


def test_recomputed_is_told(visit: Visit, tmp_path: Path):
    with Recorder(tmp_path, config={"recipe": "bf16"}) as recorder:
        for layer in (1, 2):
            recorder.record("input", torch.randn(8, 32), layer=layer, module="fc1", operation="forward", phase="pre")
        recorder.observing.measurer.drafts.recomputed.add((Site(2, "fc1"), Moment(0, 0, True)))
    run_id = recorder.writer.run_id
    told = [[t.value for t in visit(tmp_path, "tensor", tensor=f"{run_id}/r00-00000{n}").text] for n in (1, 2)]
    assert told[0] == [] and len(told[1]) == 1 and told[1][0].startswith("Recomputed:")
