"""Twin steps as colors of the Map: the numbers of the file, and only sentences that an estimate supports."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from scipy.stats import t

from binade.app.draw.figure import Drawn, Table
from binade.app.measures.twin_step import of_step
from binade.app.questions.map.question import MAP
from binade.data.index.catalog import Catalog
from binade.data.run.directory import list_runs
from binade.data.run.evaluations import GradientTwin, Twin, read_twins
from binade.data.run.experiment import EXPERIMENT
from binade.data.words.filter import Filter
from tests.app.planted import drawn
from tests.data.builder import make_run
from tests.data.experiments import add_evaluations

SMALL = (
    "--micro-batch-size",
    "1",
    "--sequence-length",
    "32",
    "--backend",
    "torch",
    "--scores",
    "",
    "--tensors",
    "input",
)


def gradient(
    layer: int | None, module: str | None, bias: float, noise: float = 0.0, error: float = 0.0
) -> GradientTwin:
    name = "step" if layer is None else f"layers.{layer}.{module}"
    raw = math.sqrt(bias**2 + noise**2 / 8)
    return GradientTwin(name, layer, module, None, 1.0, raw, bias, error, noise**2, noise**2 / 20, 0.9)


def step(*rows: GradientTwin, changes: tuple[float, ...] = (0.25,), iteration: int = 0) -> Twin:
    return Twin(iteration, 5.0, changes, len(changes) > 1, (gradient(None, None, 0.2), *rows))


def answer(root: Path, *steps: Twin, **query: str) -> Drawn:
    """The Map with the bias as its color, of a run with an fc1 and an fc2 in each of two layers."""
    places = [(layer, module) for layer in (1, 2) for module in ("fc1", "fc2")]
    made = {"format": "mxfp4", "quant_type": "mxfp4"}
    tensors = [(torch.randn(32, 64), made | {"layer_index": at, "module": module}) for at, module in places]
    run = make_run(root, tensors)
    for each in steps:
        add_evaluations(run.directory, each)
    with Catalog.open(root) as catalog:
        return drawn(MAP, catalog, Filter(), **{"metric": "twin_bias"} | query)


def values(found: Drawn) -> dict[tuple[int, str], float]:
    table = found.get("map").table
    assert set(table["gemm"]) == {"wgrad"} and set(table["tensor"]) == {"grad_weight"}
    return dict(zip(zip(table["layer_index"], table["product"], strict=True), table["value"], strict=True))


def note(found: Drawn) -> str:
    return next(item.note for item in found.items if isinstance(item, Table) and item.name == "twin")


def test_without_a_twin_step_the_map_says_how_to_record_one(tmp_path: Path):
    (problem,) = answer(tmp_path).problems
    assert "--twin 16" in problem and "recorder.twin" in problem and "Compared with on the page Tensor" in problem


def test_a_cell_is_the_bias_of_its_gradient(tmp_path: Path):
    exact = step(gradient(1, "fc1", 0.1), gradient(1, "fc2", 0.25), gradient(2, "fc1", 0.3))
    found = answer(tmp_path / "exact", exact)
    assert values(found) == {(1, "fc1"): 0.1, (1, "fc2"): 0.25, (2, "fc1"): 0.3}
    assert found.get("map").table[["low", "high"]].isna().all(axis=None)
    assert "changes the loss by +0.25." in note(found) and "relative error of 20%." in note(found)
    assert "Highest median Bias of the gradient: fc2 grad weight, 25%" in found.verdict
    noisy = [gradient(1, "fc1", 0.28, 0.5, 0.02), gradient(2, "fc1", 0.3, 0.5, 0.02)]
    twin = step(*noisy, changes=tuple(0.1 * n for n in range(8)))
    cells = answer(tmp_path / "noisy", twin).get("map").table
    margin = t.ppf(0.975, 3) * 0.02  # of 4 pairs of passes
    assert cells["value"].tolist() == [0.28, 0.3]
    assert cells["low"].tolist() == pytest.approx([0.28 - margin, 0.3 - margin])
    assert cells["high"].tolist() == pytest.approx([0.28 + margin, 0.3 + margin])
    noise = answer(tmp_path / "noise", twin, metric="twin_noise").get("map").table
    assert noise["value"].tolist() == pytest.approx([0.5, 0.5])
    error = t.ppf(0.975, 6) * (0.5**2 / 20) / (2 * 0.5)  # 8 passes have 7 independent differences
    assert (noise["high"] - noise["value"]).tolist() == pytest.approx([error, error])


def test_the_change_of_the_loss_has_a_t_interval(tmp_path: Path):
    changes = (0.1, 0.3, 0.2, 0.4)
    found = answer(tmp_path, step(gradient(1, "fc1", 0.1, 0.5, 0.02), changes=changes))
    mean, deviation = torch.tensor(changes).mean().item(), torch.tensor(changes).std().item()
    margin = t.ppf(0.975, 3) * deviation / 2
    low, high = (f"{value:+.3g}".replace("-", "−") for value in (mean - margin, mean + margin))
    assert f"+0.25 (95% interval {low} to {high}, 4 passes)" in note(found)


def test_one_pass_is_not_split(tmp_path: Path):
    row = GradientTwin("step", None, None, None, 1.0, 0.5, cosine=0.9)
    rows = row, replace(row, layer_index=1, name="layer1"), replace(row, layer_index=1, module="fc1", name="fc1")
    found = answer(tmp_path, Twin(0, 5.0, (0.25,), True, rows))
    assert "One pass does not separate bias from variance" in note(found) and "1 pass: no interval" in note(found)
    assert values(found) == {(1, "fc1"): 0.5} and found.get("map").table["high"].isna().all()


def test_the_iteration_is_that_of_the_map_else_the_last(tmp_path: Path):
    run = make_run(
        tmp_path, [(torch.randn(32, 64), {"layer_index": 1, "module": "fc1", "iteration": at}) for at in (0, 3)]
    )
    for iteration, bias in ((0, 0.1), (3, 0.2), (7, 0.3)):
        add_evaluations(run.directory, step(gradient(1, "fc1", bias), iteration=iteration))
    with Catalog.open(tmp_path) as catalog:
        for at, bias in ((0, 0.1), (3, 0.2)):
            found = drawn(MAP, catalog, Filter(iteration=(at,)), metric="twin_bias")
            assert values(found) == {(1, "fc1"): bias}
            assert f"iteration {at}" in next(item.title for item in found.items if item.name == "twin")
        every = drawn(MAP, catalog, Filter(), metric="twin_bias", across="iteration").get("map").table
        assert dict(zip(every["iteration"], every["value"], strict=True)) == {0: 0.1, 3: 0.2}  # 7 has no tensors
        of_cell = drawn(MAP, catalog, metric="twin_bias", across="iteration", cell="wgrad/fc1/grad_weight/0")
        assert "iteration 0" in next(item.title for item in of_cell.items if item.name == "twin")
    shutil.rmtree(run.directory / EXPERIMENT)
    add_evaluations(run.directory, step(gradient(1, "fc1", 0.3), iteration=7))
    with Catalog.open(tmp_path) as catalog:
        assert values(drawn(MAP, catalog, metric="twin_bias")) == {(1, "fc1"): 0.3}


def test_experts_together_have_their_median(tmp_path: Path):
    places = [{"layer_index": 1, "module": "fc1", "expert": expert} for expert in range(3)]
    run = make_run(tmp_path, [(torch.randn(32, 64), place) for place in places])
    rows = [replace(gradient(1, "fc1", 0.1 * (1 + n)), expert=n, name=f"fc1.{n}.weight") for n in range(3)]
    rows.append(replace(gradient(1, "fc1", 0.9), expert=1, name="fc1.1.bias"))  # no operand of a GEMM
    add_evaluations(run.directory, step(*rows))
    with Catalog.open(tmp_path) as catalog:
        ids = catalog.tensors(order_by="expert")["tensor_id"].tolist()
        (cell,) = drawn(MAP, catalog, metric="twin_bias").get("map").table.to_dict("records")
        each = drawn(MAP, catalog, metric="twin_bias", experts="fc1").get("map").table
    assert cell["value"] == pytest.approx(0.2) and cell["tensors"] == 3 and cell["tensor_id"] == ids[2]
    assert each.sort_values("expert")["value"].tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_what_is_not_finite_has_no_value(tmp_path: Path):
    row = GradientTwin("step", None, None, None, math.nan)
    rows = row, replace(row, layer_index=1, name="layer1"), replace(row, layer_index=1, module="fc1", name="fc1")
    twin = Twin(0, math.nan, (math.nan,), False, rows)
    assert "unknown" in of_step(twin)
    found = answer(tmp_path, twin)
    assert not found.figures and "not known for any of these tensors" in found.problems[0]


def test_a_pass_that_overflows_is_reported(tmp_path: Path):
    """The gradient without the recipe is finite: nothing is said to be wrong with the micro-batch."""
    lost = [replace(gradient(2, "fc1", 0.1), bias=math.nan, bias_corrected=math.nan, variance=None, cosine=math.nan)]
    lost += [replace(lost[0], name="step", layer_index=None, module=None), gradient(1, "fc1", 0.1, 0.5, 0.02)]
    twin = Twin(0, 5.0, (0.1, math.inf, 0.2, 0.3), True, (lost[1], lost[0], lost[2]))
    found = answer(tmp_path, twin)
    assert note(found).startswith(
        "With the recipe, the loss is not finite in 1 of 4 passes. "
        "The gradients of 1 of 2 parameters are not finite with the recipe: L2 fc1."
    )
    assert found.tables["twin"]["cosine"].isna().tolist() == [True, True, False]
    assert "NaN or Inf" in found.verdict
    labels = found.get("map").table.set_index("layer_index")["label"]
    assert labels[2] == "NaN or Inf" and labels[1] == "10%"


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["linear_mxfp4", "nvidia_nvfp4(without=keep)"])
def test_a_real_run(command: Callable[..., int], tmp_path: Path, recipe: str):
    assert command("run", *SMALL, "--quantization", recipe, "--twin", "4") == 0
    ((run,), _) = list_runs(tmp_path / "runs")
    (twin,) = read_twins(run.directory)
    record = asdict(twin)
    with Catalog.open(tmp_path / "runs") as catalog:
        found = drawn(MAP, catalog, metric="twin_bias")
    whole, *rows = record["gradients"]
    draws = len(record["changes"]) > 1
    name, column = ("bias", "bias") if draws else ("relative error", "error")
    assert f"{name} of {whole['bias_corrected'] * 100:.3g}%" in note(found)
    assert ("√variance" in note(found)) == (len(record["changes"]) == 4)
    table = found.tables["twin"]
    named = [row for row in rows if row["module"] or row["layer_index"]]
    assert table["parameter"].tolist() == ["step", *(row["name"] for row in rows)] and len(named) > 10
    assert table[column].tolist() == pytest.approx([row["bias_corrected"] * 100 for row in (whole, *rows)])
    assert table["cosine"].tolist() == pytest.approx([row["cosine"] for row in (whole, *rows)])
    if draws:
        noises = [math.sqrt(row["variance"]) * 100 for row in (whole, *rows)]
        assert table["noise"].tolist() == pytest.approx(noises)
        random = table[table["noise"] > 0]
        assert random["noise"].between(random["noise_low"], random["noise_high"]).all() and len(random) > 10
    cells = {(row["layer_index"], row["module"]): row["bias_corrected"] for row in rows if row["module"]}
    shown = values(found)
    assert shown == pytest.approx({place: cells[place] for place in shown}) and len(shown) == 8
