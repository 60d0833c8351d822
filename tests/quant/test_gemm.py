"""GEMM by GEMM against torch's autograd on operands that the test quantizes itself, each with a format of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from binade.quant import fake_quantize
from binade.quant.gemm import Observed, Rounding, linear, matmul, multiply
from binade.quant.rotation import rotate
from binade.quant.specs import GemmFormats, Spec
from tests.quant.helpers import assert_same_bits, devices

EACH = GemmFormats("mxfp8", "mxfp4", "mxfp8_e5m2", "mxint8", "nvfp4", "hifp8")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype)


def q(x: Tensor, fmt: str | None, dim: int) -> Tensor:
    return x if fmt is None else fake_quantize(x, fmt, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("shape", [(70,), (3, 40)], ids=["2d", "3d"])
def test_linear(shape, dtype):
    """tokens x in · (out x in)ᵀ; none of the lengths is a multiple of 32 in common."""
    x = random(*shape, 50, seed=1, dtype=dtype).requires_grad_()
    w = random(90, 50, seed=2, dtype=dtype).requires_grad_()
    grad = random(*shape, 90, seed=3, dtype=dtype)
    y = linear(x, w, Rounding(EACH))
    y.backward(grad)
    flat, flat_grad = x.detach().reshape(-1, 50), grad.reshape(-1, 90)
    assert_same_bits(y, product(q(x.detach(), "mxfp8", -1), q(w.detach(), "mxfp4", 1).t()))
    assert_same_bits(x.grad, product(q(grad, "mxfp8_e5m2", -1), q(w.detach(), "mxint8", 0)))
    assert_same_bits(w.grad, product(q(flat_grad, "nvfp4", 0).t(), q(flat, "hifp8", 0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_products_of_16_bits_are_rounded_once(dtype):
    """Against float64: half a step of the result's dtype, and float32's error of 256 additions."""
    a, b = random(40, 256, seed=1, dtype=dtype), random(256, 50, seed=2, dtype=dtype)
    exact = a.double() @ b.double()
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + 256 * torch.finfo(torch.float32).eps * (
        a.double().abs() @ b.double().abs()
    )
    y = multiply(a, b)
    assert y.dtype == dtype and bool(((y.double() - exact).abs() <= bound).all())
    with pytest.raises(RuntimeError, match="dtype"):
        multiply(a, b.float())


@pytest.mark.parametrize("transpose_b", [False, True])
def test_matmul(transpose_b):
    m, k, n = 40, 70, 50
    a = random(2, 3, m, k, seed=1).requires_grad_()
    b = random(2, 3, *((n, k) if transpose_b else (k, n)), seed=2).requires_grad_()
    grad = random(2, 3, m, n, seed=3)
    y = matmul(a, b, Rounding(EACH), transpose_b=transpose_b)
    y.backward(grad)
    straight = b.detach().mT if transpose_b else b.detach()  # [k, n]
    want_b = q(a.detach(), "hifp8", -2).mT @ q(grad, "nvfp4", -2)  # [k, n]
    torch.testing.assert_close(y, q(a.detach(), "mxfp8", -1) @ q(straight, "mxfp4", -2))
    torch.testing.assert_close(a.grad, q(grad, "mxfp8_e5m2", -1) @ q(straight, "mxint8", -1).mT)
    torch.testing.assert_close(b.grad, want_b.mT if transpose_b else want_b)


@pytest.mark.parametrize("which", ["forward_a", "forward_b", "dgrad_grad", "dgrad_b", "wgrad_grad", "wgrad_a"])
@pytest.mark.parametrize("product", ["linear", "matmul"])
def test_one_operand_at_a_time(product, which):
    """A format named for one operand changes the one result it enters, and no other."""

    def run(formats: GemmFormats) -> dict[str, Tensor]:
        x, w = random(40, 64, seed=1).requires_grad_(), random(33, 64, seed=2).requires_grad_()
        how = Rounding(formats)
        y = linear(x, w, how) if product == "linear" else matmul(x, w, how, transpose_b=True)
        y.backward(random(40, 33, seed=3))
        return {"forward": y.detach(), "dgrad": x.grad, "wgrad": w.grad}

    plain, changed = run(GemmFormats()), run(GemmFormats(**{which: "mxfp4"}))
    differ = [gemm for gemm in plain if not torch.equal(plain[gemm], changed[gemm])]
    assert differ == [which.split("_")[0]]


@pytest.mark.parametrize("product", ["linear", "matmul"])
def test_without_formats_it_is_torch(product):
    x, w = random(5, 12, seed=1).requires_grad_(), random(7, 12, seed=2).requires_grad_()
    how = Rounding(GemmFormats())
    y = linear(x, w, how) if product == "linear" else matmul(x, w, how, transpose_b=True)
    y.square().sum().backward()
    a, b = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    torch.nn.functional.linear(a, b).square().sum().backward()
    torch.testing.assert_close(y, torch.nn.functional.linear(a, b))
    torch.testing.assert_close(x.grad, a.grad)
    torch.testing.assert_close(w.grad, b.grad)


def test_tap_sees_operands_and_results():
    seen: list[Observed] = []
    x, w = random(2, 40, 64, seed=1).requires_grad_(), random(33, 64, seed=2).requires_grad_()
    y = linear(x, w, Rounding(EACH), tap=seen.append)
    grad = random(2, 40, 33, seed=3)
    y.backward(grad)
    names = [(o.name, o.spec and str(o.spec), o.dim) for o in seen]
    assert names[:3] == [("a", "mxfp8", -1), ("b", "mxfp4", -1), ("y", None, -1)]
    of_gradients = [str(EACH[name]) for name in ("dgrad_grad", "dgrad_b", "wgrad_grad", "wgrad_a")]
    assert names[3:6] == [("grad", of_gradients[0], -1), ("dgrad_b", of_gradients[1], -2), ("grad_a", None, -1)]
    wgrad = ("wgrad_grad", of_gradients[2], -2), ("wgrad_a", of_gradients[3], -2), ("grad_b", None, -1)
    assert names[6:] == [*wgrad]
    a, b, result, g, b_again, grad_a, g_again, a_again, grad_b = seen
    for again, of, spec in zip(
        (b_again, g_again, a_again), (w.detach(), grad, x.detach()), of_gradients[1:], strict=True
    ):
        assert_same_bits(again.quantized, fake_quantize(of.flatten(0, -2), spec, -2))
    for exact, one in ((x.detach().flatten(0, 1) @ w.detach().T, result), (grad.flatten(0, 1) @ w.detach(), grad_a)):
        assert_same_bits(one.exact(), exact)
    assert_same_bits(a.rounded(), a.quantized)
    assert [o.shape for o in (a, b, result, g)] == [(2, 40, 64), None, (2, 40, 33), (2, 40, 33)]
    assert_same_bits(a.tensor, x.detach().flatten(0, 1))
    assert_same_bits(a.quantized, fake_quantize(x.detach(), "mxfp8").flatten(0, 1))
    assert_same_bits(b.quantized, fake_quantize(w.detach(), "mxfp4"))
    assert_same_bits(g.quantized, fake_quantize(grad, "mxfp8_e5m2").flatten(0, 1))
    assert a.scales.shape == (80, 2, 1) and not a.tensor.requires_grad
    for observed, value in ((result, y), (grad_a, x.grad), (grad_b, w.grad)):
        assert_same_bits(observed.tensor.reshape(value.shape), value.detach())


@pytest.mark.parametrize("spec", ["nvfp4(rounding=stochastic)", "mxfp4(hadamard=32, signs=7)", "fp8_e4m3(history=4)"])
def test_a_forward_operand_can_be_rounded_again(spec):
    """To the same values, drawn and delayed ones too, in the operand's own axes."""
    seen: dict[str, Observed] = {}
    x, w = random(40, 64, seed=1), random(33, 64, seed=2)
    linear(x, w, Rounding(GemmFormats(spec, spec), seed=5), tap=lambda o: seen.setdefault(o.name, o))
    again = seen["a"].rounded()
    if "hadamard" in spec:
        turned = rotate(again, Spec.of(spec), -1, 15)
        torch.testing.assert_close(turned, seen["a"].quantized, atol=1e-5, rtol=1e-5)
    else:
        assert_same_bits(again, seen["a"].quantized)


