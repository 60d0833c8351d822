"""Matrix products of training, operands rounded to a format: a linear layer's three GEMMs, and a batched product.

Each operand of each GEMM has a spec of its own (None leaves it as it is) and is quantized along the axis that this
GEMM contracts. A tensor that enters two GEMMs is quantized twice, from the original unless the formats say otherwise,
along two axes:

    forward   y  = x · wᵀ      x along its last axis (in),   w along its last axis (in)
    dgrad     dx = dy · w      dy along its last axis (out),  w along its first axis (out)
    wgrad     dw = dyᵀ · x     dy along the tokens,           x along the tokens

If a GEMM's operands are rotated (`hadamard`), it multiplies the rotated tensors: the rotations cancel in the product.

Products themselves run in the tensors' dtype with torch's matmul (bfloat16 operands, float32 accumulation).

A `tap` receives every operand and result, with the quantized tensor where there is one, and must not modify them.
Tensors are not copied for it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from binade.quant.delayed import ScaleHistory
from binade.quant.memory import without_modes
from binade.quant.quantizer import apply
from binade.quant.specs import OPERAND_FIELDS, GemmFormats, Spec
from binade.quant.transform import coded_mean, transform, transform_back, untransformed


@dataclass(frozen=True)
class Observed:
    """The argument of a tap: an operand (with the quantized tensor, if any) or a result of a GEMM.

    tensor     the operand before any rounding, or the result
    name       of the forward product "a", "b", "y"; of dgrad "grad", "dgrad_b", "grad_a"; of wgrad "wgrad_grad",
               "wgrad_a", "grad_b". An operand that had a name in an earlier GEMM is shown before it is rounded
    spec       of the operand; None if it runs as it is, and None for a result
    quantized  the operand as the product takes it: of the coded values, if the spec transforms them. The product adds
               what a mean that was subtracted contributes, see `quant.transform`
    source     what was rounded, if not `tensor`: of a backward operand, the rounded forward operand
    coded      what was rounded to `quantized`: `source` or `tensor`, or the coded values of this
    scales     block scales as `quantizer.apply` returns them
    dim        the axis of `tensor` that was contracted (operands)
    absmax     the scale that delayed scaling used
    noise_seed of stochastic rounding
    sign_seed  of random signs
    shape      the shape to show the tensor in, where the product works on a reshaped one
    rounded    rounds a forward operand to the same values once more, transformed back
    exact      the result of the same GEMM on operands that are not rounded; None if neither operand is rounded
    hidden     of a map of attention, which values the softmax does not see: bool, of that shape or expanding to it
    by_model   whether the model's own code rounds the operands of this GEMM, and no recipe does
    """

    name: str
    tensor: Tensor
    spec: Spec | None = None
    quantized: Tensor | None = None
    source: Tensor | None = None
    coded: Tensor | None = None
    scales: Tensor | None = None
    dim: int = -1
    absmax: Tensor | None = None
    noise_seed: int = 0
    sign_seed: int = 0
    shape: tuple[int, ...] | None = None
    rounded: Callable[[], Tensor] | None = None
    exact: Callable[[], Tensor] | None = None
    hidden: Tensor | None = None
    by_model: bool = False


Tap = Callable[[Observed], None]


@dataclass(frozen=True)
class Rounding:
    """How a product's operands are rounded.

    formats     the spec of each
    backend     see `quantizer.fake_quantize`
    seed        of this call: random signs depend on it and the GEMM, stochastic rounding on it and the operand
    histories   the absmax history of each operand with delayed scaling, by its name in GemmFormats; kept by the caller
    used        the scales that delayed scaling has used in this product, by operand: an operand enters its history
                once, whatever is computed again. None: of a product that has not begun
    trains      False in an evaluation, which leaves the histories alone
    heads       how many heads the rows of the first operand and of the gradient belong to, one after the other, in a
                product of heads that share the second operand; each head is rounded on its own
    """

    formats: GemmFormats
    backend: str = "auto"
    seed: int = 0
    histories: MutableMapping[str, ScaleHistory] | None = None
    used: MutableMapping[str, Tensor] | None = None
    trains: bool = True
    heads: int = 1

    def begun(self) -> Rounding:
        """The rounding of one product, which knows the scales that it used."""
        return self if self.used is not None else replace(self, used={})

    def by_head(self, x: Tensor, which: str) -> Tensor:
        """The operand x [..., heads · m, k] as [..., heads, m, k], if its rows belong to several heads."""
        if self.heads == 1 or which in ("forward_b", "dgrad_b"):
            return x
        return x.reshape(*x.shape[:-2], self.heads, -1, x.shape[-1])

    def operand(
        self, x: Tensor, which: str, dim: int, tap: Tap | None = None, name: str = "", original: Tensor | None = None
    ) -> Tensor:
        """The operand x as the product uses it; it is shown to the tap under this name. original: the operand before
        any rounding, if x is its rounded forward value."""
        spec = self.formats[which]
        shown, source = self.by_head(x, which).detach(), None
        if original is not None:
            shown, source = self.by_head(original, which).detach(), shown
        if spec is None:
            if tap:
                tap(Observed(name, shown, source=source, dim=dim))
            return x
        with without_modes():
            return self._rounded(x, spec, which, dim, tap, Observed(name, shown, spec, source=source, dim=dim))

    def _rounded(self, rows: Tensor, spec: Spec, which: str, dim: int, tap: Tap | None, seen: Observed) -> Tensor:
        x, index = self.by_head(rows, which), OPERAND_FIELDS.index(which)
        signs = self._signs(which)
        coded = transform(x, spec, dim, signs)
        scale = self._delayed_scale(coded, spec, which) if spec.history else None
        seed, plain = self.seed * len(OPERAND_FIELDS) + index, untransformed(spec)
        q, scales = apply(coded, plain, dim, self.backend, tap is not None, seed, scale)
        if tap:

            def rounded() -> Tensor:
                operand = transform(x, spec, dim, signs)
                return transform_back(apply(operand, plain, dim, seed=seed, absmax=scale)[0], x, spec, dim, signs)

            used = replace(seen, quantized=q, coded=coded, scales=scales, absmax=scale, rounded=rounded)
            tap(replace(used, noise_seed=seed, sign_seed=signs))
        return q.view_as(rows) if self.heads > 1 else q

    def _delayed_scale(self, x: Tensor, spec: Spec, which: str) -> Tensor:
        histories, used = self.histories, self.used
        if used is not None and which in used:
            return used[which].to(x.device)
        history = ScaleHistory(spec) if histories is None else histories.setdefault(which, ScaleHistory(spec))
        scale = history.use(x, self.trains)
        if used is not None:
            used[which] = scale
        return scale

    def _signs(self, which: str) -> int:
        """The seed of an operand's random signs, the same for both operands of a GEMM."""
        return self.seed * 3 + OPERAND_FIELDS.index(which) // 2

    def mean(self, x: Tensor, which: str, dim: int) -> Tensor | None:
        """What was subtracted from each token of the operand x before it was rounded: see `transform.coded_mean`."""
        with without_modes():
            return coded_mean(x, self.formats[which], dim, self._signs(which))

    def exact(self, gemm: str, product: Callable[[], Tensor]) -> Callable[[], Tensor] | None:
        """The product, for `Observed.exact`; None if this GEMM takes both operands as they are."""
        return product if self.formats.rounds(gemm) else None

    def check_differentiable(self) -> None:
        """Raises RuntimeError in a backward pass that is itself differentiated, if the product is quantized."""
        # `once_differentiable` would let a product pass whose gradient is a constant, such as that of y.sum().
        if torch.is_grad_enabled() and self.formats.quantized:
            raise RuntimeError(
                "a quantized product cannot be differentiated twice: call backward without create_graph=True, or "
                "without quantization"
            )

    def forward_again(self, x: Tensor, which: str, forward: str, dim: int) -> Tensor:
        """The tensor that a backward operand is rounded from: the original, or its rounded forward value."""
        return self.rounded_forward(x, forward, dim) if which in self.formats.of_rounded else x

    def rounded_forward(self, x: Tensor, forward: str, dim: int) -> Tensor:
        """A forward operand, rounded once more as in the forward product."""
        spec = self.formats[forward]
        if spec is None:
            return x
        seed = self.seed * len(OPERAND_FIELDS) + OPERAND_FIELDS.index(forward)
        signs, scale = self._signs(forward), (self.used or {}).get(forward)
        q = apply(self.by_head(x, forward), spec, dim, self.backend, seed=seed, absmax=scale, sign_seed=signs)[0]
        return q.view_as(x) if self.heads > 1 else q


