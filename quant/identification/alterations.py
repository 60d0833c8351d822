"""What kernels do otherwise than a spec: each alteration changes one step of `reference.quantize_blocks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from binade.quant.elements import E4M3, E5M2, Element, Overflow, RoundingMode
from binade.quant.identification.fitting import neighbors
from binade.quant.quantizer import fake_quantize
from binade.quant.reference import from_blocks, per_group, to_blocks
from binade.quant.rounding import round_to_element
from binade.quant.scaling import Amax, TwoLevel
from binade.quant.scheme import Factors, nan_max, read_back, scaled
from binade.quant.specs import TENSOR, Spec

SMALLEST_NORMAL = 2.0**-126
ChangeScale = Callable[[Tensor, Tensor, Spec, Tensor], Tensor]


@dataclass(frozen=True)
class Alteration:
    """One deviation from a spec. words completes "as the spec, but …". A step that is None is the spec's own.

    of       which specs it can change
    before   of the values x, any shape
    scale    of the block scales [groups, 1], with x [groups, block], the spec and the absmax of the outer blocks
    factors  what the scales stand for, of the same
    encode   x over its scale, of blocks of x and the factors of their scale
    scaled   of x over its scale
    round    of x over its scale: how it is rounded, with the spec
    values   of the rounded values, with the spec and x over its scale
    after    of the result
    """

    words: str
    of: Callable[[Spec], bool] = lambda spec: True
    before: Callable[[Tensor], Tensor] | None = None
    scale: ChangeScale | None = None
    factors: Callable[[Tensor, Tensor, Spec, Tensor], Factors] | None = None
    encode: Callable[[Tensor, Factors], Tensor] = scaled
    scaled: Callable[[Tensor], Tensor] | None = None
    round: Callable[[Tensor, Spec], Tensor] | None = None
    values: Callable[[Tensor, Spec, Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None

    def apply(self, steps: Steps) -> Tensor:
        """What is computed instead of these steps, float32 [lines, axis]. The absmax of `before` is the caller's."""
        spec, outer = steps.spec, steps.outer
        if self.before:
            steps = replace(steps, x=self.before(steps.x))
        scale = self.scale(steps.scale, steps.blocks, spec, outer) if self.scale else steps.scale
        if self.factors:
            factors = self.factors(scale, steps.blocks, spec, outer)
        else:
            factors = spec.scaling.factors(scale, spec, outer) if self.scale else steps.factors
        same = factors is steps.factors and self.encode is scaled
        encoded = steps.encoded if same else self.encode(steps.blocks, factors)
        if self.scaled:
            encoded = self.scaled(encoded)
        if self.round:
            values = _on_grid(self.round(encoded, spec), spec)
        else:
            values = round_to_element(encoded, spec.format.element, spec.rounding, spec.overflow)
        if self.values:
            values = self.values(values, spec, encoded)
        y = steps.back(values, factors)
        return self.after(y) if self.after else y


@dataclass(frozen=True)
class Steps:
    """What a spec computes of x [lines, axis] float32 along its last axis. absmax: of the outer blocks, as in
    `reference.outer_absmax`."""

    x: Tensor
    spec: Spec
    absmax: Tensor

    @cached_property
    def outer(self) -> Tensor:
        return per_group(self.absmax, self.x, -1, self.spec.block) if self.absmax.dim() else self.absmax

    @cached_property
    def blocks(self) -> Tensor:
        return to_blocks(self.x, -1, self.spec.block)

    @cached_property
    def scale(self) -> Tensor:
        return self.spec.scaling.block_scale(self.blocks, self.spec, self.outer)

    @cached_property
    def factors(self) -> Factors:
        return self.spec.scaling.factors(self.scale, self.spec, self.outer)

    @cached_property
    def encoded(self) -> Tensor:
        """x over its scale, in blocks."""
        return scaled(self.blocks, self.factors)

    def back(self, values: Tensor, factors: Factors) -> Tensor:
        """What values on the grid stand for, [lines, axis]."""
        return from_blocks(read_back(values, factors), self.x, -1, self.spec.block)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """The neighbors on the grid of each value, (toward 0, away from 0), [lines, axis]; equal for one on the
        grid."""
        lower, upper = (_on_grid(end, self.spec) for end in _ends(self.encoded, self.spec))
        return self.back(lower, self.factors), self.back(upper, self.factors)


