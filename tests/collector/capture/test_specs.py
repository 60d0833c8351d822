"""Specs in training: what is recorded of them, and when what is random is drawn again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from binade.collector import Recorder, instrument
from binade.collector.capture.clock import seed_of
from binade.collector.recipes.parse import parse_recipe
from binade.data.index.catalog import Catalog
from binade.data.words.text import plain_name
from binade.quant import fake_quantize, score
from binade.quant.specs import SpecError
from binade.terminal import names
from tests.collector.small_model import build, step

ROTATED = "nvfp4(rounding=stochastic, hadamard=16, signs=random)"


def test_rows_have_the_text_of_the_spec_and_files_plain_names(tmp_path):
    model = build()
    scores = ("nvfp4(block=16x16)", "mxfp8_e4m3", "mxfp8(scale=floor)", "mxfp4(hadamard=32)")
    with Recorder(tmp_path, scores=scores, tensors=("input", "weight")) as recorder:
        with instrument(model, "linear_nvfp4(block=16x16)", recorder):
            step(model)
    with Catalog.open(tmp_path) as catalog:
        rows = catalog.tensors()
        linear = rows[rows["module"] == "fc1"]
        assert set(linear["format"]) == set(linear["quant_type"]) == {"nvfp4(block=16x16)"}
        assert set(catalog.scored_formats()) == {"mxfp8", "mxfp4(hadamard=32)", "nvfp4(block=16x16)"}
        for row in linear.itertuples():
            x = catalog.load(row.tensor_id)
            wanted = score(x, "nvfp4(block=16x16)", int(row.contracted_axis))
            assert row.sqnr_db == pytest.approx(wanted.sqnr_db, rel=1e-6)
        assert all("nvfp4_block_16x16" in path and not set("()= ") & set(path) for path in linear["path"])


@pytest.mark.parametrize(
    ("text", "name"),
    [("mxfp8_e5m2", "mxfp8_e5m2"), ("nvfp4(block=16x16)", "nvfp4_block_16x16"), (ROTATED, plain_name(ROTATED))],
)
def test_plain_names(text, name):
    assert plain_name(text) == name and "/" not in name and plain_name(name) == name


def test_the_error_of_a_rotated_operand_is_that_of_its_rotated_values(tmp_path):
    model = build()
    with Recorder(tmp_path, tensors=("input",)) as recorder, instrument(model, f"linear_{ROTATED}", recorder):
        step(model)
    with Catalog.open(tmp_path) as catalog:
        rows = catalog.tensors()
        rows = rows[rows["format"].notna()]
        assert set(rows["format"]) == {ROTATED} and rows["sqnr_db"].between(10, 30).all()


def test_the_mean_over_tokens_is_subtracted_from_operands_that_have_tokens(tmp_path):
    """The error refers to the tensor. Weights, and operands of attention, are not scored without a mean."""
    model, spec = build(), "nvfp4(center=tokens)"
    with Recorder(tmp_path, scores=(spec, "mxfp4(center=tokens)", "mxfp4")) as recorder:
        with instrument(model, f"linear_{spec}", recorder):
            step(model)
    with Catalog.open(tmp_path) as catalog:
        rows = catalog.tensors()
        first = rows[(rows["module"] == "fc1") & (rows["layer_index"] == 1)]
        formats = first.set_index("tensor_name")["format"]
        assert formats[["input", "weight", "grad_output"]].tolist() == [spec, "nvfp4", spec]
        centered = catalog.ask("SELECT DISTINCT tensor_name, layer_type FROM tensor JOIN score USING (key)"
                               " WHERE score.format = 'mxfp4(center=tokens)'")  # fmt: skip
        assert set(centered.itertuples(index=False, name=None)) == {("input", "linear"), ("grad_output", "linear")}
        for row in rows[(rows["format"] == spec) & (rows["module"] != "core")].itertuples():
            x = catalog.load(row.tensor_id)
            q = fake_quantize(x, spec, int(row.contracted_axis))
            wanted = 10 * torch.log10(x.double().square().sum() / (q.double() - x.double()).square().sum())
            assert row.sqnr_db == pytest.approx(float(wanted), abs=0.1)  # the residual was rounded to bfloat16


def test_a_comma_in_parentheses_does_not_split_a_list():
    assert names(f"mxfp4, {ROTATED},hifp8") == ("mxfp4", ROTATED, "hifp8")
    assert names("a,b,,c") == ("a", "b", "c")


def test_an_impossible_score_is_refused(tmp_path):
    with pytest.raises(SpecError, match="scale=pow2 is not possible for mxfp4"):
        Recorder(tmp_path, scores=("mxfp4(scale=pow2)",))


class Layers(nn.Module):
    """Two equal linear layers, each seen alone; recompute: how the first is checkpointed, None for not at all."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(32, 64, generator=generator)
        self.first, self.second = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
        for layer in (self.first, self.second):
            layer.weight.data.copy_(weight)
        self.recompute = recompute
        self.made: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def first(x: Tensor) -> Tensor:
            y = self.first(x)
            self.made.append(y.detach())
            return y

        a = first(x) if self.recompute is None else checkpoint(first, x, use_reentrant=self.recompute)
        return a, self.second(x)


