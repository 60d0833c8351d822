"""Surfaces of layer by iteration, against pandas on the rows of the tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from binade import plots
from binade.app.questions.surfaces import compute
from binade.app.style import MEASURES
from binade.data.catalog import Catalog, CatalogError
from binade.data.events import Event, EventKind, append_event
from binade.data.filter import Filter
from tests.data.builder import make_run

FIRST, SECOND = range(0, 24, 4), range(0, 32, 8)  # the iterations of the two runs


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root, random = tmp_path_factory.mktemp("surfaces"), torch.Generator().manual_seed(0)
    for label, iterations in (("a", FIRST), ("b", SECOND)):
        tensors = [
            (
                torch.randn(8, 64, generator=random) * (iteration + layer),
                {"layer_index": layer, "iteration": iteration, "micro_batch": part, "format": "mxfp4", "raw": False},
            )
            for iteration in iterations
            for layer in (1, 2, 3)
            for part in (0, 1)
        ]
        run = make_run(root, tensors, label=label)
        append_event(run.directory, Event(EventKind.TRIGGER, 8, "SQNR is low", "t"))
    return root


@pytest.fixture
def catalog(root):
    with Catalog.open(root) as opened:
        yield opened


@pytest.mark.parametrize(("metric", "fmt"), [("sqnr_db", ""), ("sqnr_db", "hifp8"), ("rms", ""), ("crest_factor", "")])
@pytest.mark.parametrize("width", [1, 4, 10])
def test_a_cell_has_the_worst_of_its_tensors(catalog: Catalog, metric: str, fmt: str, width: int):
    rows = catalog.tensors()
    if fmt:
        scores = catalog.scores()
        rows = rows.drop(columns="sqnr_db").merge(scores.loc[scores["format"] == fmt, ["tensor_id", "sqnr_db"]])
    rows = rows.assign(crest_factor=rows["absmax"] / rows["rms"], iteration=rows["iteration"] // width * width)
    groups = rows.groupby(["run_id", "layer_index", "iteration"])[metric]
    expected = rows.loc[groups.idxmin() if metric == "sqnr_db" else groups.idxmax()]
    found = catalog.surface(metric, width, fmt=fmt)
    assert found["tensor_id"].tolist() == expected["tensor_id"].tolist()
    assert found["value"].tolist() == expected[metric].tolist()
    assert found["tensors"].tolist() == groups.size().tolist()


def test_two_runs_are_compared_in_the_iterations_that_both_have(catalog: Catalog):
    run, against = catalog.runs().sort_values("run_id")["run_id"]
    where = Filter(run_id=(run, against))
    table = compute.surface(catalog, where, "absmax")
    assert set(table["iteration"]) == set(FIRST) & set(SECOND) and set(table["last"] - table["iteration"]) == {7}
    found = compute.difference(table, run, against, MEASURES["absmax"])
    rows = catalog.tensors(where)
    worst = rows.groupby(["run_id", "layer_index", "iteration"])["absmax"].max()
    expected = np.log2((worst[run] / worst[against]).dropna())
    assert found.set_index(["layer_index", "iteration"])["change"].to_dict() == pytest.approx(expected.to_dict())
    drawn = plots.surfaces(catalog, statistic="absmax", run=run, against=against)
    worse, better = ((sign * expected > np.log2(1.01)).sum() for sign in (1, -1))
    assert f"in {worse} of {len(expected)} cells, and better in {better}" in drawn.verdict


def test_cells_are_few_and_without_gaps(catalog: Catalog, monkeypatch: pytest.MonkeyPatch):
    (run, _) = sorted(catalog.runs()["run_id"])
    assert set(compute.surface(catalog, Filter(run_id=(run,)), "absmax").eval("last - iteration")) == {3}
    monkeypatch.setattr(compute, "CELLS", 6)
    monkeypatch.setattr(compute, "FEWEST_COLUMNS", 1)
    assert len(compute.surface(catalog, Filter(run_id=(run,)), "absmax")) <= 9


def test_the_figure_has_the_events_and_opens_tensors(catalog: Catalog):
    drawn = plots.surfaces(catalog, Filter(layer_index=[2]), spec="mxfp4")
    (figure,) = drawn.figures
    assert figure.choose == "tensor_id" and "Lowest SQNR" in drawn.verdict
    events = next(rows for rows in figure.spec["datasets"].values() if "kind" in rows[0])
    assert [(row["iteration"], row["kind"]) for row in events] == [(8, "trigger")]
    table = pd.DataFrame(next(rows for rows in figure.spec["datasets"].values() if "tensor_id" in rows[0]))
    assert table["tensor_id"].isin(catalog.tensors()["tensor_id"]).all() and set(table["layer"]) == {2}


def test_the_page_has_its_controls_and_a_click_opens_a_tensor(root: Path, visit):
    at = visit(root, "surfaces", statistic="absmax")
    labels = [box.label for box in at.main.get("selectbox")]
    assert labels == ["Statistic", "Tensor", "Format", "Run", "Compare with"]
    assert any("ighest absmax of" in text.value for text in at.markdown)
    at.selectbox(key="against").select_index(1).run()
    assert any("is worse than in" in text.value for text in at.markdown)


def test_what_cannot_be_drawn_is_said(catalog: Catalog):
    assert not plots.surfaces(catalog, Filter(iteration=[8])).figures
    assert plots.surfaces(catalog, Filter(iteration=[8])).problems
    with pytest.raises(CatalogError, match="median"):
        catalog.surface("median", 1)
