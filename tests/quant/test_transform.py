"""Subtracting the mean over tokens (`center=tokens`) against NumPy and the oracles of the formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from binade.app.questions.shared.rounded import subject
from binade.app.questions.what_if.compute import Trial, TriedOperand, try_formats
from binade.data.run.tensor_kinds import has_tokens
from binade.quant import compare, fake_quantize, hadamard_rotate, quantize, score
from binade.quant.gemm import Observed, Rounding, linear, matmul
from binade.quant.metrics import score_of_rows_later, scores_later
from binade.quant.specs import GemmFormats, Spec, SpecError
from binade.quant.transform import mean_energy, untransformed
from tests.quant import oracles
from tests.quant.helpers import assert_same_bits

CENTERED = "mxfp4(center=tokens)"


def biased(*shape: int, seed: int = 0) -> Tensor:
    """Normal values, with a mean in each feature that is a few times larger."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) + 4 * torch.randn(shape[-1], generator=generator)


def mean(x: Tensor) -> np.ndarray:
    return x.double().numpy().reshape(-1, x.shape[-1]).mean(0).astype(np.float32)


def residual(x: Tensor) -> np.ndarray:
    return x.float().numpy() - mean(x)


def sqnr_db(x: np.ndarray, q: np.ndarray) -> float:
    x, q = x.astype(np.float64), q.astype(np.float64)
    return float(10 * np.log10((x**2).sum() / ((q - x) ** 2).sum()))


@pytest.mark.parametrize(("shape", "dim"), [((40, 96), -1), ((64, 50), 0), ((3, 20, 64), -1)])
def test_rounds_the_residual_and_adds_the_mean(shape, dim):
    x = biased(*shape)
    rounded = oracles.mx(residual(x), dim, oracles.E2M1)
    want = rounded.astype(np.float32) + mean(x)
    assert_same_bits(fake_quantize(x, CENTERED, dim), want)
    assert_same_bits(fake_quantize(x, CENTERED, dim, backend="triton"), want)
    assert_same_bits(quantize(x, CENTERED, dim).dequantize(), want)
    # 17 times the energy is taken away: the error is relative to what is left.
    assert sqnr_db(x.numpy(), want) > sqnr_db(x.numpy(), fake_quantize(x, "mxfp4", dim).numpy()) + 6


def test_the_mean_is_subtracted_before_the_rotation():
    x = biased(32, 64)
    signs = np.ones(32)
    turned = oracles.rotate(residual(x), signs).astype(np.float32)
    want = oracles.rotate_back(oracles.mx(turned, -1, oracles.E2M1), signs) + mean(x)
    np.testing.assert_allclose(fake_quantize(x, "mxfp4(center=tokens, hadamard=32)"), want, atol=2e-6)


def test_energy_of_the_mean():
    x = biased(3, 20, 64)
    rows = x.double().numpy().reshape(-1, 64)
    assert mean_energy(x) == pytest.approx(60 * (rows.mean(0) ** 2).sum() / (rows**2).sum(), rel=1e-6)
    assert mean_energy(torch.ones(5, 7)) == 1
    assert mean_energy(x - torch.from_numpy(mean(x))) < 1e-12
    for none in (torch.ones(7), torch.zeros(5, 7), torch.zeros(0, 7), torch.full((5, 7), torch.nan)):
        assert np.isnan(mean_energy(none))


@pytest.mark.parametrize("spec", [CENTERED, "mxfp4(center=tokens, hadamard=32)", "fp8_e4m3(center=tokens)"])
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_errors_refer_to_the_tensor_and_shares_to_the_residual(spec, dim, dtype):
    """The sum of the rounded residual and the mean is not rounded to the tensor's dtype: no GEMM does that."""
    x = (8 * biased(64, 96)).to(dtype).float()
    tensor, size = x.to(dtype), Spec.of(spec).hadamard
    residue = torch.from_numpy(residual(x)).float()
    coded = (hadamard_rotate(residue, dim, size) if size else residue).to(dtype)  # what a GEMM in this dtype rounds
    plain = untransformed(Spec.of(spec))
    rounded = fake_quantize(coded, plain, dim).float()
    q = (hadamard_rotate(rounded, dim, size) if size else rounded) + torch.from_numpy(mean(x)).float()
    want, shares = sqnr_db(x.numpy(), q.numpy()), score(coded, plain, dim)
    for errors in (score(tensor, spec, dim), scores_later(tensor, [Spec.of(spec)], dim, blocks=True)[0][0]()):
        assert errors.sqnr_db == pytest.approx(want, abs=1e-4)
        assert (errors.flush_to_zero, errors.saturated) == (shares.flush_to_zero, shares.saturated)
    if dim == -1:
        some = torch.tensor([3, 17, 40])
        errors = score_of_rows_later(tensor, Spec.of(spec), dim, some)()
        assert errors.sqnr_db == pytest.approx(sqnr_db(x[some].numpy(), q[some].numpy()), abs=1e-4)


