"""Hypotheses that are no change of one step: scales and codes that were taken from another place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from binade.quant.elements import E4M3
from binade.quant.identification.fitting import TOLERANCE, fits, groups_of, magnitudes
from binade.quant.identification.pair import Pair, differs, is_apart
from binade.quant.quantizer import apply
from binade.quant.specs import TENSOR, Spec

Compute = Callable[[Pair], Tensor]
BINADES = 40  # how far the absmax of another tensor may be
ULPS = 12  # how many float32 neighbors of an absmax are tried
OFF_BY_ULPS = 0.02  # the share of values that may be apart where the absmax is not the very one: those of tied scales
CLIPPING = 448 / 464  # of its own absmax, a smaller one gives a block scale that E4M3 does not round to its largest


def swapped(x: Tensor) -> Tensor:
    """Neighbors along the last axis, which share a byte if codes have 4 bits, in the other order."""
    return x.reshape(*x.shape[:-1], -1, 2).flip(-1).reshape(x.shape)


def either_neighbor(pair: Pair, spec: Spec) -> Compute:
    """q where it is one of the two neighbors that the spec's scale gives x, else the nearest."""

    def compute(part: Pair) -> Tensor:
        lower, upper = pair.steps(spec, part).bounds
        possible = ~differs(lower, part.q) | ~differs(upper, part.q)
        return torch.where(possible, part.q.float(), pair.rounded(spec, part))

    return compute


def is_between(pair: Pair, spec: Spec) -> bool:
    """Whether each q of a small sample is one of the two neighbors that the spec's scale gives x."""

    def decide() -> bool:
        few = pair.few(spec)
        lower, upper = pair.steps(spec, few).bounds
        return not bool((is_apart(lower, few.q) & is_apart(upper, few.q)).any())

    return pair.answer(("between", spec), decide)


def from_stochastic(pair: Pair, spec: Spec, part: Pair) -> float:
    """How far from stochastic rounding a part is: how often it is rounded up, and how often not to the nearest, in
    standard deviations. NaN if no value lies between two codes."""
    lower, upper = (bound.double() for bound in pair.steps(spec, part).bounds)
    between = (lower != upper) & lower.isfinite() & upper.isfinite()
    share = ((part.x.double() - lower) / (upper - lower))[between].clamp(0, 1)
    up = (part.q.double() == upper)[between].double()
    far = torch.where(share > 0.5, 1 - up, up)
    deviation = (share * (1 - share)).sum().sqrt()
    sums = torch.stack(((up - share).sum(), (far - torch.minimum(share, 1 - share)).sum()))
    return float(sums.abs().max() / deviation)


def other_absmax(pair: Pair, spec: Spec) -> tuple[Compute, str] | None:
    """The spec with another absmax of the tensor than that of x, if one explains the sample: of several, which are
    powers of two apart, the nearest that does not clip the block scales."""
    part = pair.sample(spec)
    x, q = groups_of(part.x, part.q, spec.block)
    if not len(q) or not bool(pair.absmax.isfinite()):
        return None
    least = 0.0 if spec.block == TENSOR else 0.25
    share, scale = fits(x, q, spec.format.element, False, TOLERANCE[part.q.dtype], least=least)
    one = scale[int(share.argmax())]
    if spec.block == TENSOR:  # known up to a power of two, where no value saturates or is subnormal
        wanted = one * torch.exp2(torch.arange(-BINADES, BINADES + 1, dtype=torch.float64))
        wanted = wanted * spec.scaling.shared(spec)[0] if hasattr(spec.scaling, "shared") else wanted
    else:
        wanted = one / magnitudes(E4M3)[1:] * spec.scaling.kernel_constant(spec)
    wanted = wanted[(wanted > 0) & wanted.isfinite()].float()

    def rounded(absmax: Tensor) -> Compute:
        return lambda part: apply(part.x, spec, -1, absmax=absmax)[0]

    def distance(absmax: Tensor) -> tuple[float, float]:
        y = rounded(absmax)(part)
        return float(is_apart(y, part.q).double().mean()), float(differs(y, part.q).double().mean())

    own, steps = pair.absmax, torch.arange(-ULPS, ULPS + 1, dtype=torch.int32)
    fitting = [a for a in wanted if distance(a)[0] < OFF_BY_ULPS]
    for one in sorted(fitting, key=lambda a: (bool(a < CLIPPING * own), abs(float(a.log2() - own.log2())))):
        near = (one.view(torch.int32) + steps[steps.abs().argsort(stable=True)]).view(torch.float32)
        absmax = min(near, key=distance)
        if not distance(absmax)[0]:
            return rounded(absmax), _other_absmax_words(absmax, own, len(fitting) > 1)
    return None


