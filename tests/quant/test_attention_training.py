"""Attention as it is trained in low precision: smoothing, the backward pass of Attn-QAT and the error of each product,
against NumPy in float64 with the roundings of `oracles` and ml_dtypes."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from binade.quant.attention import flash, smoothed
from binade.quant.attention_budget import error_budget
from binade.quant.gemm import Observed, Rounding, matmul
from binade.quant.options import Smooth, Softmax
from binade.quant.specs import GemmFormats, SpecError
from tests.quant import oracles

SHAPE = 2, 3, 160, 32  # sequences, heads, tokens, head size; two groups of queries
SCALE = SHAPE[-1] ** -0.5
ALONG = "nvfp4(scale=e4m3)"


def tensors(count: int, key_mean: float = 0.0) -> list[Tensor]:
    """Queries, keys, ...; keys with a mean."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(SHAPE, generator=generator) for _ in range(count)]
    found[1] += key_mean * torch.randn((*SHAPE[:2], 1, SHAPE[3]), generator=generator)
    return found


def double(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def nvfp4(x: np.ndarray, dim: int = -1) -> np.ndarray:
    """Blocks of 16 with E4M3 scales alone."""
    return np.asarray(oracles.with_scale_type(x.astype(np.float32), "e4m3", dim), np.float64)


def softmax(scores: np.ndarray) -> np.ndarray:
    future = np.triu(np.ones(scores.shape[-2:], bool), 1)
    e = np.exp(np.where(future, -np.inf, scores) - np.where(future, -np.inf, scores).max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def t(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def relative(exact: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


def scores_of(query: Tensor, key: Tensor, formats: GemmFormats) -> Tensor:
    q, k, complete = smoothed(query, key, formats)
    return complete(matmul(q, k, Rounding(formats, "torch"), transpose_b=True), SCALE / SCALE) * SCALE


@pytest.mark.parametrize("smooth", list(Smooth))
def test_smoothed_scores_and_gradients(smooth: Smooth):
    query, key, grad = *tensors(2, key_mean=8.0), torch.randn(*SHAPE[:3], SHAPE[2])
    for x in (query, key):
        x.requires_grad_()
    formats = GemmFormats(forward_a=ALONG, forward_b=ALONG, smooth=smooth)
    scores = scores_of(query, key, formats)
    scores.backward(grad)
    q, k, ds = double(query), double(key), double(grad) * SCALE
    q_mean, k_mean = np.zeros_like(q), np.zeros_like(k[..., :1, :])
    if smooth is not Smooth.NONE:
        k_mean = k.mean(-2, keepdims=True)
    if smooth is Smooth.BOTH:
        for part in (slice(0, 128), slice(128, 160)):
            q_mean[..., part, :] = q[..., part, :].mean(-2, keepdims=True)
    expected = (nvfp4(q - q_mean) @ t(nvfp4(k - k_mean)) + q_mean @ t(k - k_mean)) * SCALE
    # Float32 decides few roundings otherwise than float64.
    assert relative(expected, double(scores)) < 1e-3
    # Backward products are not rounded here.
    assert relative(ds @ (k - k_mean) + ds.sum(-1, keepdims=True) * k_mean, double(query.grad)) < 1e-5
    assert relative(t(ds) @ q, double(key.grad)) < 1e-5


def test_smoothing_keys_helps_where_they_have_a_mean():
    query, key = tensors(2, key_mean=8.0)
    exact = softmax(double(query) @ t(double(key)) * SCALE)
    errors = [
        relative(
            exact, softmax(double(scores_of(query, key, GemmFormats(forward_a=ALONG, forward_b=ALONG, smooth=each))))
        )
        for each in Smooth
    ]
    assert errors[0] > 2 * errors[1]


def test_without_a_format_nothing_is_smoothed():
    query, key = tensors(2)
    q, k, complete = smoothed(query, key, GemmFormats(dgrad_grad="mxfp8", smooth=Smooth.BOTH))
    assert q is query and k is key and complete(query, 1.0) is query


def test_heads_that_share_keys():
    query, key = tensors(2, key_mean=4.0)
    formats = GemmFormats(forward_a="fp8_e4m3(block=row)", forward_b="fp8_e4m3(block=row)", smooth=Smooth.BOTH)
    shared = key[:, :1]
    q, k, complete = smoothed(query, shared, formats)
    expected = scores_of(query, shared.expand_as(key).contiguous(), formats)
    raw = matmul(q, k.expand_as(key).contiguous(), Rounding(formats, "torch"), transpose_b=True)
    assert torch.allclose(complete(raw, 1.0) * SCALE, expected)


@pytest.mark.parametrize("tile", [32, 160])
def test_the_backward_pass_of_attn_qat(tile: int):
    """dV from the normalized P rounded along the keys, and δ = rowsum(dO ∘ O_hp) with O_hp = P V̂."""
    query, key, value, grad = tensors(4)
    formats = GemmFormats(forward_a=ALONG, forward_b="fp8_e4m3(block=row)", softmax=Softmax(tile, True))
    scores = (query @ key.transpose(-1, -2) * SCALE).masked_fill(torch.ones(160, 160).triu(1).bool(), -torch.inf)
    scores, v = scores.requires_grad_(), value.clone().requires_grad_()
    flash(scores, v, Rounding(formats, "torch")).backward(grad)
    p, do = softmax(double(query) @ t(double(key)) * SCALE), double(grad)
    rounded = np.asarray(oracles.fp8_rows(value.numpy(), -2), np.float64)  # V̂ of the forward product
    high = p @ rounded
    ds = p * (do @ t(double(value)) - (do * high).sum(-1, keepdims=True))
    assert relative(ds, double(scores.grad)) < 1e-5
    assert relative(t(nvfp4(p)) @ do, double(v.grad)) < 2e-3
    plain = GemmFormats(forward_a=ALONG, forward_b="fp8_e4m3(block=row)", softmax=Softmax(tile))
    flash(scores, v, Rounding(plain, "torch")).backward(grad)
    assert relative(2 * ds, double(scores.grad)) > 1e-3  # with δ of the rounded output


def test_nvfp4_of_unnormalized_probabilities_is_two_level():
    """448 · 6 · P̃ under E4M3 scales max16 / 6, in ml_dtypes: the tensor scale follows from the largest P̃, 1."""
    scores, value = torch.randn(2, 32, 64) * 3, torch.randn(2, 64, 16)
    seen: dict[str, Observed] = {}
    formats = GemmFormats(forward_a="nvfp4", softmax=Softmax(64))
    flash(scores, value, Rounding(formats, "torch"), lambda each: seen.__setitem__(each.name, each))
    p = (448 * 6 * np.exp(double(scores) - double(scores).max(-1, keepdims=True))).reshape(-1, 16)
    scale = (p.max(1, keepdims=True) / 6).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(scale > 0, np.clip(p / scale, 0, 6), 0)
    codes = codes.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    expected = (codes * scale / (448 * 6)).reshape(2, 32, 64)
    apart = np.abs(double(seen["a"].quantized) - expected) > 1e-6
    assert apart.mean() < 1e-3  # a tie that float32 decides otherwise


@pytest.mark.parametrize("tile", [None, 32])
def test_the_budget_is_that_of_numpy(tile: int | None):
    """The rows of dS have the sum 0 with the full softmax, whose backward pass subtracts rowsum(P ∘ dP). Flash kernels
    subtract rowsum(dO ∘ O), which does not have the errors of dP."""
    query, key, value, grad = tensors(4)
    qk = GemmFormats("nvfp4(scale=e4m3)", "nvfp4(scale=e4m3)", dgrad_grad="nvfp4(scale=e4m3)")
    pv = GemmFormats(dgrad_grad="nvfp4(scale=e4m3)", dgrad_b="nvfp4(scale=e4m3)", wgrad_grad="nvfp4(scale=e4m3)")
    pv = replace(pv, softmax=Softmax(tile))
    budget = error_budget(query, key, value, grad, qk, pv, backend="torch")
    assert list(budget) == ["none", "qk.forward", "qk.dquery", "pv.dprobs", "pv.dvalue", "all"]
    assert max(budget["none"].values()) < 1e-5
    q, k, v, do = map(double, (query, key, value, grad))

    def ds_of(p: np.ndarray, dp: np.ndarray) -> np.ndarray:
        return p * (dp - (do * (p @ v) if tile else p * dp).sum(-1, keepdims=True))

    p = softmax(q @ t(k) * SCALE)
    exact = ds_of(p, do @ t(v))
    of_forward = ds_of(softmax(nvfp4(q) @ t(nvfp4(k)) * SCALE), do @ t(v))
    of_dprobs = ds_of(p, nvfp4(do) @ t(nvfp4(v)))
    assert budget["qk.forward"]["dS"] == pytest.approx(relative(exact, of_forward), rel=1e-2)
    assert budget["pv.dprobs"]["dS"] == pytest.approx(relative(exact, of_dprobs), rel=1e-2)
    assert budget["pv.dprobs"]["dquery"] == pytest.approx(relative(exact @ k, of_dprobs @ k), rel=1e-2)
    assert budget["pv.dprobs"]["dvalue"] < 1e-5 and budget["pv.dvalue"]["dS"] < 1e-5
    rounded = nvfp4(exact * SCALE) @ k
    assert budget["qk.dquery"]["dquery"] == pytest.approx(relative(exact @ k * SCALE, rounded), rel=1e-2)
    assert budget["pv.dvalue"]["dvalue"] == pytest.approx(relative(t(p) @ do, t(p) @ nvfp4(do, -2)), rel=1e-2)
    assert budget["all"]["dS"] > max(budget["qk.forward"]["dS"], budget["pv.dprobs"]["dS"])


def test_operands_of_the_rounded_forward_product_count_with_it():
    query, key, value, grad = tensors(4)
    qk = GemmFormats("mxfp8", "mxfp8", of_rounded=("dgrad_b", "wgrad_a"))
    budget = error_budget(query, key, value, grad, qk, GemmFormats(softmax=Softmax(32)), backend="torch")
    assert list(budget) == ["none", "qk.forward", "all"] and budget["qk.forward"] == budget["all"]


def test_texts():
    assert str(Softmax.parse("flash(backward=rounded)")) == "flash(backward=rounded)"
    assert str(Softmax.parse("flash( tile=64 , backward=rounded)")) == "flash(tile=64, backward=rounded)"
    for text in ("flash(backward=unrounded)", "flash(,backward=rounded)x", "full(backward=rounded)"):
        with pytest.raises(SpecError, match="is not known: expected full, flash or flash"):
            Softmax.parse(text)
    with pytest.raises(SpecError, match="smooth=keys is not known: expected none, key, query"):
        Smooth.parse("keys")
