"""Matrix products of training, operands rounded to a format: a linear layer's three GEMMs, and a batched product.

Each operand of each GEMM has a format of its own (None leaves it as it is) and is quantized along the axis that this
GEMM contracts. A tensor that enters two GEMMs is quantized twice, from the original, along two axes:

    forward   y  = x · wᵀ      x along its last axis (in),   w along its last axis (in)
    dgrad     dx = dy · w      dy along its last axis (out),  w along its first axis (out)
    wgrad     dw = dyᵀ · x     dy along the tokens,           x along the tokens

Products themselves run in the tensors' dtype with torch's matmul (bfloat16 operands, float32 accumulation).

A `tap` receives every operand and result, with the quantized tensor where there is one, and must not modify them.
Nothing is copied for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from binade.quant.formats import GemmFormats
from binade.quant.quantizer import apply, plan


@dataclass(frozen=True)
class Observed:
    """What a tap receives: an operand (with the quantized tensor, if any) or a result of a GEMM.

    name       "a", "b", "y" of the forward product; "grad", "grad_a", "grad_b" of the backward
    format     the operand's format, None if it runs as it is, and None for a result
    dim        the axis of `tensor` that was contracted (operands)
    scales     block scales as `quantizer.apply` returns them
    shape      the shape to show the tensor in, where the product works on a reshaped one
    """

    name: str
    tensor: Tensor
    format: str | None = None
    quantized: Tensor | None = None
    scales: Tensor | None = None
    dim: int = -1
    shape: tuple[int, ...] | None = None


Tap = Callable[[Observed], None]


def _operand(x: Tensor, fmt: str | None, dim: int, backend: str, tap: Tap | None = None, name: str = "") -> Tensor:
    if fmt is None:
        if tap:
            tap(Observed(name, x.detach(), dim=dim))
        return x
    q, scales = apply(x, plan(fmt), dim, backend, want_scales=tap is not None)
    if tap:
        tap(Observed(name, x.detach(), fmt, q, scales, dim))
    return q


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, transpose_b: bool, formats: GemmFormats, backend: str, tap: Tap | None
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.transpose_b, ctx.formats, ctx.backend, ctx.tap = transpose_b, formats, backend, tap
        aq = _operand(a, formats.forward_a, -1, backend, tap, "a")
        bq = _operand(b, formats.forward_b, -1 if transpose_b else -2, backend, tap, "b")
        y = aq @ (bq.transpose(-1, -2) if transpose_b else bq)
        if tap:
            tap(Observed("y", y))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        a, b = ctx.saved_tensors
        formats, backend, tap, transpose_b = ctx.formats, ctx.backend, ctx.tap, ctx.transpose_b
        gq = _operand(grad, formats.dgrad_grad, -1, backend, tap, "grad")
        da = db = None
        if ctx.needs_input_grad[0]:  # [m, n] · [n, k]
            bq = _operand(b, formats.dgrad_b, -2 if transpose_b else -1, backend)
            da = gq @ (bq if transpose_b else bq.transpose(-1, -2))
            if tap:
                tap(Observed("grad_a", da))
        if ctx.needs_input_grad[1]:  # contracted over m, and over the batch axes that b has not
            if b.dim() == 2:
                grad, a = grad.flatten(0, -2), a.flatten(0, -2)
            gq = _operand(grad, formats.wgrad_grad, -2, backend)
            aq = _operand(a, formats.wgrad_a, -2, backend)
            db = gq.transpose(-1, -2) @ aq if transpose_b else aq.transpose(-1, -2) @ gq
            if tap:
                tap(Observed("grad_b", db))
        return da, db, None, None, None, None


def matmul(
    a: Tensor,
    b: Tensor,
    formats: GemmFormats,
    *,
    transpose_b: bool = False,
    backend: str = "auto",
    tap: Tap | None = None,
) -> Tensor:
    """a [..., m, k] · b [..., k, n] (or bᵀ with b [..., n, k]) -> [..., m, n], quantized by `formats`.

    The batch axes of a and b must be equal, unless b is a matrix: nothing else is broadcast.
    """
    y = _Matmul.apply(a, b, transpose_b, formats, backend, tap)  # type: ignore[no-untyped-call]  # torch
    return cast(Tensor, y)


def linear(x: Tensor, weight: Tensor, formats: GemmFormats, *, backend: str = "auto", tap: Tap | None = None) -> Tensor:
    """x [..., in] · weightᵀ [in, out] -> [..., out], its three GEMMs quantized by `formats`. Dtypes must agree."""
    return matmul(x, weight, formats, transpose_b=True, backend=backend, tap=tap)
