"""softmax=flash in Binade's own core, in instrumented models, and in recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector import instrument
from binade.collector.capture.adapters.attend import attend
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.models.attention import CoreAttention, CoreBegin
from binade.collector.models.parallel import Call
from binade.collector.models.site import Site
from binade.collector.recipes.files import from_toml, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import RecipeError
from binade.quant.gemm import Rounding
from binade.quant.specs import GemmFormats, Softmax, SpecError
from tests.collector.instrumented import CORE, Recorder, names, rows, value

LENGTH, HEADS, GROUPS, DIM, TILE = 40, 4, 2, 16, 16
FLASH = Call(Rounding(GemmFormats(softmax=Softmax(TILE))))
FLASH_RECIPE = parse_recipe("bf16", softmax=f"flash(tile={TILE})")


def operands(groups: int = GROUPS, *, scale: float = 2.0) -> list[Tensor]:
    """Query, key and value [2, heads or groups, length, dim]."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, heads, LENGTH, DIM, generator=generator) for heads in (HEADS, groups, groups)]
    return [(x * scale).requires_grad_() for x in made]


def results(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, inputs, output.detach().cos())]


def assert_equal(output: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    for x, exact in zip(results(output, inputs), results(expected, inputs), strict=True):
        assert (x - exact).norm() < 1e-5 * exact.norm()


def test_the_core_is_torchs():
    inputs = operands()
    core = CoreAttention(Site(1, "core"), DIM)
    core.begin = CoreBegin(pv=lambda: FLASH)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    assert_equal(core(*inputs), expected, inputs)


def hidden() -> Tensor:
    """What may be seen: half, and nothing in one row."""
    seen = torch.randn(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0
    seen[1, 0, 5] = False
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.5},
        {"attn_mask": hidden()},
        {"attn_mask": torch.linspace(-4, 4, LENGTH).expand(LENGTH, LENGTH)},
        {"attn_mask": torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~hidden(), torch.finfo(torch.float32).min)},
    ],
    ids=["plain", "causal", "mask", "bias", "smallest"],
)
@pytest.mark.parametrize("groups", [GROUPS, HEADS])
def test_attend_is_torchs(options: dict[str, Any], groups: int):
    inputs = operands(groups)
    options = {"enable_gqa": groups < HEADS} | options
    expected = F.scaled_dot_product_attention(*inputs, **options)
    assert_equal(attend(Call(), FLASH, *inputs, **options), expected, inputs)


class Attention(nn.Module):
    """Attention by torch, or written out."""

    def __init__(self, *, eager: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)
        self.eager, self.dropout = eager, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4).unbind()
        if self.eager:
            y = (q @ k.mT * DIM**-0.5).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.proj(y.transpose(1, 2).flatten(2))


def model_of(**options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attn": Attention(**options)})])})
    model.forward = lambda x: model.layers[0].attn(x)
    return model, 4 * torch.randn(2, LENGTH, HEADS * DIM)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("autocast", [False, True])
def test_an_instrumented_model(tmp_path: Path, autocast: bool):
    model, x = model_of()
    with torch.autocast("cpu", enabled=autocast):
        expected = model(x)
        with Recorder(tmp_path) as recorder, instrument(model, FLASH_RECIPE, recorder):
            output = model(x)
            output.sum().backward()
    assert (output - expected).norm() < (1e-2 if autocast else 1e-5) * expected.norm()
    recorded = rows(tmp_path)
    assert names(recorded)[1, "core"] == dict.fromkeys(CORE, 1)
    scores, probs = (value(recorded, 1, "core", name).float() for name in ("attention_scores", "attention_probs"))
    visible = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    for start in range(0, LENGTH, TILE):
        end = min(start + TILE, LENGTH)
        weights = (visible[..., start:end] - visible[..., :end].amax(-1, keepdim=True)).exp()
        torch.testing.assert_close(probs[..., start:end], weights, rtol=2**-8 if autocast else 1e-5, atol=1e-30)
    context = value(recorded, 1, "core", "output").float()
    normalized = visible.softmax(-1) @ value(recorded, 1, "core", "value").float()
    assert (context - normalized).norm() < (1e-2 if autocast else 1e-5) * normalized.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"eager": True},
            r"computes its own softmax, to which softmax=flash\(tile=16\) cannot be applied",
        ),
        ({"dropout": 0.5}, r"softmax=flash\(tile=16\) does not support dropout"),
    ],
)
def test_refusals(options: dict[str, Any], message: str):
    model, x = model_of(**options)
    with instrument(model, FLASH_RECIPE, cores=["*.attn"] if "eager" in options else ()):
        with pytest.raises(InstrumentError, match=message):
            model(x)


def test_a_recipe_file():
    text = '[pv]\nsoftmax = "flash(tile=64)"\nforward = "hifp8"\n\n[[schedule]]\nfrom = 10\npv.forward = "bf16"\n'
    recipe = from_toml(text, "mine")
    stages = [recipe, *(stage for _, stage in recipe.schedule)]
    assert [stage.pv.formats.softmax for stage in stages] == [Softmax(64)] * 2
    assert {str(stage.qk.formats.softmax) for stage in stages} == {"full"}
    again = from_toml(to_toml(recipe), "mine")
    assert again.lines() == recipe.lines() and again.pv == recipe.pv
    assert "pv.softmax                  keys         flash(tile=64)" in recipe.lines()
    assert recipe.describe().endswith("softmax flash(tile=64)")
    assert "softmax" not in to_toml(parse_recipe("hifp8")) + "".join(parse_recipe("hifp8").lines())
    assert parse_recipe("bf16", softmax="flash").quantized and not parse_recipe("bf16", softmax="full").quantized


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('pv.softmax = "flush"', "pv.softmax: softmax=flush is not known: expected full, flash or flash"),
        ("pv.softmax = 3", "pv.softmax must be a string"),
        ('pv.softmax = "flash(tile=48)"\npv.forward = "mxfp8"', "pv: softmax=.*48.* multiple of 32"),
        ('qk.softmax = "flash"', "unknown key 'softmax' in "),
        ('[[schedule]]\nfrom = 3\npv.softmax = "flash"', "unknown key 'softmax' in "),
    ],
)
def test_a_wrong_recipe_file(text: str, message: str):
    with pytest.raises((RecipeError, SpecError), match=message):
        from_toml(text, "mine")