@pytest.mark.parametrize("formats", [EACH, GemmFormats(wgrad_a="mxfp8")])
def test_a_quantized_product_is_not_differentiated_twice(formats):
    x, w = random(8, 32, seed=1).requires_grad_(), random(6, 32, seed=2).requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(linear(x, w, Rounding(formats)).sum(), x, create_graph=True)


def test_a_product_without_formats_is_differentiated_twice():
    x, w = (random(*shape, seed=1).double().requires_grad_() for shape in ((5, 4), (3, 4)))
    assert torch.autograd.gradgradcheck(lambda *both: linear(*both, Rounding(GemmFormats())), (x, w))


def test_only_needed_gradients_are_computed():
    seen: list[str] = []
    x, w = random(8, 32, seed=1), random(6, 32, seed=2).requires_grad_()
    linear(x, w, Rounding(EACH), tap=lambda o: seen.append(o.name)).sum().backward()
    assert "grad_a" not in seen and "grad_b" in seen


@pytest.mark.parametrize("device", devices())
def test_backends_agree(device):
    x, w = random(70, 50, seed=1).to(device), random(90, 50, seed=2).to(device)
    results = []
    for backend in ("torch", "triton"):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = linear(a, b, Rounding(EACH, backend))
        y.square().sum().backward()
        results.append((y, a.grad, b.grad))
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second)