def _on_grid(values: Tensor, spec: Spec) -> Tensor:
    """Without -0, if the element has none."""
    return values if spec.format.element.signed_zero else values + 0.0


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).float()


def _on(element: Element) -> Callable[[Tensor], Tensor]:
    return lambda x: round_to_element(x, element, RoundingMode.NEAREST, Overflow.SATURATE)


def _through(spec: str) -> Callable[[Tensor], Tensor]:
    return lambda x: fake_quantize(x, spec)


def _times(factor: float) -> ChangeScale:
    """Scales that divide x grow by the factor; those that multiply it, as in current scaling, shrink."""

    def scale(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        if spec.scaling.per_element:
            return torch.cat((scale[:, :1] * factor, scale[:, 1:]), -1)
        return scale / factor if spec.scaling.factors(scale, spec, absmax).encode is scale else scale * factor

    return scale


def _stored_element(spec: Spec) -> Element:
    assert spec.scaling.stored is not None
    return spec.scaling.stored


def _stored(up: bool, wanted: Callable[[Tensor, Spec, Tensor], Tensor] | None = None) -> ChangeScale:
    """Scales rounded up or down to their stored element instead of to nearest. wanted: what is rounded, of the largest
    magnitudes; by default as the spec computes it."""

    def scale(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        largest = nan_max(x)
        value = wanted(largest, spec, absmax) if wanted else spec.scaling.wanted(largest, spec, absmax)[0]
        return neighbors(value, _stored_element(spec))[up]

    return scale


def _normal(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
    """Stored scales without the subnormals of their element, as torchao clamps those of NVFP4."""
    return scale.clamp(min=2.0 ** _stored_element(spec).tiers[0][0])


def _quotients(largest: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
    """Block scales before they are stored as largest / max over the tensor scale, each step a float32 division."""
    return largest / torch.full_like(largest, spec.format.max) / (absmax / spec.scaling.kernel_constant(spec))


def _by_quotients(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
    return _on(E4M3)(_quotients(nan_max(x), spec, absmax))


def _product(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Factors:
    """Block scale times tensor scale is one factor, and x is multiplied by (1 / tensor scale) / block scale."""
    outer = absmax / spec.scaling.kernel_constant(spec)
    return Factors(((1 / outer) / scale).nan_to_num(posinf=0.0), scale * outer)


def _quotient(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Factors:
    """The factor is absmax / max, and x is multiplied by its reciprocal."""
    largest = absmax if spec.block == TENSOR else nan_max(x)
    factor = largest / torch.full_like(largest, spec.format.max)
    return Factors(1 / factor, factor)


def _over_multiplier(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Factors:
    """Block scale over a tensor scale that multiplies x, limit / absmax, as in compressed-tensors."""
    factor = scale / (torch.full_like(absmax, spec.scaling.kernel_constant(spec)) / absmax)
    return Factors(scale=factor)


def _of_torchao(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
    return _normal(_by_quotients(scale, x, spec, absmax), x, spec, absmax)


def _of_bf16(scale: Tensor, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
    """Scales as a kernel has them that computes and stores them in bfloat16."""
    if spec.scaling.factors(scale, spec, absmax).encode is scale:
        return (1 / scale).to(BF16).float().reciprocal()
    return scale.to(BF16).float()


def _divided(x: Tensor, factors: Factors) -> Tensor:
    """x / scale, which a spec computes as x times float32(1 / scale)."""
    scale = read_back(torch.ones((), device=x.device), factors)
    return torch.where(scale == 0, scaled(x, factors), x / scale)


def _ends(encoded: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """x over its scale rounded toward 0, and away from 0."""
    lower, upper = neighbors(encoded, spec.format.element)
    return _unless_special(lower, encoded, spec, torch.inf), _unless_special(upper, encoded, spec, spec.format.max)


def _toward_zero(encoded: Tensor, spec: Spec) -> Tensor:
    return _ends(encoded, spec)[0]


def _away_from_zero(encoded: Tensor, spec: Spec) -> Tensor:
    return _ends(encoded, spec)[1]


def _unless_special(values: Tensor, encoded: Tensor, spec: Spec, most: float) -> Tensor:
    """NaN where x over its scale is NaN, Infinity where it exceeds `most` and the spec does not saturate."""
    if spec.overflow == Overflow.INF:
        beyond = encoded.isinf() | (encoded.abs() > most)
        values = torch.where(beyond, torch.copysign(torch.full_like(values, torch.inf), encoded), values)
    return torch.where(encoded.isnan(), encoded, values)


def _down(encoded: Tensor, spec: Spec) -> Tensor:
    lower, upper = _ends(encoded, spec)
    return torch.where(encoded < 0, upper, lower)


def _half_toward_zero(encoded: Tensor, spec: Spec) -> Tensor:
    lower, upper = neighbors(encoded, spec.format.element)
    y = torch.where((encoded - lower).abs() <= (upper - encoded).abs(), lower, upper)
    return torch.where(encoded.isnan(), encoded, y)


def _flushed(values: Tensor, spec: Spec, encoded: Tensor) -> Tensor:
    return torch.where(values.abs() < 2.0 ** spec.format.element.tiers[0][0], values * 0.0, values)


def _signed_zero(values: Tensor, spec: Spec, encoded: Tensor) -> Tensor:
    return torch.where(values == 0, torch.copysign(values, encoded), values)


def _overflow_nan(values: Tensor, spec: Spec, encoded: Tensor) -> Tensor:
    """NaN where rounding would give more than the largest code, as a cast of ml_dtypes does it."""
    beyond = round_to_element(encoded, spec.format.element, spec.rounding, Overflow.INF)
    return torch.where(beyond.isinf(), torch.nan, values)


def _largest_dropped(values: Tensor, spec: Spec, encoded: Tensor) -> Tensor:
    """The second largest code in place of the largest."""
    second = neighbors(values.new_tensor(spec.format.max * (1 - 2.0**-20)), spec.format.element)[0]
    return values.clamp(-second, second)


def _stores_fractions(spec: Spec) -> bool:
    stored = spec.scaling.stored
    return stored is not None and bool(stored.mantissa_bits) and not spec.scaling.per_element


def _has_float_scales(spec: Spec) -> bool:
    return spec.scaling.stored is None and not spec.scaling.per_element


def _is_quotient(spec: Spec) -> bool:
    return isinstance(spec.scaling, Amax) and not spec.scaling.pow2


def _has_two_levels(spec: Spec) -> bool:
    return isinstance(spec.scaling, TwoLevel) and spec.scaling.outer == TENSOR


BF16, FP16 = torch.bfloat16, torch.float16
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
    Alteration("scales are rounded up when they are stored", _stores_fractions, scale=_stored(True)),
    Alteration("scales are rounded down when they are stored", _stores_fractions, scale=_stored(False)),
    Alteration("scales are rounded up when they are stored", _has_two_levels, scale=_stored(True, _quotients),
               factors=_product),
    Alteration("scales are rounded down when they are stored", _has_two_levels, scale=_stored(False, _quotients),
               factors=_product),
    Alteration("stored scales are at least the smallest normal of their element", _stores_fractions, scale=_normal),
    Alteration("scales are rounded to bfloat16", _has_float_scales, scale=_of_bf16),
    Alteration("x is divided by its scale, and not multiplied by the reciprocal", encode=_divided),
    Alteration("codes are multiplied by one factor, absmax / max, by whose reciprocal x is multiplied", _is_quotient,
               factors=_quotient),
    Alteration("codes are multiplied by one factor, absmax / max, by which x is divided", _is_quotient,
               factors=_quotient, encode=_divided),
    Alteration("codes are multiplied by the product of both scales", _has_two_levels, factors=_product),
    Alteration("codes are multiplied by the product of both scales, by which x is divided", _has_two_levels,
               scale=_by_quotients, factors=_product, encode=_divided),
    Alteration("codes are multiplied by the product of both scales, which are computed as in torchao, block scales at "
               "least 2^-6", _has_two_levels, scale=_of_torchao, factors=_product),
    Alteration("codes are multiplied by block scale / (448 · max / absmax), by which x is divided, as in "
               "compressed-tensors", _has_two_levels, factors=_over_multiplier, encode=_divided),
    Alteration("values are rounded toward 0 (truncated)", round=_toward_zero),
    Alteration("values are rounded away from 0", round=_away_from_zero),
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
    Alteration("scales, and x over its scale, are rounded to bfloat16", _has_float_scales, scale=_of_bf16,
               scaled=_cast(BF16)),
)  # fmt: skip
"""The alterations that `identify` tries, the simplest first."""
