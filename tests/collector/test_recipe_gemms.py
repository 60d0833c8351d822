"""What really enters each GEMM of a training step under each recipe, to the bit.

A dispatch mode keeps the operands of every matrix product that torch computes; torch's hooks give the tensors that they
were made of. Each operand must be fake_quantize of its tensor in the format that the recipe says, along the axis that
the product contracts, or the tensor itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from binade.collector.capture.instrument import instrument
from binade.collector.cli.options import parse
from binade.collector.models.model import GPTModel
from binade.collector.recipes.recipe import TEN_RECIPES
from binade.collector.training.plan import plan
from binade.quant import fake_quantize
from tests.collector.small_model import SHAPE, Hooks, batch
from tests.collector.test_recipe import EXPECTED

MIXED = (
    "run", "--quantization", "FA_mxfp4", "--linear-quant", "hifp8", "--dgrad-quant", "mxfp8", "--wgrad-quant", "bf16",
    "--pv-quant", "mxint8", "--operand-quant", "linear.wgrad.input=mxfp6_e2m3,linear.forward.weight=bf16",
    "--operand-quant", "qk.dkey.query=mxfp6_e3m2,pv.forward.value=bf16,pv.dvalue.attention_probs=nvfp4",
)  # fmt: skip
MIXED_FORMATS = (
    ("hifp8", None, "mxfp8_e5m2", "mxfp8", None, "mxfp6_e2m3"),
    ("mxfp4", "mxfp4", None, None, None, "mxfp6_e3m2"),
    ("mxint8", None, None, None, None, "nvfp4"),
)
LINEARS = ("qkv", "proj", "fc1", "fc2")


class Products(TorchDispatchMode):
    """Every matrix product: (left, right, result). On a CPU, `gemm.multiply` adds in float32 and rounds the result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            left, right = (x.detach().clone() for x in args)
            self.seen.append((left, right, result.bfloat16()))
        return result