def test_formats_by_alias_and_none():
    assert GemmFormats(forward_a="mxfp8_e4m3").forward_a == Spec.of("mxfp8")
    assert not GemmFormats().quantized and GemmFormats(wgrad_a="bf16").quantized


@pytest.mark.parametrize("formats", [EACH, GemmFormats(*["nvfp4(block=16x16)"] * 6)], ids=["blocks", "tiles"])
def test_heads_that_share_an_operand_are_rounded_one_by_one(formats):
    """Three heads of 37 rows: neither blocks nor tiles contain rows of two heads."""
    a, b = random(2, 3 * 37, 24, seed=1).requires_grad_(), random(2, 50, 24, seed=2).requires_grad_()
    grad = random(2, 3 * 37, 50, seed=3)
    matmul(a, b, Rounding(formats, heads=3), transpose_b=True).backward(grad)
    heads, grads = (x.detach().unflatten(1, (3, 37)) for x in (a, grad))

    def rounded(x: Tensor, which: str, dim: int) -> Tensor:
        q = fake_quantize(x, formats[which], dim)
        return q.flatten(1, 2) if q.dim() == 4 else q

    da = rounded(grads, "dgrad_grad", -1) @ rounded(b.detach(), "dgrad_b", -2)
    db = rounded(grads, "wgrad_grad", -2).mT @ rounded(heads, "wgrad_a", -2)
    assert_same_bits(a.grad, da)
    assert_same_bits(b.grad, db)


@pytest.mark.parametrize("formats", [EACH, GemmFormats("mxfp8", "mxfp8")], ids=["quantized", "forward"])
@pytest.mark.parametrize("which", ["x", "w"])
def test_the_backward_pass_uses_what_was_multiplied(formats, which):
    """Also if `data` is replaced in between, as by offloading."""
    results = []
    for replaced in (False, True):
        x, w = random(33, 64, seed=1).requires_grad_(), random(32, 64, seed=2).requires_grad_()
        y = linear(x, w, Rounding(formats))
        if replaced:
            given = {"x": x, "w": w}[which]
            given.data = torch.zeros_like(given)
        y.backward(torch.ones_like(y))
        results.append((x.grad, w.grad))
    for expected, found in zip(*results, strict=True):
        assert_same_bits(expected, found)
