"""Smoothing, Attn-QAT's backward pass and a KV cache that trains, in our own models and in those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from binade.collector import Recorder, instrument
from binade.collector.capture.adapters.attend import attend
from binade.collector.models.attention import CoreAttention, CoreBegin
from binade.collector.models.parallel import Call
from binade.collector.models.site import Site
from binade.collector.recipes.files import from_toml, to_toml
from binade.collector.recipes.ingredients import leave_out
from binade.collector.recipes.recipe import Recipe, RecipeError
from binade.quant.gemm import Rounding
from binade.quant.options import Smooth, Softmax
from binade.quant.specs import GemmFormats
from tests.collector.capture.test_kv_cache import by, llama
from tests.collector.instrumented import rows
from tests.collector.small_model import batch, build
from tests.quant import oracles

ATTN_QAT = """
[qk]
forward = "nvfp4(scale=e4m3)"
dquery.key = { spec = "bf16", of = "rounded" }
dkey.query = { spec = "bf16", of = "rounded" }
[pv]
forward.attention_probs = "nvfp4(scale=e4m3)"
softmax = "flash(tile=64, backward=rounded)"
[kv_cache]
value = "nvfp4(scale=e4m3)"
passes = "all"
"""


def made(text: str) -> Recipe:
    return from_toml(text, "mine")


@pytest.mark.parametrize("smooth", ["key", "query+key"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_smoothing_in_transformers(attention: str, smooth: str):
    """Against an attention of our own, with MXFP8 of NumPy."""

    def mxfp8(x: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(oracles.mx(x.numpy())))

    def reference(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        k = k - k.mean(-2, keepdim=True)
        of_group = q.mean(-2, keepdim=True) if smooth == "query+key" else torch.zeros_like(q[..., :1, :])
        scores = (mxfp8(q - of_group) @ mxfp8(k).mT + of_group @ k.mT) * scaling
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("smoothed_reference", reference)
    tokens = batch()[0]
    plain = llama(attention)(tokens).logits
    expected = llama("smoothed_reference")(tokens).logits
    model = llama(attention)
    with instrument(model, made(f'[qk]\nsmooth = "{smooth}"\nforward = "mxfp8"'), backend="torch"):
        found = model(tokens).logits
    assert (found - expected).abs().max() < 1e-2 * (expected - plain).abs().max()


@pytest.mark.parametrize("smooth", list(Smooth))
def test_our_core_and_sdpa_agree(smooth: Smooth):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 20, 16), torch.randn(2, 2, 20, 16) + 3, torch.randn(2, 2, 20, 16)
    qk = Call(Rounding(GemmFormats("mxfp8", "mxfp8", "mxfp8_e5m2", "mxfp8", smooth=smooth), "torch"))
    pv = Call(Rounding(GemmFormats("mxfp8", softmax=Softmax(32, True)), "torch"))
    core = CoreAttention(Site(1, "core"), 16)
    core.begin = CoreBegin(lambda: qk, lambda: pv)
    gradients = []
    for attention in (core, lambda *x: attend(qk, pv, *x, is_causal=True, enable_gqa=True)):
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        output = attention(*inputs)
        output.square().sum().backward()
        gradients.append([output, *(x.grad for x in inputs)])
    for x, y in zip(*gradients, strict=True):
        assert torch.allclose(x, y, atol=1e-6)


class Through(torch.autograd.Function):
    """Rounds by NumPy; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return by("nvfp4")(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_cache_that_trains(tmp_path):
    tokens, labels = batch()
    model, other = build(2).train(), build(2).train()
    cache = made('[kv_cache]\nkey = "nvfp4"\nvalue = "nvfp4"\npasses = "all"')
    with Recorder(tmp_path, scores=()) as recorder, instrument(model, cache, recorder, backend="torch"):
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    for each in other.modules():
        if isinstance(each, CoreAttention):
            each.register_forward_pre_hook(lambda _, x: (x[0], Through.apply(x[1]), Through.apply(x[2])))
    F.cross_entropy(other(tokens).flatten(0, 1), labels.flatten()).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    found = rows(tmp_path, values=False)
    assert set(found[found["quant_type"] == "nvfp4"]["tensor_name"]) == {"key", "value"}


def test_attn_qat_trains_and_its_text_is_kept():
    recipe = made(ATTN_QAT)
    again = made(to_toml(recipe))
    assert to_toml(again) == to_toml(recipe) and again.qk == recipe.qk and again.kv_cache == recipe.kv_cache
    assert again.pv.formats.softmax == Softmax(64, True)
    tokens, labels = batch()
    model = build(2).train()
    with instrument(model, recipe, backend="torch"):
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_smooth_is_kept_in_a_schedule_and_left_out_by_name():
    recipe = made('[qk]\nsmooth = "key"\nforward = "mxfp8"\n[[schedule]]\nfrom = 3\nlinear.forward = "mxfp8"')
    assert made(to_toml(recipe)).qk == recipe.qk
    assert [stage.qk.formats.smooth for _, stage in recipe.stages(None)] == [Smooth.KEY] * 2
    assert recipe.pv.formats.smooth is Smooth.NONE and "smooth key" in recipe.describe()
    assert any(line.split() == ["qk.smooth", "tokens", "key"] for line in recipe.lines())
    plain = leave_out(recipe, "smooth")
    assert [stage.qk.formats.smooth for _, stage in plain.stages(None)] == [Smooth.NONE] * 2
    with pytest.raises(RecipeError, match=r"qk\.smooth: smooth=value is not known"):
        made('[qk]\nsmooth = "value"')
