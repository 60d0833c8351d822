"""The page of a twin step: its numbers are those of the file, and its sentences only what an estimate supports."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import t

from binade.app.figure import Drawn
from binade.app.questions.drift.question import DRIFT, NO_TWIN, NOTHING
from binade.data.catalog import Catalog
from binade.data.evidence import Sentence
from binade.data.filter import Filter
from binade.data.runs import list_runs
from binade.data.twin import GradientTwin, Twin, append_twin
from tests.app.planted import drawn
from tests.app.test_claims import claims
from tests.data.builder import make_run

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


def answer(root: Path, *steps: Twin) -> Drawn:
    run = make_run(root, [(torch.randn(32, 64), {"format": "mxfp4", "quant_type": "mxfp4"})])
    for each in steps:
        append_twin(run.directory, each)
    with Catalog.open(root) as catalog:
        return drawn(DRIFT, catalog, Filter())


def test_without_a_twin_step_the_page_says_how_to_record_one(tmp_path: Path):
    found = answer(tmp_path)
    assert found.problems == (NOTHING, NO_TWIN) and "--twin" in NO_TWIN and "recorder.twin" in NO_TWIN


@pytest.mark.thorough
def test_the_largest_bias_is_named_if_it_can_be_told(tmp_path: Path):
    exact = step(gradient(1, "fc1", 0.1), gradient(1, "fc2", 0.2), gradient(2, "fc1", 0.3))
    found = answer(tmp_path / "exact", exact)
    assert "changes the loss by +0.25." in found.verdict and "relative error of 20%." in found.verdict
    assert found.verdict.endswith("Highest relative error of a parameter’s gradient: L2 fc1, 30%; lowest: L1 fc1, 10%.")
    near = [gradient(1, "fc1", 0.28, 0.5, 0.02), gradient(2, "fc1", 0.3, 0.5, 0.02), gradient(2, "fc2", 0.1, 0.5, 0.02)]
    changes = tuple(0.1 * n for n in range(8))
    found = answer(tmp_path / "near", step(*near, changes=changes))
    assert "L2 fc1 and L1 fc1, which cannot be told apart" in found.verdict
    alike = [replace(row, bias_corrected=0.3) for row in near]
    found = answer(tmp_path / "alike", step(*alike, changes=changes))
    assert "Highest" not in found.verdict and "cannot be told apart" in found.verdict


def test_the_change_of_the_loss_has_a_t_interval(tmp_path: Path):
    changes = (0.1, 0.3, 0.2, 0.4)
    found = answer(tmp_path, step(gradient(1, "fc1", 0.1, 0.5, 0.02), changes=changes))
    mean, deviation = torch.tensor(changes).mean().item(), torch.tensor(changes).std().item()
    margin = t.ppf(0.975, 3) * deviation / 2
    low, high = (f"{value:+.3g}".replace("-", "−") for value in (mean - margin, mean + margin))
    assert f"+0.25 (95% interval {low} to {high}, 4 passes)" in found.verdict
    assert not claims(found)


def test_one_pass_is_not_split(tmp_path: Path):
    row = GradientTwin("step", None, None, None, 1.0, 0.5, cosine=0.9)
    found = answer(tmp_path, Twin(0, 5.0, (0.25,), True, (row, replace(row, layer_index=1, name="layer1"))))
    assert "One pass does not separate bias from variance" in found.verdict and "Highest" not in found.verdict
    assert "1 pass: no interval" in found.verdict and not claims(found)


def test_the_iteration_is_that_of_the_tensor_else_the_last(tmp_path: Path):
    run = make_run(tmp_path, [(torch.randn(32, 64), {"iteration": 3})])
    for iteration, change in ((0, 0.5), (3, 0.25), (7, 0.75)):
        append_twin(run.directory, step(gradient(1, "fc1", 0.1), changes=(change,), iteration=iteration))
    with Catalog.open(tmp_path) as catalog:
        assert "+0.25." in drawn(DRIFT, catalog, Filter()).verdict
    (run.directory / "twin.jsonl").unlink()
    append_twin(run.directory, step(gradient(1, "fc1", 0.1), changes=(0.75,), iteration=7))
    with Catalog.open(tmp_path) as catalog:
        assert "+0.75." in drawn(DRIFT, catalog, Filter()).verdict


def test_what_is_not_finite_has_no_verdict_of_its_own(tmp_path: Path):
    row = GradientTwin("step", None, None, None, math.nan)
    found = answer(tmp_path, Twin(0, math.nan, (math.nan,), False, (row, replace(row, layer_index=1, name="layer1"))))
    assert "unknown" in found.verdict and not found.figures and len(found.tables["twin"]) == 1


def test_a_pass_that_overflows_is_reported(tmp_path: Path):
    """The gradient without the recipe is finite: nothing is said to be wrong with the micro-batch."""
    lost = [replace(gradient(2, "fc1", 0.1), bias=math.nan, bias_corrected=math.nan, variance=None, cosine=math.nan)]
    lost += [replace(lost[0], name="step", layer_index=None, module=None), gradient(1, "fc1", 0.1, 0.5, 0.02)]
    twin = Twin(0, 5.0, (0.1, math.inf, 0.2, 0.3), True, (lost[1], lost[0], lost[2]))
    found = answer(tmp_path, twin)
    assert found.verdict == (
        "With the recipe, the loss is not finite in 1 of 4 passes. "
        "The gradients of 1 of 2 parameters are not finite with the recipe: L2 fc1."
    )
    assert found.tables["twin"]["cosine"].isna().tolist() == [True, True, False]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["linear_mxfp4", "nvidia_nvfp4(without=keep)"])
def test_a_real_run(command: Callable[..., int], tmp_path: Path, recipe: str):
    assert command("run", *SMALL, "--quantization", recipe, "--twin", "4") == 0
    ((run,), _) = list_runs(tmp_path / "runs")
    record = json.loads((run.directory / "twin.jsonl").read_text())
    with Catalog.open(tmp_path / "runs") as catalog:
        found = drawn(DRIFT, catalog, Filter())
    assert isinstance(found.verdict, Sentence) and not claims(found) and not found.problems
    whole, *rows = record["gradients"]
    name, column = ("bias", "bias") if len(record["changes"]) > 1 else ("relative error", "error")
    assert f"{name} of {whole['bias_corrected'] * 100:.3g}%" in found.verdict
    assert ("√variance" in found.verdict) == (len(record["changes"]) == 4)
    table = found.tables["twin"]
    parameters = [row for row in rows if row["module"]]
    assert table["parameter"].tolist() == ["step", *(row["name"] for row in parameters)]
    assert table[column].tolist() == pytest.approx([x["bias_corrected"] * 100 for x in (whole, *parameters)])
    chart = found.get("twin").table
    layers = [row for row in rows if row["layer_index"] and not row["module"]]
    biases = {row["layer_index"]: row["bias_corrected"] * 100 for row in layers}
    shown = chart[chart["group"] == name.capitalize()].set_index("layer")["value"]
    assert shown.to_dict() == pytest.approx(biases) and len(biases) == 2
    largest = max(parameters, key=lambda row: row["bias_corrected"])
    match = re.search(rf"{name} of a parameter’s gradient: (.*)", found.verdict, re.IGNORECASE)
    assert match and largest["module"] in match[1]