def multiply(a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
    """a [..., m, k] · b [..., k, n], in their dtype. plus: float32, broadcast to the result and added before that is
    rounded.

    On a CPU, 16-bit operands are multiplied in float32 and the result is rounded once: without AVX-512, torch's own
    bfloat16 product can take a hundred times as long. On a GPU, plus is rounded to their dtype first.
    """
    dtype = a.dtype
    # Autocast would multiply in 16 bits again.
    with torch.autocast("cpu", enabled=False) if a.device.type == "cpu" else nullcontext():
        if a.device.type == "cpu" and dtype == b.dtype and dtype in (torch.bfloat16, torch.float16):
            a, b = a.float(), b.float()
        if plus is not None and a.dim() == 2:
            y = torch.addmm(plus.to(a.dtype), a, b)
        else:
            y = a @ b if plus is None else a @ b + plus.to(a.dtype)
    return y.to(dtype)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, transpose_b: bool, how: Rounding, tap: Tap | None) -> Tensor:
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b)  # of a frozen weight, a may be overwritten
        how = how.begun()
        ctx.transpose_b, ctx.how, ctx.tap = transpose_b, how, tap
        return forward(a, b, how, transpose_b=transpose_b, tap=tap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        how: Rounding = ctx.how
        how.check_differentiable()
        a, b = ctx.saved_tensors
        da, db = gradients(a, b, grad, how, ctx.needs_input_grad, transpose_b=ctx.transpose_b, tap=ctx.tap)
        return da, db, None, None, None


def gradients(
    a: Tensor,
    b: Tensor,
    grad: Tensor,
    how: Rounding,
    needed: Sequence[bool],
    *,
    transpose_b: bool = False,
    tap: Tap | None = None,
    dgrad_dtype: torch.dtype | None = None,
    rounded_a: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a and b from that of `matmul`'s result, each if it is needed. dgrad_dtype: in which dgrad is
    computed, if not in that of its operands. rounded_a: what wgrad takes in place of a; default: what the formats
    say."""
    da = db = None
    if needed[0]:
        da = dgrad(grad, b, how, transpose_b=transpose_b, tap=tap, dtype=dgrad_dtype)
    else:
        how.operand(grad, "dgrad_grad", -1, tap, "grad")
    if needed[1]:
        source = how.forward_again(a, "wgrad_a", "forward_a", -1) if rounded_a is None else rounded_a
        rounded_a = None if source is a else source
        if b.dim() == 2:  # contracted over the batch axes that b lacks, too
            grad, a = grad.flatten(0, -2), a.flatten(0, -2)
            rounded_a = None if rounded_a is None else rounded_a.flatten(0, -2)
        db = wgrad(grad, a, how, transpose_b=transpose_b, tap=tap, rounded_a=rounded_a)
    return da, db


def forward(a: Tensor, b: Tensor, how: Rounding, *, transpose_b: bool = False, tap: Tap | None = None) -> Tensor:
    """The forward GEMM of `matmul`, without a backward pass."""
    aq = how.operand(a, "forward_a", -1, tap, "a")
    bq = how.operand(b, "forward_b", -1 if transpose_b else -2, tap, "b")
    y = _with_mean(aq, bq.transpose(-1, -2) if transpose_b else bq, how.mean(a, "forward_a", -1))
    if tap:
        right = (b.transpose(-1, -2) if transpose_b else b).detach()
        exact = how.exact("forward", lambda: multiply(a.detach(), right))
        tap(Observed("y", y, exact=exact))
    return y


def dgrad(
    grad: Tensor,
    b: Tensor,
    how: Rounding,
    *,
    transpose_b: bool = False,
    tap: Tap | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The gradient of a: grad [..., m, n] · bᵀ [..., n, k]. dtype: in which it is computed, if not in that of its
    operands."""
    gq = how.operand(grad, "dgrad_grad", -1, tap, "grad")
    source = how.forward_again(b, "dgrad_b", "forward_b", -1 if transpose_b else -2)
    bq = how.operand(source, "dgrad_b", -2 if transpose_b else -1, tap, "dgrad_b", None if source is b else b)
    gq, bq = (x.to(dtype or x.dtype) for x in (gq, bq))
    da = _with_mean(gq, bq if transpose_b else bq.transpose(-1, -2), how.mean(grad, "dgrad_grad", -1))
    if tap:
        exact = how.exact("dgrad", lambda: multiply(grad, b if transpose_b else b.transpose(-1, -2)))
        tap(Observed("grad_a", da, exact=exact))
    return da


def wgrad(
    grad: Tensor,
    a: Tensor,
    how: Rounding,
    *,
    transpose_b: bool = False,
    tap: Tap | None = None,
    rounded_a: Tensor | None = None,
) -> Tensor:
    """The gradient of b: aᵀ [..., k, m] · grad [..., m, n], transposed if transpose_b. rounded_a: what it takes in
    place of a; default: what the formats say."""
    source = how.forward_again(a, "wgrad_a", "forward_a", -1) if rounded_a is None else rounded_a
    gq = how.operand(grad, "wgrad_grad", -2, tap, "wgrad_grad")
    aq = how.operand(source, "wgrad_a", -2, tap, "wgrad_a", None if source is a else a)
    nu, mu = how.mean(grad, "wgrad_grad", -2), how.mean(source, "wgrad_a", -2)
    of_means = None if nu is None or mu is None else _wgrad(nu, mu, transpose_b) * len(grad)
    db = _wgrad(gq, aq, transpose_b, of_means)
    if tap:
        tap(Observed("grad_b", db, exact=how.exact("wgrad", lambda: _wgrad(grad, a, transpose_b))))
    return db


def _with_mean(a: Tensor, b: Tensor, mean: Tensor | None) -> Tensor:
    """The product of (a + mean) and b; mean is that of a's tokens, [1, k] float32."""
    return multiply(a, b, None if mean is None else multiply(mean, b.float()))


def _wgrad(grad: Tensor, a: Tensor, transpose_b: bool, plus: Tensor | None = None) -> Tensor:
    a = a.to(grad.dtype)
    left, right = (grad, a) if transpose_b else (a, grad)
    return multiply(left.transpose(-1, -2), right, plus)


def matmul(a: Tensor, b: Tensor, how: Rounding, *, transpose_b: bool = False, tap: Tap | None = None) -> Tensor:
    """a [..., m, k] · b [..., k, n] (or bᵀ with b [..., n, k]) -> [..., m, n], its three GEMMs rounded as `how` says.

    The batch axes of a and b must be equal, unless b is a matrix: nothing else is broadcast.
    """
    y = _Matmul.apply(_as_it_is(a), _as_it_is(b), transpose_b, how, tap)  # type: ignore[no-untyped-call]  # torch
    return cast(Tensor, y)


def _as_it_is(x: Tensor) -> Tensor:
    """x, of which the backward pass uses the values that it has now: autograd saves a weight by reference, and training
    code may replace its `data` before the backward pass. A view of x keeps the memory that was multiplied."""
    return x.view_as(x) if x.is_leaf else x


def linear(x: Tensor, weight: Tensor, how: Rounding, *, tap: Tap | None = None) -> Tensor:
    """x [..., in] · weightᵀ [in, out] -> [..., out], its three GEMMs rounded as `how` says. Dtypes must agree.

    The leading axes are merged into one axis of tokens, as tiles need it; the tap gets the tensors' original shapes.
    """
    if x.dim() <= 2:
        return matmul(x, weight, how, transpose_b=True, tap=tap)

    def show(seen: Observed) -> None:
        by_token = seen.name not in ("b", "dgrad_b", "grad_b")
        tap(replace(seen, shape=(*x.shape[:-1], seen.tensor.shape[-1])) if by_token else seen)  # type: ignore[misc]

    y = matmul(x.flatten(0, -2), weight, how, transpose_b=True, tap=show if tap else None)
    return y.view(*x.shape[:-1], y.shape[-1])
