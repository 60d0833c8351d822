"""`binade run --twin`: against runs that train with and without the recipe from the same weights."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from binade.data.index.catalog import Catalog
from binade.data.run.directory import RunInfo
from binade.data.run.evaluations import has_twins, read_twins
from binade.data.run.losses import read_losses
from binade.data.words.filter import Filter

pytestmark = pytest.mark.slow
DELAYED, STOCHASTIC = "te_delayed", "nvidia_nvfp4(without=keep)"


def losses(run: RunInfo) -> list[float]:
    return [record["loss"] for record in read_losses(run.directory)]


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [DELAYED, STOCHASTIC])
def test_training_stays_equal_to_the_bit(collect: Callable[..., RunInfo], recipe: str):
    options = ("--quantization", recipe, "--train-iters", "4", "--control-iter", "2", "--micro-batches", "2")
    plain, twin = (collect(*options, "--capture-every", "2", *more) for more in ((), ("--twin", "3")))
    assert losses(plain) == losses(twin) and len(losses(plain)) == 4
    assert [record["data_sha256"] for record in read_losses(plain.directory)] == [
        record["data_sha256"] for record in read_losses(twin.directory)
    ]
    assert plain.status.tensors == twin.status.tensors > 0
    found = read_twins(twin.directory)
    assert [each.iteration for each in found] == [0, 2] and not has_twins(plain.directory)
    passes = 3 if recipe == STOCHASTIC else 1
    assert all(len(each.changes) == passes and each.draws == (passes > 1) for each in found)


def test_against_two_runs_from_the_same_weights(collect: Callable[..., RunInfo]):
    """In the first iteration, the bf16 run and the quantized one compute the two gradients of a twin step."""
    twin = collect("--quantization", "FA_linear_mxfp4", "--twin", "2")
    plain = collect("--quantization", "bf16")
    (found,) = read_twins(twin.directory)
    assert found.loss == losses(plain)[0] and found.loss + found.changes[0] == pytest.approx(losses(twin)[0], rel=1e-6)
    rows = {(row.layer_index, row.module): row for row in found.parameters}
    assert len(rows) == len(found.parameters) == 8
    with Catalog.open(twin.directory.parent) as catalog:
        pairs = catalog.pairs(twin.run_id, plain.run_id, Filter(tensor_name=["grad_weight"]))
        assert sorted(pairs["module"]) == ["fc1", "fc2", "proj", "qkv"]
        for pair in pairs.to_dict("records"):
            q, g = (catalog.load(pair[name]).double() for name in ("tensor_id", "reference_id"))
            row = rows[pair["layer_index"], pair["module"]]
            assert row.norm == pytest.approx(g.norm().item(), rel=1e-3)
            assert row.bias == row.bias_corrected == pytest.approx(((q - g).norm() / g.norm()).item(), rel=1e-3)
            assert row.cosine == pytest.approx(torch.cosine_similarity(q.flatten(), g.flatten(), 0).item(), rel=1e-4)
    assert [row.layer_index for row in found.layers] == [1]
    for whole in (found.step, *found.layers):
        own = [row for row in found.parameters if whole.layer_index in (None, row.layer_index)]
        power = sum(row.norm**2 for row in own)
        assert whole.norm**2 == pytest.approx(power)
        assert whole.bias**2 * power == pytest.approx(sum((row.bias * row.norm) ** 2 for row in own))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--tp", "2"), "--twin runs on one rank, but --tp 2 and --dp 1 make 2"),
        (("--dp", "2"), "--twin runs on one rank, but --tp 1 and --dp 2 make 2"),
        (("--find-nan",), "--twin and --find-nan cannot be combined"),
        (("--no-save-tensors",), "--twin has no effect with --no-save-tensors"),
    ],
    ids=lambda value: "",
)
def test_what_cannot_be_combined(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], options: tuple[str, ...], reason: str
):
    assert command("run", "--twin", "2", *options) == 2
    assert re.fullmatch(rf"binade: {re.escape(reason)}.*\n", capsys.readouterr().err)
