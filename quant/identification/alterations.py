"""What kernels do otherwise than a spec: each alteration changes one step of `reference.quantize_blocks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from binade.quant.elements import E4M3, E5M2, Element, Overflow, RoundingMode
from binade.quant.identification.fitting import neighbors
from binade.quant.quantizer import fake_quantize
from binade.quant.reference import from_blocks, per_group, to_blocks
from binade.quant.rounding import round_to_element
from binade.quant.scheme import Factors, nan_max, read_back, scaled
from binade.quant.specs import Spec

SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Alteration:
    """One deviation from a spec. words completes "as the spec, but …". A step that is None is the spec's own.

    before   of the values x, any shape
    scale    of the block scales [groups, 1], with x [groups, block], the spec and the absmax of the outer blocks
    encode   x over its scale, of blocks of x and the factors of their scale
    scaled   of x over its scale
    round    of x over its scale: how it is rounded, with the spec
    values   of the rounded values, with the spec and x over its scale
    after    of the result
    """

    words: str
    before: Callable[[Tensor], Tensor] | None = None
    scale: Callable[[Tensor, Tensor, Spec, Tensor], Tensor] | None = None
    encode: Callable[[Tensor, Factors], Tensor] = scaled
    scaled: Callable[[Tensor], Tensor] | None = None
    round: Callable[[Tensor, Spec], Tensor] | None = None
    values: Callable[[Tensor, Spec, Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None

    def apply(self, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        """x [lines, axis] float32 rounded along its last axis. absmax as in `reference.outer_absmax`."""
        source = self.before(x) if self.before else x
        outer = per_group(absmax, source, -1, spec.block) if absmax.dim() else absmax
        blocks = to_blocks(source, -1, spec.block)
        scale = spec.scaling.block_scale(blocks, spec, outer)
        if self.scale:
            scale = self.scale(scale, blocks, spec, outer)
        factors = spec.scaling.factors(scale, spec, outer)
        encoded = self.encode(blocks, factors)
        if self.scaled:
            encoded = self.scaled(encoded)
        if self.round:
            values = self.round(encoded, spec)
            values = values if spec.format.element.signed_zero else values + 0.0
        else:
            values = round_to_element(encoded, spec.format.element, spec.rounding, spec.overflow)
        if self.values:
            values = self.values(values, spec, encoded)
        y = from_blocks(read_back(values, factors), x, -1, spec.block)
        return self.after(y) if self.after else y


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).float()


def _on(element: Element) -> Callable[[Tensor], Tensor]:
    return lambda x: round_to_element(x, element, RoundingMode.NEAREST, Overflow.SATURATE)


def _through(spec: str) -> Callable[[Tensor], Tensor]:
    return lambda x: fake_quantize(x, spec)


def _times(factor: float) -> Callable[[Tensor, Tensor, Spec, Tensor], Tensor]:
    """Scales that divide x grow by the factor; those that multiply it, as in current scaling, shrink."""

    def scale(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        if spec.scaling.per_element:
            return torch.cat((scale[:, :1] * factor, scale[:, 1:]), -1)
        return scale / factor if spec.scaling.factors(scale, spec, absmax).encode is scale else scale * factor

    return scale


def _stored(up: bool) -> Callable[[Tensor, Tensor, Spec, Tensor], Tensor]:
    """Scales rounded up or down to their stored element instead of to nearest."""

    def scale(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        element = spec.scaling.stored
        if element is None or not element.mantissa_bits or spec.scaling.per_element:
            return scale
        wanted = spec.scaling.wanted(nan_max(x), spec, absmax)[0]
        return neighbors(wanted, element)[up]

    return scale


def _of_bf16(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
    """Scales as a kernel has them that computes and stores them in bfloat16."""
    if spec.scaling.per_element or spec.scaling.stored is not None:
        return scale
    if spec.scaling.factors(scale, spec, absmax).encode is scale:
        return (1 / scale).to(BF16).float().reciprocal()
    return scale.to(BF16).float()


def _divided(x: Tensor, factors: Factors) -> Tensor:
    """x / scale, which a spec computes as x times float32(1 / scale)."""
    scale = read_back(torch.ones((), device=x.device), factors)
    return torch.where(scale == 0, scaled(x, factors), x / scale)


def _toward_zero(encoded: Tensor, spec: Spec) -> Tensor:
    return _unless_special(neighbors(encoded, spec.format.element)[0], encoded, spec, torch.inf)


def _away_from_zero(encoded: Tensor, spec: Spec) -> Tensor:
    return _unless_special(neighbors(encoded, spec.format.element)[1], encoded, spec, spec.format.max)


def _unless_special(values: Tensor, encoded: Tensor, spec: Spec, most: float) -> Tensor:
    """NaN where x over its scale is NaN, Infinity where it exceeds `most` and the spec does not saturate."""
    if spec.overflow == Overflow.INF:
        beyond = encoded.isinf() | (encoded.abs() > most)
        values = torch.where(beyond, torch.copysign(torch.full_like(values, torch.inf), encoded), values)
    return torch.where(encoded.isnan(), encoded, values)


def _down(encoded: Tensor, spec: Spec) -> Tensor:
    return torch.where(encoded < 0, _away_from_zero(encoded, spec), _toward_zero(encoded, spec))


def _half_toward_zero(encoded: Tensor, spec: Spec) -> Tensor:
    lower, upper = neighbors(encoded, spec.format.element)
    y = torch.where((encoded - lower).abs() <= (upper - encoded).abs(), lower, upper)
    return torch.where(encoded.isnan(), encoded, y)


def _flushed(values: Tensor, spec: Spec, encoded: Tensor) -> Tensor:
    return torch.where(values.abs() < 2.0 ** spec.format.element.tiers[0][0], values * 0.0, values)


def _signed_zero(values: Tensor, spec: Spec, encoded: Tensor) -> Tensor:
    return torch.where(values == 0, torch.copysign(values, encoded), values)


def _overflow_nan(values: Tensor, spec: Spec, encoded: Tensor) -> Tensor:
    return torch.where(encoded.abs() > spec.format.max, torch.nan, values)


def _largest_dropped(values: Tensor, spec: Spec, encoded: Tensor) -> Tensor:
    """The second largest code in place of the largest."""
    second = neighbors(values.new_tensor(spec.format.max * (1 - 2.0**-20)), spec.format.element)[0]
    return values.clamp(-second, second)


BF16, FP16 = torch.bfloat16, torch.float16
TOWARD_ZERO = Alteration("values are rounded toward 0 (truncated)", round=_toward_zero)
AWAY_FROM_ZERO = Alteration("values are rounded away from 0", round=_away_from_zero)
ALTERATIONS = (
    Alteration("x is rounded to bfloat16 first", before=_cast(BF16)),
    Alteration("x is rounded to float16 first", before=_cast(FP16)),
    Alteration("the result is rounded to bfloat16", after=_cast(BF16)),
    Alteration("the result is rounded to float16", after=_cast(FP16)),
    Alteration("x and the result are rounded to bfloat16", before=_cast(BF16), after=_cast(BF16)),
    Alteration("-0 becomes 0", after=lambda y: y + 0.0),
    Alteration("0 keeps the sign of x", values=_signed_zero),
    Alteration("float32 subnormals of x are flushed to 0",
               before=lambda x: torch.where(x.abs() < SMALLEST_NORMAL, x * 0.0, x)),
    Alteration("float32 subnormals of the result are flushed to 0",
               after=lambda y: torch.where(y.abs() < SMALLEST_NORMAL, y * 0.0, y)),
    Alteration("the element's subnormals are flushed to 0", values=_flushed),
    Alteration("what exceeds the largest code becomes NaN", values=_overflow_nan),
    Alteration("the largest code is not used", values=_largest_dropped),
    Alteration("scales are one binade higher", scale=_times(2.0)),
    Alteration("scales are one binade lower", scale=_times(0.5)),
    Alteration("scales are rounded up when they are stored", scale=_stored(True)),
    Alteration("scales are rounded down when they are stored", scale=_stored(False)),
    Alteration("scales are rounded to bfloat16", scale=_of_bf16),
    Alteration("x is divided by its scale, and not multiplied by the reciprocal", encode=_divided),
    TOWARD_ZERO,
    AWAY_FROM_ZERO,
    Alteration("values are rounded down", round=_down),
    Alteration("ties are rounded toward 0", round=_half_toward_zero),
    Alteration("values are rounded twice: x over its scale to bfloat16 first", scaled=_cast(BF16)),
    Alteration("values are rounded twice: x over its scale to float16 first", scaled=_cast(FP16)),
    Alteration("values are rounded twice: x over its scale to E4M3 first", scaled=_on(E4M3)),
    Alteration("values are rounded twice: x over its scale to E5M2 first", scaled=_on(E5M2)),
    Alteration("values are rounded twice: x to E4M3 first", before=_through("fp8_e4m3(scale=none)")),
    Alteration("values are rounded twice: x to E5M2 first", before=_through("fp8_e5m2(scale=none)")),
    Alteration("values are rounded twice: x to mxfp8 first", before=_through("mxfp8")),
    Alteration("values are rounded twice: x to mxfp8_e5m2 first", before=_through("mxfp8_e5m2")),
    Alteration("scales, and x over its scale, are rounded to bfloat16", scale=_of_bf16, scaled=_cast(BF16)),
)  # fmt: skip
"""The alterations that `identify` tries, the simplest first."""
