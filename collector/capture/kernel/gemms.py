"""One product that is rounded or recorded: its forward GEMM, and a GEMM of its backward pass.

What is not rounded is computed by torch's own kernel, and shown to the tap as quant.gemm shows its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from binade.collector.capture.kernel.operands import BatchAxis, KernelOperands, Orientation, ProductShape
from binade.collector.capture.kernel.overrides import Compute
from binade.collector.models.parallel import Call, add_bias
from binade.data.run.tensor_kinds import Gemm
from binade.quant import gemm
from binade.quant.gemm import Observed, Tap


@dataclass(frozen=True)
class PartialCall:
    """One call of a product, and which rows of a batch of experts it has: an expert's matrices, or tokens."""

    call: Call
    expert: int = 0
    tokens: slice | None = None

    def of(self, x: Tensor, batch: BatchAxis, is_weight: bool) -> Tensor:
        """What this call multiplies of an operand of all experts, or its part of a result."""
        if batch in (BatchAxis.EXPERTS, BatchAxis.TOKENS) and (is_weight or self.tokens is None):
            return x[self.expert]
        return x if self.tokens is None else x[self.tokens]


@dataclass(eq=False)
class KeptProduct:
    """A forward product whose backward pass may come.

    with_dgrad  whether x needs a gradient
    thread      the number of the thread that computed it
    gradient    the memory of the gradient that its last dgrad had
    wgrads      how often its wgrad was seen
    """

    shape: ProductShape
    batch: BatchAxis
    parts: tuple[PartialCall, ...]
    with_dgrad: bool
    thread: int
    gradient: int = 0
    wgrads: int = 0


def forward(
    given: KernelOperands,
    second_left: bool,
    batch: BatchAxis,
    parts: Sequence[PartialCall],
    compute: Compute,
    late: list[Tap] | None,
) -> Tensor:
    """late: where to leave the taps of results to which a bias is added after this kernel."""
    orientation = Orientation(Gemm.FORWARD, second_left)
    x, weight = orientation.canonical(given)
    shown = [
        _but_result(part.call.tap) if late is not None or given.added is not None else part.call.tap for part in parts
    ]
    if not any(part.call.quantizes for part in parts):
        for part, tap in zip(parts, shown, strict=True):
            if tap:
                tap(Observed("a", _matrix(part.of(x, batch, False), batch, False)))
                tap(Observed("b", _matrix(part.of(weight, batch, True), batch, True)))
        result = compute()
        for part, tap in zip(parts, shown, strict=True):
            if tap and late is None:
                y = _matrix(part.of(orientation.result(result), batch, False), batch, False)
                (part.call.tap or tap)(Observed("y", y))
    else:
        ys = []
        for part, tap in zip(parts, shown, strict=True):
            shown_call = part.call if tap is part.call.tap else replace(part.call, tap=tap)
            cached, call = shown_call.cached(_matrix(part.of(x, batch, False), batch, False))
            b = _matrix(part.of(weight, batch, True), batch, True)
            ys.append(gemm.forward(cached, b, call.rounding, transpose_b=True, tap=call.tap))
        y = _joined(ys, parts, batch, (*x.shape[:-1], weight.shape[-2]))
        result = orientation.result(y * given.scale if given.scale != 1 else y).contiguous()
        if given.added is not None:
            added = given.added if given.factor == 1 else given.added * given.factor
            result = add_bias(result, added) if given.added.dim() == 1 else result + added.to(result.dtype)
            for part in parts:
                if part.call.tap:
                    part.call.tap(Observed("y", orientation.result(result)))
    if late is not None:
        late += [part.call.tap for part in parts if part.call.tap]
    return result