class Step:
    """A step of a one-layer model: its products by name and GEMM (("fc1", 0) is fc1's forward, ("qk", 2) gives the
    key's gradient), and the tensors that torch's hooks saw ("fc1.input")."""

    def __init__(self, recipe) -> None:
        self.model = GPTModel(replace(SHAPE, layers=1))
        self.model.initialize(0)
        hooks = Hooks(self.model)
        self.model.final_layernorm.register_forward_hook(
            lambda *call: self.raw.update({"head.input": call[2].detach()})
        )
        self.raw: dict[str, Tensor] = {}
        tokens, labels = batch()
        with instrument(self.model, recipe, backend="torch"), Products() as products:
            F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten()).backward()
        hooks.remove()
        self.raw |= {f"{module}.{name}": x for (_, module, name), x in hooks.seen.items()}
        forward = ["qkv", "qk", "pv", "proj", "fc1", "fc2", "head"]
        assert len(products.seen) == 3 * len(forward)
        order = [(name, 0) for name in forward] + [(name, gemm) for name in reversed(forward) for gemm in (1, 2)]
        self.products = dict(zip(order, products.seen, strict=True))

    def linear(self, module: str) -> Iterator[tuple[str, Tensor, Tensor, int, bool]]:
        """As `core`, for the six operands of a linear layer in the order of GemmFormats."""
        x, grad = (self.raw[f"{module}.{name}"].flatten(0, 1) for name in ("input", "grad_output"))
        w = self.raw[f"{module}.weight"]
        (x0, w0, _), (g1, w1, _), (g2, x2, _) = (self.products[module, gemm] for gemm in range(3))
        yield from (
            ("forward input", x0, x, -1, False),
            ("forward weight", w0, w, -1, True),
            ("dgrad grad_output", g1, grad, -1, False),
            ("dgrad weight", w1, w, 0, False),
            ("wgrad grad_output", g2, grad, 0, True),
            ("wgrad input", x2, x, 0, False),
        )

    def core(self) -> dict[str, tuple[tuple[str, Tensor, Tensor, int, bool], ...]]:
        """Of QK^T and PV the six operands: name, what entered the GEMM, the tensor, the axis to quantize along, and
        whether it entered transposed."""
        heads, groups, dim = SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim
        q, k, v, grad = (self.raw[f"core.{name}"] for name in ("query", "key", "value", "grad_output"))
        length = q.shape[2]
        q, grad = (x.reshape(-1, heads // groups * length, dim) for x in (q, grad))  # [batch x groups, rows, dim]
        k, v = (x.flatten(0, 1) for x in (k, v))
        (q0, k0, product), (ds1, k1, _), (ds2, q2, _) = (self.products["qk", gemm] for gemm in range(3))
        (p0, v0, _), (do1, v1, grad_probs), (p2, do2, _) = (self.products["pv", gemm] for gemm in range(3))
        # What lies between the products, from what they really gave.
        product = product.requires_grad_()
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (product * dim**-0.5).view(-1, heads // groups, length, length).float()
        probs = scores.masked_fill(future, -torch.inf).softmax(-1).bfloat16().view_as(product)
        (grad_product,) = torch.autograd.grad(probs, product, grad_probs)
        probs = probs.detach()
        return {
            "qk": (
                ("forward query", q0, q, -1, False),
                ("forward key", k0, k, -1, True),
                ("dquery grad_scores", ds1, grad_product, -1, False),
                ("dquery key", k1, k, -2, False),
                ("dkey grad_scores", ds2, grad_product, -2, True),
                ("dkey query", q2, q, -2, False),
            ),
            "pv": (
                ("forward attention_probs", p0, probs, -1, False),
                ("forward value", v0, v, -2, False),
                ("dprobs grad_output", do1, grad, -1, False),
                ("dprobs value", v1, v, -1, True),
                ("dvalue grad_output", do2, grad, -2, False),
                ("dvalue attention_probs", p2, probs, -2, True),
            ),
        }


def by_head(x: torch.Tensor, fmt: str, axis: int) -> torch.Tensor:
    """x rounded, of query heads that share keys each head by itself: a block does not run from one into the next."""
    shared = SHAPE.heads // SHAPE.kv_heads
    rows = x.shape[-2] // shared
    if axis == -1:
        return fake_quantize(x, fmt, axis)
    return fake_quantize(x.view(x.shape[0], shared, rows, x.shape[-1]), fmt, axis).view_as(x)


CASES = {name: (name, EXPECTED[name]) for name in (*TEN_RECIPES, "mxfp8", "nvfp4")} | {"mixed": (MIXED, MIXED_FORMATS)}


@pytest.mark.parametrize("case", CASES)
def test_every_gemm_gets_exactly_what_the_recipe_says(case):
    asked, (linear, qk, pv) = CASES[case]
    if case == "mixed":
        (config,) = parse(asked).runs
        asked = plan(config).recipe
    step = Step(asked)
    operands = {module: (step.linear(module), linear) for module in LINEARS}
    operands |= {part: (six, {"qk": qk, "pv": pv}[part]) for part, six in step.core().items()}
    for product, (six, formats) in operands.items():
        for (name, entered, raw, axis, transposed), fmt in zip(six, formats, strict=True):
            shared = product in ("qk", "pv") and name.split()[1] not in ("key", "value")
            rounding = by_head if shared else fake_quantize
            expected = raw if fmt is None else rounding(raw, fmt, axis)
            entered = entered.mT if transposed else entered
            assert torch.equal(entered, expected.to(entered.dtype)), f"{product} {name} is not in {fmt or 'bf16'}"
            assert fmt is None or not torch.equal(expected, raw), f"{product} {name}: {fmt} changes nothing"


@pytest.mark.parametrize("case", ["mxfp4", "linear_hifp8"])
def test_the_lm_head_is_never_quantized(case):
    step = Step(case)
    _, labels = batch()
    x, weight = step.raw["head.input"].flatten(0, 1), step.model.embedding.weight.detach().bfloat16()
    left, right, logits = step.products["head", 0]
    assert torch.equal(left, x.float()) and torch.equal(right.t(), weight.float())
    logits = logits.requires_grad_()
    by_sequence = logits.view(labels.shape[1], len(labels), -1).float().transpose(0, 1)
    (grad,) = torch.autograd.grad(F.cross_entropy(by_sequence.flatten(0, 1), labels.flatten()), logits)
    (first, second), (third, fourth) = (step.products["head", gemm][:2] for gemm in (1, 2))
    assert torch.equal(first, grad.float()) and torch.equal(second, weight.float())
    assert torch.equal(third.t(), grad.float()) and torch.equal(fourth, x.float())
