"""Flash attention against torch in float64, and against figures of the code that it follows."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from binade.quant import fake_quantize
from binade.quant.attention import flash
from binade.quant.gemm import Observed, Rounding
from binade.quant.specs import GemmFormats, Softmax, SpecError
from tests.quant.helpers import assert_same_bits

TILE = 16
FORWARD, REVERSED = Softmax(TILE), Softmax(TILE, reversed=True)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def masked_scores(keys: int) -> Tensor:
    """[2, 3, 40, keys]: a third is masked, in one row everything, in another the first two tiles."""
    scores = 4 * random(2, 3, 40, keys, seed=1)
    hidden = random(2, 3, 40, keys, seed=2) > 0.4
    hidden[0, 0, 3], hidden[0, 0, 4, : 2 * TILE] = True, True
    return scores.masked_fill(hidden, -torch.inf)


def run(
    scores: Tensor, value: Tensor, grad: Tensor, softmax: Softmax = FORWARD, **formats: str
) -> tuple[dict[str, Observed], list[Tensor]]:
    """What the tap sees, by name, and the output and both gradients."""
    seen: dict[str, Observed] = {}
    scores, value = scores.clone().requires_grad_(), value.clone().requires_grad_()
    how = Rounding(GemmFormats(**formats, softmax=softmax), backend="torch")
    output = flash(scores, value, how, lambda each: seen.update({each.name: each}))
    output.backward(grad)
    return seen, [output.detach(), scores.grad, value.grad]


def exactly(scores: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
    """The same three by torch's softmax in float64."""
    scores, value = (x.double().requires_grad_() for x in (scores, value))
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    output = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value
    output.backward(grad.double())
    return [output.detach(), scores.grad, value.grad]


