"""The model's parts against torch's own, forward and backward."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from binade.collector.models.attention import CoreAttention
from binade.collector.models.model import GPTModel
from binade.collector.models.norm import RMSNorm
from binade.collector.models.parallel import ColumnParallelLinear
from binade.collector.models.positions import RotaryPositions, apply_rotary
from binade.collector.models.registry import MODELS
from binade.collector.models.site import Site
from binade.collector.ranks import SINGLE

TINY = MODELS["llama32-1b"]["tiny"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def randn(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def twins(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize(
    ("batch", "heads", "groups", "length", "dim"),
    [(2, 8, 2, 37, 32), (1, 4, 4, 16, 8), (3, 6, 1, 5, 4), (1, 2, 1, 1, 8), (2, 32, 8, 24, 64)],
    ids=lambda n: str(n),
)
def test_core_attention_is_torchs(batch, heads, groups, length, dim):
    ours = [randn(batch, n, length, dim) for n in (heads, groups, groups)]
    theirs = twins(*ours)
    y = CoreAttention(Site(1, "core"), dim)(*ours)
    z = F.scaled_dot_product_attention(*theirs, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(y, z)
    grad = torch.randn_like(y)
    y.backward(grad)
    z.backward(grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_core_attention_agrees_in_float64_to_the_last_digits_of_float32():
    ours = [randn(2, n, 19, 16) for n in (4, 2, 2)]
    y = CoreAttention(Site(1, "core"), 16)(*ours)
    wide = F.scaled_dot_product_attention(*(t.double() for t in ours), is_causal=True, enable_gqa=True)
    assert (y - wide).abs().max() < 1e-6


def test_core_attention_sees_no_future():
    q, k, v = (torch.randn(1, 4, 12, 8) for _ in range(3))
    core = CoreAttention(Site(1, "core"), 8)
    before = core(q, k, v)
    k[:, :, 7:], v[:, :, 7:] = torch.randn(1, 4, 5, 8) * 100, torch.randn(1, 4, 5, 8) * 100
    after = core(q, k, v)
    assert torch.equal(before[:, :, :7], after[:, :, :7])
    assert not torch.isclose(before[:, :, 7:], after[:, :, 7:]).all(-1).any()


def test_heads_share_the_key_of_their_group_only():
    q, k, v = torch.randn(1, 6, 9, 8), torch.randn(1, 3, 9, 8), torch.randn(1, 3, 9, 8)
    core = CoreAttention(Site(1, "core"), 8)
    before = core(q, k, v)
    v[:, 1] += 1.0
    changed = (core(q, k, v) - before).abs().amax((0, 2, 3)) > 1e-3
    assert changed.tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_is_torchs(dtype):
    x, eps = (randn(7, 3, 96) * 5).detach().to(dtype).requires_grad_(), 1e-5
    norm = RMSNorm(96, eps)
    nn.init.normal_(norm.weight)
    (twin,) = twins(x)
    weight = norm.weight.detach().clone().requires_grad_()
    y = norm(x)
    z = F.rms_norm(twin.float(), (96,), weight, eps)
    assert y.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(y, z)
    else:
        assert ((y.float() - z).abs() <= z.abs() * (2**-8 + 2**-20)).all()  # half a bf16 ulp, and a float32 one
    grad = torch.randn_like(y)
    y.backward(grad)
    z.backward(grad.float())
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(norm.weight.grad, weight.grad)


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(RMSNorm(8, 1e-5)(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize(("length", "dim", "theta"), [(40, 32, 500000.0), (7, 64, 10000.0), (3, 2, 100.0)])
def test_rotary_is_multiplication_by_a_complex_phase(length, dim, theta):
    x = randn(length, 2, 5, dim)
    (twin,) = twins(x)
    y = apply_rotary(x, *RotaryPositions(dim, theta)(x)[1])
    frequency = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    phase = torch.polar(torch.ones(length, dim // 2, dtype=torch.float64), torch.arange(length)[:, None] * frequency)
    pairs = torch.complex(*twin.double().chunk(2, -1)) * phase[:, None, None]
    z = torch.cat((pairs.real, pairs.imag), -1)
    torch.testing.assert_close(y, z.float(), rtol=1e-5, atol=2e-5)
    grad = torch.randn_like(y)
    y.backward(grad)
    z.backward(grad.double())
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-5, atol=2e-5)


def test_rotary_products_depend_on_distance_only():
    q, k = torch.randn(32), torch.randn(32)
    _, (cos, sin) = RotaryPositions(32, 500000.0)(torch.empty(50))
    qs, ks = (apply_rotary(t.expand(50, 1, 1, 32), cos, sin)[:, 0, 0] for t in (q, k))
    products = qs @ ks.t()
    for distance in range(-20, 21):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_mlp_is_swiglu():
    mlp = TINY.build_feed_forward(1, SINGLE)
    for p in mlp.parameters():
        nn.init.normal_(p, std=0.05)
    x = randn(5, 2, TINY.hidden)
    gate, up = mlp.linear_fc1.weight.chunk(2)
    expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), mlp.linear_fc2.weight)
    torch.testing.assert_close(mlp(x), expected)


def test_a_linear_is_torchs_to_the_gradients():
    layer = ColumnParallelLinear(Site(1, "fc1"), 24, 40)
    nn.init.normal_(layer.weight)
    twin = nn.Linear(24, 40, bias=False)
    twin.weight.data.copy_(layer.weight.data)
    x = randn(3, 4, 24)
    (x2,) = twins(x)
    y, z = layer(x), twin(x2)
    torch.testing.assert_close(y, z)
    grad = torch.randn_like(y)
    y.backward(grad)
    z.backward(grad)
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad)


class PlainLlama(nn.Module):
    """The same model in the plainest torch, float32, weights taken from the other's state dict."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.w = {name: t.detach().clone().requires_grad_() for name, t in weights.items()}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        w, s = self.w, TINY
        x = F.embedding(tokens, w["embedding.weight"])  # [b, s, hidden]
        batch, length, _ = x.shape
        frequency = s.rope_theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angle = torch.arange(length)[:, None] * frequency

        def turn(t: torch.Tensor) -> torch.Tensor:  # [b, heads, s, d]
            a, b = t.chunk(2, -1)
            return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

        per_group = s.heads // s.kv_heads
        for i in range(s.layers):
            at = f"layers.{i}."
            h = F.rms_norm(x, (s.hidden,), w[at + "input_layernorm.weight"], s.norm_eps)
            qkv = w[at + "self_attention.linear_qkv.weight"].view(s.kv_heads, per_group + 2, s.head_dim, s.hidden)
            q = torch.einsum("bsh,gndh->bgnsd", h, qkv[:, :per_group]).reshape(batch, s.heads, length, s.head_dim)
            k = torch.einsum("bsh,gdh->bgsd", h, qkv[:, per_group])
            v = torch.einsum("bsh,gdh->bgsd", h, qkv[:, per_group + 1])
            y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
            y = y.transpose(1, 2).reshape(batch, length, -1)
            x = x + F.linear(y, w[at + "self_attention.linear_proj.weight"])
            h = F.rms_norm(x, (s.hidden,), w[at + "pre_mlp_layernorm.weight"], s.norm_eps)
            gate, up = F.linear(h, w[at + "mlp.linear_fc1.weight"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w[at + "mlp.linear_fc2.weight"])
        x = F.rms_norm(x, (s.hidden,), w["final_layernorm.weight"], s.norm_eps)
        return F.linear(x, w["embedding.weight"])


def test_the_model_is_a_llama():
    """In float32 and with plain rotary angles, logits and every gradient against the plainest torch."""
    model = GPTModel(replace(TINY, rope_scaling=None), compute_dtype=torch.float32)
    model.initialize(3, std=0.1)
    plain = PlainLlama(dict(model.named_parameters()))
    tokens = torch.randint(TINY.vocab, (2, 21))
    labels = torch.randint(TINY.vocab, (2, 21))
    for logits in (ours := model(tokens), theirs := plain(tokens)):
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for name, parameter in model.named_parameters():
        expected = plain.w[name].grad
        assert (parameter.grad - expected).norm() < 1e-4 * expected.norm(), name


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_parameters_are_counted_right(size):
    shape = MODELS["llama32-1b"][size]
    with torch.device("meta"):
        model = GPTModel(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    if size == "full":
        assert shape.parameters == 1_235_814_400  # as published


def test_tiny_keeps_the_ratios():
    tiny, full = (MODELS["llama32-1b"][size] for size in ("tiny", "full"))
    assert full.hidden / full.ffn == tiny.hidden / tiny.ffn
    assert full.heads / full.kv_heads == tiny.heads / tiny.kv_heads
    assert tiny.heads * tiny.head_dim == tiny.hidden and full.heads * full.head_dim == full.hidden


def test_initial_weights_are_as_megatrons_and_repeatable():
    first, second, other = (GPTModel(TINY) for _ in range(3))
    first.initialize(5)
    second.initialize(5)
    other.initialize(6)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.dim() < 2:
            assert torch.equal(a, torch.ones_like(a))
            continue
        assert not torch.equal(a, c)
        residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        expected = 0.02 / math.sqrt(2 * TINY.layers) if residual else 0.02
        assert float(a.detach().std()) == pytest.approx(expected, rel=0.02)
