"""Parity of two recipes, against passes of their own with `instrument`, and against a planted cause."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from binade.collector import instrument
from binade.collector.errors import ConfigError
from binade.collector.experiment.evaluator import evaluator_of
from binade.collector.recipes.files import from_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Recipe
from binade.data.run.directory import list_runs
from binade.data.run.experiment import EffectGroup, experiment_files
from binade.data.run.parity_results import Gap, read_parity
from tests.collector.cli.test_cli import one_line
from tests.collector.experiment.policies import gaps
from tests.collector.small_model import batch, build

LAYERS = 3
PLANTED = "[linear]\nforward = 'mxfp8'\n" + "".join(
    f"[modules.'layer2.{module}']\nforward = 'mxfp4'\n" for module in ("qkv", "proj", "fc1", "fc2")
)
MODEL = ("--layers", "2", "--sequence-length", "32", "--micro-batch-size", "2", "--backend", "torch")


def evaluate(model: Any, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model(given[0]), given[1]


def planted() -> Recipe:
    """mxfp8, with one layer in mxfp4."""
    return from_toml(PLANTED, "planted")


def measured(rollout: Recipe, training: Recipe, *by: str, attention: bool = False, operands: bool = False) -> list[Gap]:
    with evaluator_of(build(LAYERS), evaluate, attention=attention, backend="torch") as found:
        return gaps(found, [batch()], rollout, training, by, operands)


def scored(recipe: Recipe | str) -> Tensor:
    """The log-probabilities of the vocabulary in a pass of its own, [sequences, tokens, vocabulary]."""
    model = build(LAYERS).eval()
    with torch.no_grad(), instrument(model, recipe, backend="torch"):
        return model(batch()[0]).float().log_softmax(-1)


def of_labels(scores: Tensor) -> np.ndarray:
    return scores.gather(-1, batch()[1][..., None]).double().flatten().numpy()


def test_equal_to_two_passes_of_instrument():
    (whole,) = measured(planted(), parse_recipe("linear_nvfp4"))
    rollout, training = scored(planted()), scored("linear_nvfp4")
    assert (whole.policies.rollout == of_labels(rollout)).all()
    assert (whole.policies.training == of_labels(training)).all()
    expected = stats.entropy(rollout.double().exp(), training.double().exp(), axis=-1).mean(-1)
    assert whole.divergences == pytest.approx(expected, rel=1e-2, abs=1e-7)
    changes = (rollout - training).gather(-1, batch()[1][..., None])[..., 0].abs().double().mean(1)
    assert whole.measured.changes == pytest.approx(changes.tolist(), rel=1e-4)
    low, high = stats.t.interval(0.95, len(changes) - 1, changes.mean(), stats.sem(changes))
    assert (whole.measured.change.low, whole.measured.change.high) == pytest.approx((low, high), rel=1e-4)


def test_a_group_alone_is_rounded_as_for_the_rollout():
    """Everything else is rounded as for training; blocks before the group are not computed again."""
    found = {gap.key.group: gap for gap in measured(planted(), parse_recipe("linear_nvfp4"), "site")}
    for layer, module in ((2, "fc1"), (3, "proj")):
        spec = "mxfp4" if layer == 2 else "mxfp8"
        text = f"[linear]\nforward = 'nvfp4'\n[modules.'layer{layer}.{module}']\nforward = '{spec}'"
        own = found[EffectGroup("linear", layer, module)]
        assert (own.policies.rollout == of_labels(scored(from_toml(text, "own")))).all()
    assert len(found) == 1 + LAYERS * 4


@pytest.mark.parametrize("training", ["bf16", "linear_mxfp8"])
def test_the_layer_in_mxfp4_is_named_first(training: str):
    whole, first, *others = measured(planted(), parse_recipe(training), "layer")
    assert first.key.group == EffectGroup("linear", 2)
    if training == "bf16":
        changes = [each.measured.changes for each in others]
        assert len(others) == LAYERS - 1 and max(map(max, changes)) < min(first.measured.changes)
    else:  # only that layer differs
        assert not others and first.measured.changes == whole.measured.changes


def test_one_operand_alone_is_rounded_as_for_the_rollout():
    found = {gap.measured.name: gap for gap in measured(planted(), parse_recipe("linear_nvfp4"), "site", operands=True)}
    for operand in ("input", "weight"):
        gap = found[f"layer2 fc1 linear, {operand}"]
        text = f"[linear]\nforward = 'nvfp4'\n[modules.'layer2.fc1']\nforward.{operand} = 'mxfp4'"
        assert (gap.policies.rollout == of_labels(scored(from_toml(text, "own")))).all()
        assert not gap.key.is_whole
    assert len(found) == 3 * (1 + LAYERS * 4)


def test_a_group_in_which_one_operand_differs_has_its_name():
    text = PLANTED + "[modules.'layer3.fc2']\nforward.weight = 'mxfp4'\n"
    rollout = from_toml(text, "weight")
    assert {gap.measured.name for gap in measured(rollout, planted(), "layer", operands=True)} == {
        "all, weight",
        "layer3 linear, weight",
    }


def test_operands_that_are_rotated_together_are_changed_together():
    found = measured(parse_recipe("linear_mxfp4(hadamard=32)"), parse_recipe("bf16"), "layer", operands=True)
    assert {gap.measured.name for gap in found} == {"all", *(f"layer{layer} linear" for layer in range(1, LAYERS + 1))}


def test_products_of_attention_are_groups_as_well():
    found = [
        gap.key.group for gap in measured(parse_recipe("mxfp4"), parse_recipe("linear_mxfp4"), "part", attention=True)
    ]
    assert set(found) == {EffectGroup(), EffectGroup("qk"), EffectGroup("pv")}


def test_recipes_that_differ_only_in_the_backward_pass_are_refused():
    with pytest.raises(ConfigError, match="alike"):
        measured(parse_recipe("linear_mxfp8"), parse_recipe("linear_mxfp8(backward=dequantized)"), "site")


def test_the_command_names_the_planted_layer(command, tmp_path: Path, capsys):
    (tmp_path / "planted.toml").write_text(PLANTED)
    options = ("--rollout", str(tmp_path / "planted.toml"), *MODEL, "--by", "layer", "--sequences", "4")
    assert command("parity", *options) == 0
    out = capsys.readouterr().out
    groups = out.partition("Why:")[2].splitlines()
    assert groups[2].startswith("all ") and groups[3].startswith("layer2 linear")
    assert "The largest change of log-probabilities is that of layer2 linear" in " ".join(out.split())
    assert "not sampled from a policy" in out
    assert command("parity", *options, "--train", "linear_mxfp8", "--format", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["group"] for row in rows} == {"all", "layer2 linear"}
    by_group = {row["group"]: float(row["over_tokens"]) for row in rows if row["quantity"] == "abs_logprob"}
    assert by_group["all"] == by_group["layer2 linear"] > 0
    assert command("parity", *options, "--operands", "--format", "markdown") == 0
    assert "| layer2 linear, weight |" in capsys.readouterr().out


def test_the_result_is_a_run(command, tmp_path: Path, capsys):
    options = ("--rollout", "linear_mxfp4", *MODEL, "--by", "layer", "--sequences", "4")
    assert command("parity", *options) == 0
    out = capsys.readouterr().out
    (run,), refused = list_runs(tmp_path / "runs")
    assert not refused and run.run_id in out and run.status.state == "done" and run.config["kind"] == "experiment"
    found = read_parity(run.directory)
    assert (found.rollout, found.training, found.tool) == ("linear_mxfp4", "bf16", "")
    assert found.gaps[0].name == "all" and len(found.gaps) == 3
    values = {value.measure.name: value for value in found.steps[0].values}
    assert values["abs_logprob"].over_sequences == pytest.approx(np.mean(found.gaps[0].changes), rel=1e-12)
    before = experiment_files(run.directory)
    assert command("parity", *options, "--format", "csv") == 0
    assert run.run_id not in capsys.readouterr().out
    assert len(list_runs(tmp_path / "runs")[0]) == 1 and experiment_files(run.directory) == before
    assert command("parity", *options, "--sequences", "2") == 0 and len(list_runs(tmp_path / "runs")[0]) == 2


WRONG = {
    "two": ("--rollout", "mxfp4", "dump.jsonl", "other.jsonl"),
    "nothing": (),
    "no_rollout": ("--train", "mxfp8"),
    "options_of_recipes": ("dump.jsonl", "--by", "layer"),
    "equal": ("--rollout", "mxfp4", "--train", "mxfp4"),
    "backward": ("--rollout", "linear_mxfp8", "--train", "linear_mxfp8(backward=dequantized)", *MODEL),
    "recipe": ("--rollout", "mxfp5"),
    "delayed": ("--rollout", "te_delayed", *MODEL),
    "granularity": ("--rollout", "mxfp4", "--by", "head"),
    "model": ("no_such_model", "--rollout", "mxfp4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(name: str, command, capsys):
    assert command("parity", *WRONG[name]) == 2
    out, err = capsys.readouterr()
    assert one_line(err) and not out