@pytest.mark.parametrize("keys", [8, 16, 80, 83])
@pytest.mark.parametrize("softmax", [FORWARD, REVERSED], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_unrounded_it_is_the_softmax(keys: int, softmax: Softmax, dtype: torch.dtype, tolerance: float):
    scores = masked_scores(keys)
    value, grad = random(2, 3, keys, 24, seed=3, dtype=dtype), random(2, 3, 40, 24, seed=4, dtype=dtype)
    _, results = run(scores, value, grad, softmax)
    for result, exact in zip(results, exactly(scores, value, grad), strict=True):
        assert (result - exact).norm() < tolerance * exact.norm()
    assert not results[0][0, 0, 3].any() and not results[1][0, 0, 3].any()


def test_the_operand_is_relative_to_the_running_maximum():
    scores = masked_scores(83)
    seen, (output, *_) = run(
        scores, value := random(2, 3, 83, 24, seed=3), random(2, 3, 40, 24, seed=4), forward_a="hifp8"
    )
    operand, first = seen["a"], [0, 16, 32, 48, 64, 80, 83]
    total = torch.zeros(2, 3, 40, 1, dtype=torch.float64)
    context = torch.zeros(2, 3, 40, 24, dtype=torch.float64)
    last = scores.double().amax(-1, keepdim=True)
    for start, end in pairwise(first):
        highest = scores[..., :end].double().amax(-1, keepdim=True)
        weights = (scores[..., start:end].double() - highest).exp().nan_to_num(0.0)
        torch.testing.assert_close(operand.tensor[..., start:end].double(), weights, rtol=4e-6, atol=0)  # |S − m| < 64
        rest = (highest - last).exp().nan_to_num(0.0)
        total += weights.sum(-1, keepdim=True) * rest
        context += operand.quantized[..., start:end].double() @ value[..., start:end, :].double() * rest
    assert_same_bits(operand.quantized, fake_quantize(operand.tensor, "hifp8"))
    torch.testing.assert_close(output.double(), (context / total).nan_to_num(0.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [80, 83])
def test_reversed_keys_times_256_are_those_of_numpy(keys: int):
    """P̃ = exp(S − m) of tiles from the last to the first, 256 · P̃ cast to E4M3, the sum of the row before the cast, and
    the accumulator multiplied by exp(m before − m): arXiv 2606.06521, and the kernels of FlashAttention-3."""
    scores, value = masked_scores(keys), random(2, 3, keys, 24, seed=3)
    seen, (output, *_) = run(scores, value, random(2, 3, 40, 24, seed=4), REVERSED, forward_a="fp8_e4m3(scale=pow2)")
    s, v, recorded, codes = (x.numpy() for x in (scores, value, seen["a"].tensor, seen["a"].quantized))
    assert np.array_equal((recorded * 256).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / 256, codes)
    highest = np.full((2, 3, 40, 1), -np.inf)
    total, context = np.zeros((2, 3, 40, 1)), np.zeros((2, 3, 40, 24))
    with np.errstate(invalid="ignore"):
        for start in reversed(range(0, keys, TILE)):
            tile = np.s_[..., start : start + TILE]
            before, highest = highest, np.maximum(highest, s[tile].max(-1, keepdims=True).astype(np.float64))
            factor, weights = np.nan_to_num(np.exp(before - highest)), np.nan_to_num(np.exp(s[tile] - highest))
            np.testing.assert_allclose(recorded[tile], weights, rtol=4e-6)  # |S − m| < 64
            total = total * factor + weights.sum(-1, keepdims=True)
            context = context * factor + codes[tile].astype(np.float64) @ v[..., start : start + TILE, :]
        np.testing.assert_allclose(output.numpy(), np.nan_to_num(context / total), rtol=1e-5, atol=1e-6)


def flushed_beside_a_sink(strength: float, spec: str, softmax: Softmax) -> tuple[float, float]:
    """The share of P̃ that `spec` rounds to 0 outside the first tile, whose first 4 keys are a sink: its scores are
    N(strength, 1), those of all other keys N(0, 1). And the mean squared error of the output."""
    scores, value = random(1, 512, 4096, seed=0), random(1, 4096, 16, seed=1)
    scores[..., :4] += strength
    seen: dict[str, Observed] = {}
    how = Rounding(GemmFormats(spec, softmax=softmax))
    output = flash(scores, value, how, lambda each: seen.update({each.name: each}))
    flushed = (seen["a"].quantized[..., softmax.tile :] == 0).float().mean().item()
    return flushed, (output - scores.double().softmax(-1) @ value.double()).square().mean().item()


@pytest.mark.parametrize(("spec", "scale"), [("fp8_e4m3(scale=none)", 1), ("fp8_e4m3(scale=pow2)", 256)])
def test_a_sink_flushes_what_the_closed_form_says(spec: str, scale: int):
    """arXiv 2606.06521: to leading order the share Φ(Δ + δ − 6.93 − ln S) of the other P̃, with δ = 1 for a sink of 4
    keys; half of them at Δ = 6.93 + ln S − δ. From the last tile to the first and times 256, none."""
    half = 6.93 + math.log(scale) - 1
    assert flushed_beside_a_sink(half, spec, Softmax(128))[0] == pytest.approx(0.52, abs=0.005)
    for strength in (half - 1, half + 1):
        closed_form = NormalDist().cdf(strength - half)
        assert flushed_beside_a_sink(strength, spec, Softmax(128))[0] == pytest.approx(closed_form, abs=0.08)
    flushed = flushed_beside_a_sink(half, spec, Softmax(128, reversed=True))[0]
    assert flushed == 0 if scale == 256 else 0 < flushed < 0.001


@pytest.mark.parametrize("strength", [4, 5, 6])
def test_reversed_keys_times_256_make_the_error_smaller(strength: int):
    """By a factor of 3 to 10 at moderate strengths of the sink, says arXiv 2606.06521."""
    plain = flushed_beside_a_sink(strength, "fp8_e4m3(scale=none)", Softmax(128))[1]
    both = flushed_beside_a_sink(strength, "fp8_e4m3(scale=pow2)", Softmax(128, reversed=True))[1]
    assert 3 < plain / both < 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "formats", [{}, {"wgrad_a": "mxfp4", "wgrad_grad": "mxfp8", "dgrad_grad": "mxfp8_e5m2", "dgrad_b": "hifp8"}]
)
def test_the_backward_pass_rounds_the_normalized_softmax(formats: dict[str, str], dtype: torch.dtype):
    """P and dP are not rounded in the gradient of the scores, even where the model computes in bfloat16."""
    scores, value = masked_scores(80), random(2, 3, 80, 24, seed=3, dtype=dtype)
    grad = random(2, 3, 40, 24, seed=4, dtype=dtype)
    seen, (output, grad_scores, grad_value) = run(scores, value, grad, **formats)

    def rounded(x: Tensor, operand: str, dim: int) -> Tensor:
        return fake_quantize(x, formats[operand], dim) if operand in formats else x

    probs = scores.double().softmax(-1).nan_to_num(0.0)
    tolerance = 1e-5 if formats or dtype == torch.float32 else 2**-8
    torch.testing.assert_close(seen["wgrad_a"].tensor.double(), probs, rtol=tolerance, atol=0)
    wgrad_a = rounded(seen["wgrad_a"].tensor, "wgrad_a", -2).to(dtype)
    torch.testing.assert_close(grad_value, wgrad_a.mT @ rounded(grad, "wgrad_grad", -2))
    dgrad = rounded(grad, "dgrad_grad", -1).double(), rounded(value, "dgrad_b", -1).double()
    delta = (grad.double() * output.double()).sum(-1, keepdim=True)
    exact = probs * (dgrad[0] @ dgrad[1].mT - delta)
    torch.testing.assert_close(grad_scores.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("softmax", [FORWARD, REVERSED], ids=str)
def test_the_tap_sees_the_gradient_of_the_operand(softmax: Softmax):
    """Of the operand, not of the normalized probabilities: the sums of the rows do not depend on its rounding."""
    scores, value, grad = masked_scores(80), random(2, 3, 80, 24, seed=3), random(2, 3, 40, 24, seed=4)
    seen, _ = run(scores, value, grad, softmax)
    maxima = scores.double().unflatten(-1, (-1, TILE)).amax(-1)
    maxima = torch.stack(
        [maxima[..., each:].amax(-1) if softmax.reversed else maxima[..., : each + 1].amax(-1) for each in range(5)], -1
    )
    factors = (maxima - scores.double().logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0).repeat_interleave(TILE, -1)
    operand = seen["a"].tensor.double().requires_grad_()
    ((operand * factors) @ value.double()).backward(grad.double())
    torch.testing.assert_close(seen["grad_a"].tensor.double(), operand.grad, rtol=1e-4, atol=1e-6)


def test_bfloat16_operands_are_what_the_products_take():
    value, grad = random(2, 3, 80, 24, seed=3, dtype=torch.bfloat16), random(2, 3, 40, 24, seed=4, dtype=torch.bfloat16)
    seen, _ = run(masked_scores(80), value, grad)
    assert {seen[name].tensor.dtype for name in ("a", "b", "y", "grad", "wgrad_a", "grad_b")} == {torch.bfloat16}
    seen, _ = run(masked_scores(80), value, grad, forward_a="nvfp4")  # float32 rounds to the format once
    assert seen["a"].tensor.dtype == torch.float32 and seen["y"].tensor.dtype == torch.bfloat16


def test_the_code_that_it_follows():
    """Computed once with `attention.py` of github.com/ucker/why-low-precision-training-fails at 02f0ab6, unchanged, by
    FlashAttentionFunction.apply(q, k, v, None, True, 16, 16).backward(g) in float32 (torch 2.13, CPU); the weights are
    the results of its torch.exp."""
    query, key, value, grad = (random(1, 2, 48, 16, seed=seed) for seed in range(4))
    query = (query * torch.tensor([3.0, 0.01])[:, None, None]).requires_grad_()
    key.requires_grad_()
    future = torch.ones(48, 48, dtype=torch.bool).triu(1)
    scores = (query @ key.mT * 16**-0.5).masked_fill(future, -torch.inf)
    seen, (output, grad_scores, grad_value) = run(scores.detach(), value, grad)
    scores.backward(grad_scores)
    weights = seen["a"].tensor
    sums = weights.unflatten(-1, (3, TILE)).sum((0, 1, 2, 4)).tolist()
    assert sums == pytest.approx([722.205078125, 400.05511474609375, 140.11766052246094], rel=1e-5)
    ones = weights.bfloat16() == 1
    assert int(ones.sum()) == 141 and (ones.sum(-1) > 1).float().mean((0, 2)).tolist() == pytest.approx(
        [9 / 48, 19 / 48]
    )
    figures = [
        (output, 424.86909896977306, [0.11848852, 0.04973842, -0.3353588, 0.07092172]),
        (query.grad, 133.3942730960531, [-0.22154056, 0.22002736, 0.0229018, -0.13840033]),
        (key.grad, 550.4851877433305, [0.0020238489, -0.00015271515, -0.00097285246, 0.00025778054]),
        (grad_value, 465.1749922074162, [0.00370106, -0.06370038, -0.06336003, 0.06559053]),
    ]
    for x, squares, row in figures:
        assert x.double().square().sum().item() == pytest.approx(squares, rel=1e-5)
        assert x[0, 1, 40, :4].tolist() == pytest.approx(row, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ({"forward_a": "mxfp8"}, "tiles of 48 keys, which block of mxfp8 does not divide: .* multiple of 32"),
        ({"forward_b": "nvfp4(block=1x32)"}, "multiple of 32"),
        ({"forward_a": "hifp8(hadamard=64)", "forward_b": "hifp8(hadamard=64)"}, "hadamard of .* multiple of 64"),
        ({"forward_a": "mxfp8(block=16)", "wgrad_a": "mxfp8", "of_rounded": ("wgrad_a",)}, "cannot be rounded from"),
    ],
)
def test_refusals(formats: dict[str, str], message: str):
    with pytest.raises(SpecError, match=message):
        GemmFormats(**formats, softmax=Softmax.parse("flash(tile=48)"))
    GemmFormats(**formats)


@pytest.mark.parametrize("text", ["full", "flash", "flash(tile=64)", "flash(tile=64, keys=reversed, backward=rounded)"])
def test_text(text: str):
    assert str(Softmax.parse(text)) == text
    assert Softmax.parse("flash") == Softmax.parse("flash( tile=128 )") == Softmax(128)
    assert Softmax.parse("flash(keys=reversed,tile=64)") == Softmax(64, reversed=True)


@pytest.mark.parametrize(
    "text", ["", "flash()", "flash(tile=0)", "flash(tile=8, tile=9)", "flash(keys=forward)", "online"]
)
def test_bad_text(text: str):
    with pytest.raises(SpecError, match="full, flash or flash"):
        Softmax.parse(text)


def test_tensor_scales_and_second_derivatives():
    scores, value = masked_scores(80).requires_grad_(), random(2, 3, 80, 24, seed=3)
    how = Rounding(GemmFormats("fp8_e4m3", softmax=Softmax(TILE)))
    output = flash(scores, value, how)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(output.sum(), scores, create_graph=True)
