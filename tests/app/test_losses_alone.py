"""Runs that have losses and no tensors: pages, links, the report and the export show them; another unit is said."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from binade.app.frame.palette import find
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE, IMPORT, describe_run
from binade.data.run.run_writer import RunWriter
from binade.data.words.filter import Filter
from tests.app.test_runs_page import cells_of
from tests.compared import gaps_of, printed

pytestmark = pytest.mark.slow
Visit = Callable[..., AppTest]


def add(root: Path, recipe: str | None, losses: list[float], **config: object) -> str:
    """As an import of a loss log writes it."""
    known = {"kind": IMPORT, "recipe": recipe, "model": "m", "dataset": "d", "seed": 1, "loss_column": "loss"}
    run = RunWriter.create(root, f"import_{recipe or 'own'}", known | config)
    for at, loss in enumerate(losses):
        run.append_loss({"iteration": at, "loss": loss if math.isfinite(loss) else None})
    finite = [loss for loss in losses if math.isfinite(loss)]
    run.update(loss_first=finite[0], loss_last=finite[-1])
    run.finish(DONE)
    return run.run_id


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("losses") / "runs"
    add(root, "bf16", [4 - at / 20 for at in range(40)])
    add(root, "mxfp8", [4.1 - at / 20 for at in range(40)])
    add(root, "nvfp4", [4.0001 - at / 20 for at in range(10)] + [math.nan] * 30)
    add(root, None, [4.2 - at / 20 for at in range(40)])
    return root


def ids(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


@pytest.mark.parametrize("page", [("runs", "table"), ("runs", "recipes"), ("explore", "explore"), ("map", "map")])
def test_links_to_runs_without_tensors_are_understood(root: Path, page: tuple[str, str]):
    with Catalog.open(root) as opened:
        reading = View(page[0], {"view": [page[1]], "run_id": ids(root)}).read(opened)
        assert set(reading.where.run_id) == set(ids(root)) and not reading.problems and not reading.gone


def test_their_losses_are_drawn_and_end_where_they_diverge(root: Path):
    with Catalog.open(root) as opened:
        for view in (View("runs"), View("runs", {"run_id": ids(root)})):
            drawn = view.draw(opened)
            table = drawn.get("losses").table
            assert table["group"].nunique() == 4  # also the one without a recipe
            last = table.dropna(subset="loss").groupby("group")["iteration"].max()
            assert last["nvfp4"] == 9 and last.drop("nvfp4").eq(39).all()
            assert "Diverged: nvfp4 at iteration 10." in drawn.verdict
        named = View("runs", {"recipe": ["bf16", "mxfp8", "nvfp4"]}).draw(opened).get("losses").spec
        strokes = [layer for layer in named["layer"] if layer["mark"]["type"] == "rule" and "y2" in layer["encoding"]]
        names = [layer for layer in named["layer"] if layer["mark"]["type"] == "text"]
        groups = [{row["group"] for row in named["datasets"][layer["data"]["name"]]} for layer in (*strokes, *names)]
        assert groups == [{"bf16", "mxfp8"}, {"bf16", "mxfp8"}, {"nvfp4"}]  # no stroke from where nvfp4 ends
        one = View("runs", {"recipe": ["mxfp8"]}).draw(opened)
        assert set(one.get("losses").table["group"]) == {"mxfp8", "bf16"}  # bf16 is drawn with what is chosen
        assert View("runs", {"layer_index": ["1"]}).read(opened).gone  # a field of tensors


def test_the_palette_opens_them_among_the_runs(root: Path):
    with Catalog.open(root) as opened:
        shown = [entry for entry in find(opened, View("map"), "nvfp4") if entry.kind == "run"]
        assert shown and all(entry.view.page == "runs" for entry in shown)


def test_a_report_of_losses_alone(command: Callable[..., int], root: Path, tmp_path: Path):
    where = ("--tensor-save-dir", str(root))
    assert command("report", *where, "--output", str(tmp_path / "report")) == 0
    html = (tmp_path / "report/index.html").read_text()
    assert "diverged at iteration 10" in html and all(run in html for run in ids(root))
    assert json.loads((tmp_path / "report/tensor_stats.json").read_text())["totals"]["tensors"] == 0
    assert command("report", *where, "--recipe", "mxfp4", "--output", str(tmp_path / "other")) == 1


def test_an_export_keeps_losses_that_are_not_finite(command: Callable[..., int], root: Path, tmp_path: Path):
    assert command("export", "--tensor-save-dir", str(root), "--to", "csv", "--output", str(tmp_path / "csv")) == 0
    (nvfp4,) = tmp_path.glob("csv/*nvfp4*/values.csv")
    rows = list(csv.DictReader(nvfp4.open()))
    assert [int(row["iteration"]) for row in rows] == list(range(40))
    assert [math.isnan(float(row["value"])) for row in rows] == [False] * 10 + [True] * 30


@pytest.mark.parametrize("unit", ["unknown", "bits per byte", None])
def test_losses_in_another_unit_are_drawn_and_not_compared(visit: Visit, tmp_path: Path, unit: str | None):
    runs = {recipe: add(tmp_path, recipe, [loss, -loss]) for recipe, loss in (("bf16", 0.01), ("mxfp8", 0.02))}
    assert gaps_of(tmp_path) == pytest.approx({"mxfp8": 0.0})
    for run in runs.values():
        describe_run(tmp_path / run, {"loss_unit": unit})
    assert gaps_of(tmp_path) == {}
    said = f"Losses that are not known to be in nats per token are not compared: bf16 and mxfp8 ({unit})."
    said = said if unit == "bits per byte" else said.replace(f"({unit})", "(unit unknown)")
    assert said in printed(tmp_path) and printed(tmp_path).count("are not compared") == 1
    with Catalog.open(tmp_path) as opened:
        drawn = View("runs").draw(opened)
        axis = json.dumps(drawn.get("losses").spec)
        assert "loss (bits per byte)" in axis if unit == "bits per byte" else "loss (unit unknown)" in axis
        assert said in drawn.problems and "Diverged" not in drawn.verdict
        assert View("runs", {"view": ["recipes"]}).draw(opened).problems == (said,)
    assert not visit(tmp_path, "runs").exception
    with Catalog.open(tmp_path) as opened:
        for cells in cells_of(opened).values():
            assert "gap" not in cells and cells["unit"] == [unit or "unknown"] and "loss" in cells
    mixed = add(tmp_path, "bf16", [5.0, 4.0]), add(tmp_path, "nvfp4", [5.5, 4.5])
    assert gaps_of(tmp_path) == pytest.approx({"nvfp4": 0.5}) and said.split(":")[1][1:6] in printed(tmp_path)
    with Catalog.open(tmp_path) as opened:
        assert Filter(run_id=mixed).run_id and "nvfp4" in str(View("runs").draw(opened).get("losses").table["group"])
