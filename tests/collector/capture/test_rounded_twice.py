"""The recorded error of an operand is that of what its GEMM multiplies against the tensor before any rounding, also if
a recipe rounds it twice: from the values on disk, by numpy, with each rounding by `fake_quantize`."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from binade.collector import Recorder, instrument
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from binade.quant import fake_quantize
from binade.quant.gemm import Observed, Rounding, linear
from binade.quant.specs import GemmFormats, Spec

STOCHASTIC = '{ spec = "nvfp4(rounding=stochastic)", of = "rounded" }'
WRITTEN = {
    "both": '[linear]\nforward = "mxfp8"\ndgrad.weight = { spec = "mxfp8", of = "rounded" }\n'
    'dgrad.grad_output = "mxfp8"\nwgrad.input = { spec = "mxfp4", of = "rounded" }\nwgrad.grad_output = "mxfp4"\n',
    "stochastic": f'[linear]\nforward = "mxfp4(rounding=stochastic)"\nwgrad.input = {STOCHASTIC}\n'
    f'wgrad.grad_output = "nvfp4"\ndgrad.weight = {STOCHASTIC}\ndgrad.grad_output = "nvfp4"\n',
}
RECIPES = ["deepseek_v3", "quartet", "quartet2", "tetrajet2", "te_mxfp8(backward=dequantized)", *WRITTEN]


def recorded(root: Path, recipe: str, steps: int = 1) -> Catalog:
    if recipe in WRITTEN:
        file = root / f"{recipe}.toml"
        file.write_text(WRITTEN[recipe])
        recipe = str(file)
    model, tokens = (
        GPTModel(MODELS["llama32-1b"]["tiny"]),
        torch.randint(257, (2, 65)),
    )  # 128 tokens: a rotation of 128 pads none
    model.initialize(0)
    recorder = Recorder(root / "runs", label="t", iterations=steps, scores=("mxfp4", "fp8_e4m3"))
    with recorder, instrument(model, recipe, recorder):
        for _ in range(steps):
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
            model.zero_grad()
            recorder.step()
    return Catalog.open(root / "runs")


def decibels(x: Tensor, q: Tensor) -> float:
    signal, noise = (float(np.square(y.double().numpy()).sum()) for y in (x, q.double() - x.double()))
    return 10 * math.log10(signal / noise) if noise else math.inf


def rounded(x: Tensor, how: dict[str, object], dim: int) -> Tensor:
    """Signs and noise have seeds of their own, which `fake_quantize` takes from one."""
    spec = Spec.of(str(how["format"]))
    if spec.signs == "random" and how["sign_seed"] is not None:
        spec = Spec.of(spec, signs=str(int(how["sign_seed"])))
    seed = how["noise_seed"]
    return fake_quantize(x, spec, dim, seed=0 if seed is None or math.isnan(seed) else int(seed))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_error_is_that_of_what_the_gemm_multiplies(recipe, tmp_path):
    with recorded(tmp_path, recipe) as catalog:
        rows = catalog.tensors(Filter(tensor_name=["input", "weight"])).set_index("tensor_id")
        table = catalog.ask(
            "SELECT score.*, tensor_id FROM score JOIN tensor USING (key) WHERE score.gemm <> 'forward' AND "
            "tensor_name IN ('input', 'weight')"
        )
        of_second = table[table["second_sqnr_db"].notna()]
        assert len(of_second) and of_second["used"].all()
        for score in table.to_dict("records"):
            row = rows.loc[score["tensor_id"]]
            x = catalog.load(score["tensor_id"]).flatten(0, -2)
            first = rounded(x, row.to_dict(), -1) if isinstance(row["format"], str) else x
            place = row["module"], row["tensor_name"], score["gemm"], score["format"]
            if not score["used"]:  # rounded once, from the tensor
                once = fake_quantize(x, score["format"], 0)
                assert score["sqnr_db"] == pytest.approx(decibels(x, once), abs=1e-6), place
            elif "dequantized" in recipe:
                assert score["second_sqnr_db"] == math.inf and score["format"] == row["format"]
                assert score["sqnr_db"] == pytest.approx(decibels(x, first), abs=1e-6), place
            elif not math.isnan(score["second_sqnr_db"]):
                second = rounded(first, score, 0)
                # A rotation is computed in float32, and its values are rounded to bfloat16 before a format.
                near = 0.05 if "hadamard" in score["format"] else 1e-6
                assert score["sqnr_db"] == pytest.approx(decibels(x, second), abs=near), place
                assert score["second_sqnr_db"] == pytest.approx(decibels(first, second), abs=near), place
                flushed = ((x != 0) & (second == 0)).sum().double() / (x != 0).sum()
                if "hadamard" not in score["format"]:
                    assert score["flush_to_zero"] == pytest.approx(float(flushed), abs=1e-12), place


@pytest.mark.parametrize("spec", ["fp8_e4m3(history=4)", "nvfp4(hadamard=16, signs=random)"])
def test_the_backward_pass_takes_what_the_forward_pass_rounded(spec):
    """With the scale and the signs of that call, also if another call comes between."""
    seen: dict[str, Observed] = {}
    histories: dict[str, object] = {}
    x, w = torch.randn(64, 128), (torch.randn(32, 128) / 20).requires_grad_()
    formats = GemmFormats(spec, spec, of_rounded=("dgrad_b", "wgrad_a"))
    for step in range(3):
        how = Rounding(formats, seed=step, histories=histories)
        y = linear(x.clone().requires_grad_(), w, how, tap=lambda one: seen.__setitem__(one.name, one))
        forward = {name: seen[name].rounded().clone() for name in ("a", "b")}
        linear(x * 1000, w * 1000, Rounding(formats, seed=99, histories=histories))
        y.sum().backward()
        assert torch.equal(seen["wgrad_a"].source, forward["a"]) and torch.equal(seen["dgrad_b"].source, forward["b"])
        assert torch.equal(seen["wgrad_a"].tensor, x) and torch.equal(seen["dgrad_b"].tensor, w)