def _other_absmax_words(absmax: Tensor, own: Tensor, several: bool) -> str:
    """own: that of x. A few units in the last place come from the order of the arithmetic."""
    values = f"with an absmax of {float(absmax):.9g} instead of {float(own):.9g}"
    units = int(absmax.view(torch.int32)) - int(own.view(torch.int32))
    if abs(units) <= ULPS:
        return f"{values}, {units:+} in the last place, as of a tensor scale that is rounded otherwise"
    return f"{values}{', or that times a power of two' if several else ''}, as of another tensor"


def may_be_misread(pair: Pair, spec: Spec) -> bool:
    """Whether a corner of q holds the codes of the spec times one factor for each block, along either axis."""
    if not _has_own_factors(spec):
        return False
    part = replace(pair.corner, given=float(pair.absmax))
    y, own = _with_multipliers(part, spec)
    axis = y.shape[1]
    columns = spec.block.columns or axis if spec.block else axis
    codes = y.double() / own.repeat_interleave(columns, 1)[:, :axis]
    used = (codes != 0) & codes.isfinite()
    if not used.any() or bool((part.q[codes == 0] != 0).any()):
        return False
    factors = torch.where(used, part.q.double() / codes, torch.nan)
    return any(_one_a_block(one, columns, TOLERANCE[part.q.dtype]) for one in (factors, factors.T))


def _one_a_block(factors: Tensor, length: int, tolerance: float) -> bool:
    """Whether the factors along the last axis agree within blocks of this length, but for NaN."""
    blocks = pad(factors, (0, -factors.shape[-1] % length), value=torch.nan).reshape(-1, length)
    most = blocks.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(-1)
    least = blocks.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).amin(-1)
    return bool((least >= most * (1 - tolerance)).all())


def _has_own_factors(spec: Spec) -> bool:
    scaling = spec.scaling
    return spec.has_blocks and not scaling.per_element and scaling.outer in (None, TENSOR) and not scaling.of_blocks


def misread(pair: Pair, spec: Spec) -> Iterator[tuple[Compute, str]]:
    """The codes of the spec with scales from another place. What they compute has as many lines as the part."""
    if not _has_own_factors(spec):
        return
    y, own = _with_multipliers(pair, spec)
    rows = spec.block.rows or 1 if spec.block else 1
    grid = own[::rows]
    if min(grid.shape) > 1:
        other = grid.T.reshape(grid.shape).repeat_interleave(rows, 0)[: len(own)]
        yield _reading(y, own, other, spec), "the scales are transposed"
    if len(pair.shape) == 2 and spec.block and spec.block.columns and spec.block.columns != rows:
        turned = replace(pair, x=pair.x.T.contiguous(), q=pair.q.T.contiguous(), dim=1 - pair.dim)
        _, across = _with_multipliers(turned, spec)
        whole = across.repeat_interleave(spec.block.columns, 1)[:, : len(y)].T
        yield _reading(y, own, whole, spec), "read with the scales of the other axis"


def _with_multipliers(pair: Pair, spec: Spec) -> tuple[Tensor, Tensor]:
    """All of x rounded, and the factor of each block, float64 [lines, blocks]."""
    y, scales = apply(pair.x, spec, -1, want_scales=True, absmax=pair.outer(spec, pair))
    assert scales is not None
    factor = spec.scaling.multiplier(scales.reshape(-1, 1), spec, pair.absmax)
    return y, factor.reshape(len(pair.x), -1)


def _reading(y: Tensor, own: Tensor, other: Tensor, spec: Spec) -> Compute:
    """y with factors replaced: `other` is [lines, blocks], or one for each value."""
    axis = y.shape[1]
    columns = spec.block.columns or axis if spec.block else axis

    def compute(part: Pair) -> Tensor:
        lines = slice(0, len(part.x))
        mine = own[lines].repeat_interleave(columns, 1)[:, :axis]
        theirs = other[lines] if other.shape[1] == axis else other[lines].repeat_interleave(columns, 1)[:, :axis]
        return torch.where(mine == 0, 0.0, y[lines].double() / mine * theirs).float()

    return compute
