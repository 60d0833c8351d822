"""The page of runs: which runs it lists, and what it says of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from binade.app.questions.runs.table import data_of
from binade.app.questions.shared.runs import matching
from binade.data.index.catalog import Catalog
from binade.data.run.evaluations import HeldOut
from binade.data.words.filter import Filter
from tests.data.builder import make_run
from tests.data.experiments import add_evaluations

NO_FILTER = Filter()


def cells_of(opened: Catalog, where: Filter = NO_FILTER) -> dict[str, dict[str, Any]]:
    """The cells of the table's runs, by run_id."""
    data = data_of(opened, matching(opened, where, opened.runs(damaged=True)))
    groups = (group for workload in data["workloads"] for group in workload["groups"])
    return {run["id"]: run["cells"] for group in groups for run in group["runs"]}


def test_the_filter_chooses_runs_and_keeps_their_baseline(catalog: Catalog):
    runs = catalog.runs().set_index("recipe")["run_id"]
    whole, some = cells_of(catalog), cells_of(catalog, Filter(recipe=("mxfp4",)))
    assert list(some) == [runs["mxfp4"]] and {*whole} == {*runs}
    gap = some[runs["mxfp4"]]["gap"][1]
    assert math.isfinite(gap) and gap == whole[runs["mxfp4"]]["gap"][1]
    assert "event" not in some[runs["mxfp4"]]


def test_branches_are_listed_and_compared_on_held_out_sequences(visit: Callable[..., AppTest], tmp_path: Path):
    first = {"iteration": 0, "data_sha256": "0", "weights_sha256": None}
    parent = make_run(tmp_path, recipe="bf16", seed=1)
    branch = {"run_id": parent.run_id, "iteration": 2, "recipes": ["bf16"]}
    mxfp4 = make_run(tmp_path, recipe="mxfp4", seed=1, branch_of=branch, operands=["linear.forward.input mxfp4"])
    for run, start, gap in ((parent, 0, 0.0), (mxfp4, 2, 0.25)):
        for step in range(start, 4):
            line = {"iteration": step, "loss": 5.0 - step + gap, "time": 0.0, "data_sha256": str(step)}
            run.append_loss(line | ({"first": first} if step == start else {}))
        for step in range(start, 5):
            losses = tuple(5.0 + sequence + gap * (1 + sequence / 100) for sequence in range(8))
            add_evaluations(run.directory, HeldOut(step, losses, "held out", 1000 * (step + 1)))
    with Catalog.open(tmp_path) as opened:
        cells = cells_of(opened)[mxfp4.run_id]
    assert cells["branch"] == [f"{parent.run_id} from iteration 2"] and cells["gap"][1] == pytest.approx(0.25)
    assert not visit(tmp_path, "runs").exception
    page = visit(tmp_path, "runs", view="recipes")
    (row,) = next(each.value for each in page.dataframe if "held_out" in each.value).to_dict("records")
    assert row["gap"] == pytest.approx(0.25) and row["held_out"] == pytest.approx(0.25 * 1.035)
    assert row["held_out_at"].startswith("4 iterations (5,000 tokens")
    shown = " ".join(str(each.value) for each in (*page.markdown, *page.caption, *page.info))
    said = shown.replace("\\", "")
    assert "Held-out gap to bf16 of one seed, which another seed may change: mxfp4 +0.258" in said
    assert "differ in bits alone is unknown" in said and "loss than bf16 on held-out" not in said
