"""How one value is coded: the elements of number formats, as data. Limits are derived from the codes.

Every element states its precision as *tiers*, `(lowest exponent, mantissa bits)`, so that one rounding rule serves all:
a value with exponent e lies on the grid of step 2^(e - mantissa bits), and below the lowest exponent the step stays.
This module imports no torch; `rounding` puts values on an element's grid.

Sources
    HiFloat8   "Ascend HiFloat8 Format for Deep Learning", arXiv 2409.16626, tables 1 to 3
    MX         "OCP Microscaling Formats (MX) Specification v1.0", section 5
    FP8        "OCP 8-bit Floating Point Specification (OFP8) v1.0", table 1
    FNUZ       AMD CDNA 3 ISA (MI300), as in "8-bit Numerical Formats for Deep Neural Networks", arXiv 2206.02915
    IEEE 754   binary16; bfloat16 is the upper half of binary32
    HiFloat4   arXiv 2602.11287: E1M2 elements, E6M2 scales
    INT4       arXiv 2510.25602, -7 to 7
    UE5M3      proposed for block scales without a tensor scale; no document fixes its range

gfloat's MXINT8 keeps the code -128 (value -2). Here, as the MX specification allows in 5.3.4, the grid is symmetric and
-128 is never produced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import ClassVar, Literal

Tier = tuple[int, int]


class RoundingMode(StrEnum):
    """How a value between two neighbors of an element's grid is rounded."""

    NEAREST = "nearest"
    """To the nearest, ties to the neighbor with an even code (IEEE 754 roundTiesToEven)."""
    HALF_AWAY = "half_away"
    """To the nearest, ties away from zero, as HiFloat8 defines it (arXiv 2409.16626)."""
    STOCHASTIC = "stochastic"
    """Up with a probability equal to the relative distance from the lower neighbor; the noise is generated from a
    seed."""


class Overflow(StrEnum):
    """What a value beyond the largest finite one becomes."""

    SATURATE = "saturate"
    """The largest finite value, as training frameworks do (OFP8 v1.0 calls it SATFINITE)."""
    INF = "inf"
    """Infinity, as in IEEE 754; only for elements that have one."""


class Element:
    """How one value is coded: `bits`, `decode` and `tiers` define it, the rest follows from them.

    tiers: (lowest exponent, mantissa bits) in ascending order; the first lowest exponent is the element's own.
    """

    name: str
    bits: int
    signed_zero: ClassVar[bool] = True

    @property
    def tiers(self) -> tuple[Tier, ...]:
        raise NotImplementedError

    def decode(self, code: int) -> float:
        """The value of a code, NaN and infinities included."""
        raise NotImplementedError

    @cached_property
    def values(self) -> dict[int, float]:
        """Every code and its value."""
        return {code: self.decode(code) for code in range(1 << self.bits)}

    @cached_property
    def finite_values(self) -> tuple[float, ...]:
        """The distinct finite values, ascending."""
        return tuple(sorted({v for v in self.values.values() if math.isfinite(v)}))

    @cached_property
    def max(self) -> float:
        """The largest finite value."""
        return self.finite_values[-1]

    @cached_property
    def emax(self) -> int:
        """The exponent of the largest finite value."""
        return math.frexp(self.max)[1] - 1

    @cached_property
    def smallest(self) -> float:
        """The smallest positive value."""
        return min(v for v in self.finite_values if v > 0)

    @cached_property
    def has_infinity(self) -> bool:
        return any(math.isinf(v) for v in self.values.values())

    @property
    def mantissa_bits(self) -> int:
        """Explicit mantissa bits of values near 1."""
        return max(bits for _, bits in self.tiers)

    @cached_property
    def precise_emax(self) -> int:
        """The largest exponent at which values have all their mantissa bits: emax, unless precision tapers."""
        ends = [lowest - 1 for lowest, _ in self.tiers[1:]] + [self.emax]
        return max(end for end, (_, bits) in zip(ends, self.tiers, strict=True) if bits == self.mantissa_bits)