def backward(kept: KeptProduct, orientation: Orientation, given: KernelOperands, compute: Compute) -> Tensor:
    batch, parts, which = kept.batch, kept.parts, orientation.gemm
    first, second = orientation.canonical(given)
    is_weight = which is not Gemm.WGRAD
    quantizes = any(part.call.quantizes for part in parts)
    result = None if quantizes else compute()
    results = []
    for part in parts:
        tap = part.call.tap
        a = _matrix(part.of(first, batch, False), batch, False)
        b = _matrix(part.of(second, batch, is_weight), batch, is_weight)
        if result is None:
            results.append(_rounded(which, a, b, part.call, kept.with_dgrad))
        elif tap and which is not Gemm.FORWARD:
            y = part.of(orientation.result(result), batch, not is_weight)
            if which is Gemm.WGRAD and batch is BatchAxis.REPEATED:
                y = y.sum(0)
            _show(which, a, b, _matrix(y, batch, False), tap, kept.with_dgrad)
    if result is not None:
        return result
    if which is Gemm.WGRAD:
        y = _joined_weights(results, parts, batch, given)
    else:
        y = _joined(results, parts, batch, (*first.shape[:-1], second.shape[-2 if which is Gemm.FORWARD else -1]))
    return orientation.result(y).contiguous()


def _rounded(which: Gemm, a: Tensor, b: Tensor, call: Call, with_dgrad: bool) -> Tensor:
    how, tap = call.rounding, call.tap
    if which is Gemm.FORWARD:
        return gemm.forward(a, b, how, transpose_b=True)
    if which is Gemm.DGRAD:
        return gemm.dgrad(a, b, how, transpose_b=True, tap=tap)
    if not with_dgrad:
        how.operand(a, "dgrad_grad", -1, tap, "grad")
    return gemm.wgrad(a, b, how, transpose_b=True, tap=tap)


def _show(which: Gemm, a: Tensor, b: Tensor, y: Tensor, tap: Tap, with_dgrad: bool) -> None:
    """Show a backward GEMM that is not rounded, as quant.gemm shows its own."""
    if which is Gemm.DGRAD or not with_dgrad:
        tap(Observed("grad", a))
    if which is Gemm.DGRAD:
        tap(Observed("dgrad_b", b, dim=-2))
        tap(Observed("grad_a", y))
    else:
        tap(Observed("wgrad_grad", a, dim=-2))
        tap(Observed("wgrad_a", b, dim=-2))
        tap(Observed("grad_b", y))


def _matrix(x: Tensor, batch: BatchAxis, is_weight: bool) -> Tensor:
    """One matrix for the whole batch, if the weight is repeated."""
    if batch is not BatchAxis.REPEATED or x.dim() == 2:
        return x
    return x[0] if is_weight else x.flatten(0, -2)


def _joined(ys: Sequence[Tensor], parts: Sequence[PartialCall], batch: BatchAxis, shape: Sequence[int]) -> Tensor:
    """The result of all parts; zeros for experts and tokens without one."""
    if batch in (BatchAxis.NONE, BatchAxis.REPEATED, BatchAxis.GROUPS):
        return ys[0].view(shape)
    result = ys[0].new_zeros(shape)
    for y, part in zip(ys, parts, strict=True):
        result[part.expert if part.tokens is None else part.tokens] = y
    return result


def _joined_weights(
    ys: Sequence[Tensor], parts: Sequence[PartialCall], batch: BatchAxis, given: KernelOperands
) -> Tensor:
    """The weights' gradient [batch, n, k]. Of a repeated weight, whose gradient autograd sums over the batch, the first
    has the whole, and the others zeros."""
    if batch in (BatchAxis.NONE, BatchAxis.GROUPS):
        return ys[0]
    experts = len(given.ends) if given.ends is not None else len(given.left)
    result = ys[0].new_zeros(experts, *ys[0].shape)
    for y, part in zip(ys, parts, strict=True):
        result[part.expert] = y
    return result


def _but_result(tap: Tap | None) -> Tap | None:
    """A tap for a product to whose result something is added later."""
    return tap and (lambda seen: tap(replace(seen, name="product") if seen.name == "y" else seen))