def inputs() -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("recipe", ["linear_mxfp4(rounding=stochastic)", "linear_mxfp4(hadamard=16, signs=random)"])
def test_each_pass_and_layer_draws_anew_and_a_run_is_repeatable(recipe):
    def run(seed: int) -> list[Tensor]:
        model = Layers()
        with instrument(model, recipe, seed=seed), torch.no_grad():
            return [y for _ in range(3) for y in model(inputs())]

    found = run(seed=1)
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    assert all(torch.equal(a, b) for a, b in zip(found, run(seed=1), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found, run(seed=2), strict=True))


@pytest.mark.parametrize("recompute", [True, False], ids=["reentrant", "not"])
@pytest.mark.parametrize("fmt", ["mxfp4(rounding=stochastic)", "fp8_e4m3(history=4)"])
def test_a_recomputed_pass_rounds_as_the_first_did(recompute, fmt):
    plain, again = Layers(), Layers(recompute)
    gradients = []
    for model in (plain, again):
        x = inputs()
        with instrument(model, f"linear_{fmt}"):
            for scale in (1.0, 3.0):
                a, b = model(x * scale)
                (a.square().sum() + b.sum()).backward()
        gradients.append((x.grad, model.first.weight.grad, model.second.weight.grad))
    if recompute:  # the other kind stops once it has the operands again
        assert len(again.made) == 4 and torch.equal(again.made[0], again.made[1]) and torch.equal(*again.made[2:])
    for wanted, found in zip(*gradients, strict=True):
        assert torch.equal(found, wanted)


def test_rotations_cancel():
    """In float32 and a format that loses little, the rotated product is near the plain one."""
    x, model = inputs(), Layers()
    wanted = model(x)[0]
    with instrument(model, "linear_fp16(hadamard=16, signs=random)"):
        assert torch.allclose(model(x)[0], wanted, rtol=0, atol=0.05)
    turned = fake_quantize(x.detach(), "mxfp4(hadamard=16)")
    assert not torch.equal(turned, fake_quantize(x.detach(), "mxfp4"))


def test_seeds_fit_six_operands_into_32_bits():
    seeds = [seed_of(1234, 0, iteration, 0, "layer1.fc1", "linear") for iteration in range(2000)]
    assert len(set(seeds)) == len(seeds) and max(seeds) * 6 + 5 < 2**32


def test_the_error_of_a_result_that_is_not_recorded_is_not_given_to_another(tmp_path):
    """The forward GEMM is rounded and its output left out; dgrad is not rounded."""
    model, recipe = build(), parse_recipe("linear_mxfp4", dgrad="bf16")
    with Recorder(tmp_path, scores=(), tensors=("grad_input", "grad_weight"), measures=("result",)) as recorder:
        with instrument(model, recipe, recorder):
            step(model)
    with Catalog.open(tmp_path) as catalog:
        results = catalog.tensors().set_index("tensor_name")["result_sqnr_db"]
        assert results["grad_input"].isna().all() and results["grad_weight"].notna().all()