@dataclass(frozen=True)
class Minifloat(Element):
    """Exponent and mantissa fields as in IEEE 754, after a sign bit if there is one.

    specials    "ieee" (all-ones exponent is Inf or NaN), "nan" (only the all-ones code is NaN), "fnuz" (only the code
                of -0 is NaN), "none" (all finite)
    bias        of the exponent; 2^(exponent_bits - 1) - 1 if not given
    subnormals  False if the exponent field 0 is an exponent like any other: then there is no zero
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    specials: Literal["ieee", "nan", "fnuz", "none"]
    signed: bool = True
    bias: int = -1
    subnormals: bool = True
    bits: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", self.signed + self.exponent_bits + self.fraction_bits)
        if self.bias < 0:
            object.__setattr__(self, "bias", (1 << (self.exponent_bits - 1)) - 1)

    @property
    def signed_zero(self) -> bool:  # type: ignore[override]  # a constant of the other classes
        return self.signed and self.specials != "fnuz"

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        return ((self.subnormals - self.bias, self.fraction_bits),)

    def decode(self, code: int) -> float:
        sign = -1.0 if self.signed and code >> (self.bits - 1) else 1.0
        exponent = (code >> self.fraction_bits) & ((1 << self.exponent_bits) - 1)
        fraction = code & ((1 << self.fraction_bits) - 1)
        top = (1 << self.exponent_bits) - 1
        if self.specials == "ieee" and exponent == top:
            return math.nan if fraction else sign * math.inf
        if self.specials == "nan" and exponent == top and fraction == (1 << self.fraction_bits) - 1:
            return math.nan
        if self.specials == "fnuz" and code == 1 << (self.bits - 1):
            return math.nan
        significand = fraction if exponent == 0 and self.subnormals else fraction + (1 << self.fraction_bits)
        exponent = max(exponent, 1) if self.subnormals else exponent
        return sign * math.ldexp(significand, exponent - self.bias - self.fraction_bits)


@dataclass(frozen=True)
class FixedPoint(Element):
    """Two's complement times 2^-fraction_bits, symmetric: the most negative code is unused (NaN here)."""

    name: str
    bits: int
    fraction_bits: int
    signed_zero: ClassVar[bool] = False

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        # One step for all: precision falls by a bit with each binade below the largest.
        return ((self.bits - 2 - self.fraction_bits, self.bits - 2),)

    def decode(self, code: int) -> float:
        half = 1 << (self.bits - 1)
        if code == half:
            return math.nan
        return math.ldexp(code - 2 * half if code > half else code, -self.fraction_bits)


@dataclass(frozen=True)
class PowerOfTwoElement(Element):
    """Unsigned exponents without a mantissa: 2^(code - bias); the largest code is NaN. MX specification, 5.4.1."""

    name: str
    bits: int
    signed_zero: ClassVar[bool] = False

    @property
    def bias(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        return ((-self.bias, 0),)

    def decode(self, code: int) -> float:
        return math.nan if code == (1 << self.bits) - 1 else math.ldexp(1.0, code - self.bias)


@dataclass(frozen=True)
class HiFloat8(Element):
    """Sign, a prefix code "dot" for the width of the exponent, the exponent (sign-magnitude, leading 1 implicit),
    and the mantissa in the remaining bits: 3 near 1, 1 at the ends, then 7 denormals that are powers of two.
    arXiv 2409.16626, tables 1 and 2.
    """

    name: str = "hif8"
    bits: int = 8
    signed_zero: ClassVar[bool] = False

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        return ((-22, 0), (-15, 1), (-7, 2), (-3, 3), (4, 2), (8, 1))

    def decode(self, code: int) -> float:
        if code == 0x80:
            return math.nan
        if code == 0x00:
            return 0.0
        sign = -1.0 if code & 0x80 else 1.0
        if code & 0x7F == 0x6F:
            return sign * math.inf
        dots = ((0b11, 2, 4), (0b10, 2, 3), (0b01, 2, 2), (0b001, 3, 1), (0b0001, 4, 0))  # dot, its length, D
        layouts = [(length, width) for dot, length, width in dots if (code & 0x7F) >> (7 - length) == dot]
        if not layouts:
            return sign * math.ldexp(1.0, (code & 0b111) - 23)
        length, width = layouts[0]
        fraction_bits = 7 - length - width
        fraction = code & ((1 << fraction_bits) - 1)
        field = (code >> fraction_bits) & ((1 << width) - 1)
        exponent = 0
        if width:
            magnitude = (field & ((1 << (width - 1)) - 1)) | (1 << (width - 1))
            exponent = -magnitude if field >> (width - 1) else magnitude
        return sign * math.ldexp((1 << fraction_bits) + fraction, exponent - fraction_bits)


E5M10 = Minifloat("e5m10", 5, 10, "ieee")
E8M7 = Minifloat("e8m7", 8, 7, "ieee")
E4M3 = Minifloat("e4m3", 4, 3, "nan")
E5M2 = Minifloat("e5m2", 5, 2, "ieee")
E4M3FNUZ = Minifloat("e4m3fnuz", 4, 3, "fnuz", bias=8)
E5M2FNUZ = Minifloat("e5m2fnuz", 5, 2, "fnuz", bias=16)
E3M2 = Minifloat("e3m2", 3, 2, "none")
E2M3 = Minifloat("e2m3", 2, 3, "none")
E2M1 = Minifloat("e2m1", 2, 1, "none")
E1M2 = Minifloat("e1m2", 1, 2, "none", bias=1)
INT8 = FixedPoint("int8", 8, 6)
INT4 = FixedPoint("int4", 4, 0)
HIF8 = HiFloat8()
E8M0 = PowerOfTwoElement("e8m0", 8)
UE5M3 = Minifloat("ue5m3", 5, 3, "nan", signed=False)
E6M2 = Minifloat("e6m2", 6, 2, "nan", signed=False, bias=48, subnormals=False)