@pytest.mark.parametrize("dim", [-1, 0])
def test_a_sample_is_rounded_without_the_mean_of_all_tokens(dim):
    """Of 16 lines every fourth; its errors are those that the lines have in the whole tensor."""
    x = biased(*((16, 64) if dim == -1 else (64, 16)))
    lines = (lambda t: t[::4]) if dim == -1 else (lambda t: t[:, ::4])
    want = sqnr_db(lines(x).numpy(), lines(fake_quantize(x, CENTERED, dim)).numpy())
    found = subject(x, CENTERED, dim, limit=256)
    assert found.every == 4
    sums = found.blocks.sums
    assert 10 * np.log10(sums.signal / sums.noise) == pytest.approx(want, abs=1e-4)
    whole = sqnr_db(x.numpy(), fake_quantize(x, CENTERED, dim).numpy())
    for together, shown in ((True, want), (False, whole)):  # of several tensors samples, of one all values
        table, _ = try_formats([TriedOperand(x, dim)], [Trial(Spec.of(CENTERED))], together=together, limit=256)
        assert table["sqnr_db"].item() == pytest.approx(shown, abs=1e-4)


@pytest.mark.parametrize("rotation", ["", ", hadamard=16"], ids=["plain", "rotated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_the_three_gemms_of_a_linear_layer(dtype, rotation):
    """With sums in float64: the products of the rounded residuals, and what the means add."""
    spec, plain = f"nvfp4(center=tokens{rotation})", f"nvfp4({rotation.removeprefix(', ')})"
    formats = GemmFormats(spec, plain, spec, plain, spec, spec)
    x, grad = biased(64, 96, seed=1).to(dtype).requires_grad_(), biased(64, 32, seed=2).to(dtype)
    weight = biased(32, 96, seed=3).to(dtype).requires_grad_()
    seen: dict[str, Observed] = {}
    y = linear(x, weight, Rounding(formats), tap=lambda each: seen.setdefault(each.name, each))
    y.backward(grad)

    def coded(name: str) -> np.ndarray:
        """What the GEMM multiplied, without the rotation, which cancels."""
        return seen[name].quantized.double().numpy()

    def rotated(vector: np.ndarray) -> np.ndarray:
        return oracles.rotate(vector[None], np.ones(16))[0] if rotation else vector

    mu, nu = mean(x.detach()).astype(np.float64), mean(grad).astype(np.float64)
    bound = {"rtol": 2**-8 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-3}
    want = (coded("a") + rotated(mu)) @ coded("b").T
    np.testing.assert_allclose(y.detach().float(), want, **bound)
    want = (coded("grad") + rotated(nu)) @ coded("dgrad_b")
    np.testing.assert_allclose(x.grad.float(), want, **bound)
    want = coded("wgrad_grad").T @ coded("wgrad_a") + 64 * np.outer(nu, mu)
    np.testing.assert_allclose(weight.grad.float(), want, **bound)
    # Most of the gradient of the weight is what the means add: without it, the exact product is far away.
    exact = grad.double().numpy().T @ x.detach().double().numpy()
    assert sqnr_db(exact, weight.grad.float().numpy()) > 25
    operand = seen["a"]
    if not rotation:
        np.testing.assert_allclose(operand.rounded().float(), coded("a") + mu, rtol=2**-8)


def test_autocast_changes_no_product():
    """Autocast would round the float32 operands of products on a CPU to bfloat16 again."""
    x, weight = biased(64, 96).bfloat16(), biased(32, 96, seed=3).bfloat16()
    for spec in ("nvfp4", "nvfp4(center=tokens)"):
        how = Rounding(GemmFormats(spec, "nvfp4"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = linear(x, weight, how)
        assert_same_bits(y, linear(x, weight, how))


def test_products_with_a_batch_axis_and_without_tokens():
    formats = Rounding(GemmFormats(CENTERED, "mxfp4"))
    x, weight = biased(2, 32, 64), biased(16, 64, seed=3)
    y = matmul(x, weight, formats, transpose_b=True)
    want = fake_quantize(x, CENTERED) @ fake_quantize(weight, "mxfp4").mT
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-3)
    assert linear(torch.zeros(0, 4, 64), weight, formats).shape == (0, 4, 16)


def test_compare_takes_the_shares_of_the_residual():
    x = biased(64, 64)
    found = compare(x, fake_quantize(x, CENTERED), CENTERED)
    scored = score(x, CENTERED)
    assert (found["flush_to_zero"], found["saturated"]) == (scored.flush_to_zero, scored.saturated)
    assert found["sqnr_db"] == pytest.approx(scored.sqnr_db, abs=1e-6) and found["mean_energy"] == mean_energy(x)


def test_which_operands_have_tokens():
    assert has_tokens("linear", "input") and has_tokens("linear", "grad_output")
    assert not has_tokens("linear", "weight") and not has_tokens("attention", "grad_output")
    plain = "mxfp4"
    GemmFormats(CENTERED, plain, CENTERED, plain, CENTERED, CENTERED)
    for operands in ((plain, CENTERED), (plain, plain, plain, CENTERED), (plain,) * 4 + (CENTERED, plain)):
        with pytest.raises(SpecError, match="center=tokens"):
            GemmFormats(*operands)
    assert_same_bits(fake_quantize(torch.arange(7.0), CENTERED), fake_quantize(torch.arange(7.0), plain))
    with pytest.raises(SpecError, match="center=rows"):
        Spec.of("mxfp4(center=rows)")
