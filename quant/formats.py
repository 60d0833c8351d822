"""What each number format is, as data: FORMATS[name] is a frozen descriptor; limits are derived from its codes.

A format is an `Element` (how one value is coded) and a `Scale` (what a group of values shares). Three families of
element cover the field: `Minifloat` (IEEE-like), `FixedPoint` (MXINT8) and `HiFloat8` (tapered precision). Every
element states its precision as *tiers*: `(lowest exponent, mantissa bits)`, so that one rounding rule serves all:
a value with exponent e lies on the grid of step 2^(e - mantissa bits), and below the lowest exponent the step stays.

Adding a format of a known family is one entry in FORMATS. This module holds no torch and does no rounding.

Sources
    HiFloat8   "Ascend HiFloat8 Format for Deep Learning", arXiv 2409.16626, tables 1 to 3
    MX         "OCP Microscaling Formats (MX) Specification v1.0", sections 5 and 6
    FP8        "OCP 8-bit Floating Point Specification (OFP8) v1.0", table 1
    NVFP4      NVIDIA Transformer Engine, quantize_nvfp4: blocks of 16, E4M3 block scale, float32 tensor scale
    IEEE 754   binary16; bfloat16 is the upper half of binary32

Differences from other libraries, on purpose
    * gfloat's MXINT8 keeps the code -128 (value -2); here, as the MX specification allows in 5.3.4, the grid is
      symmetric and -128 is never produced.
    * ml_dtypes turns an E4M3 overflow into NaN and an E5M2 overflow into Inf, en_dtypes a HiFloat8 overflow into Inf.
      The MX specification leaves it open and training frameworks saturate: `overflow="saturate"` is the default for
      every format but fp16 and bf16.
    * Transformer-Engine-like libraries that clamp the NVFP4 block scale from below at 2^-6 (torchao) are not followed:
      E4M3's subnormal block scales are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, get_args

Tier = tuple[int, int]


class Element:
    """How one value is coded: `bits`, `decode` and `tiers` say it, the rest follows from them.

    tiers: (lowest exponent, mantissa bits) in ascending order; the first lowest exponent is the format's own.
    """

    name: str
    bits: int
    tiers: tuple[Tier, ...]
    signed_zero = True

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
    """Sign, exponent and mantissa fields as in IEEE 754, subnormals kept.

    specials: "ieee" (all-ones exponent is Inf or NaN), "nan" (only the all-ones code is NaN), "none" (all finite).
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    specials: Literal["ieee", "nan", "none"]

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return ((1 - self.bias, self.fraction_bits),)

    def decode(self, code: int) -> float:
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        exponent = (code >> self.fraction_bits) & ((1 << self.exponent_bits) - 1)
        fraction = code & ((1 << self.fraction_bits) - 1)
        top = (1 << self.exponent_bits) - 1
        if self.specials == "ieee" and exponent == top:
            return math.nan if fraction else sign * math.inf
        if self.specials == "nan" and exponent == top and fraction == (1 << self.fraction_bits) - 1:
            return math.nan
        significand = fraction if exponent == 0 else fraction + (1 << self.fraction_bits)
        return sign * math.ldexp(significand, max(exponent, 1) - self.bias - self.fraction_bits)


@dataclass(frozen=True)
class FixedPoint(Element):
    """Two's complement times 2^-fraction_bits, symmetric: the most negative code is unused (NaN here)."""

    name: str
    bits: int
    fraction_bits: int
    signed_zero = False

    @property
    def tiers(self) -> tuple[Tier, ...]:
        # One step for all: precision falls by a bit with each binade below the largest.
        return ((self.bits - 2 - self.fraction_bits, self.bits - 2),)

    def decode(self, code: int) -> float:
        half = 1 << (self.bits - 1)
        if code == half:
            return math.nan
        return math.ldexp(code - 2 * half if code > half else code, -self.fraction_bits)


@dataclass(frozen=True)
class HiFloat8(Element):
    """Sign, a prefix code "dot" for the width of the exponent, the exponent (sign-magnitude, leading 1 implicit),
    and the mantissa in what is left: 3 bits near 1, 1 bit at the ends, then 7 denormals that are powers of two.
    arXiv 2409.16626, tables 1 and 2.
    """

    name: str = "hif8"
    bits: int = 8
    signed_zero = False

    @property
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
        found = [(length, width) for dot, length, width in dots if (code & 0x7F) >> (7 - length) == dot]
        if not found:
            return sign * math.ldexp(1.0, (code & 0b111) - 23)
        length, width = found[0]
        fraction_bits = 7 - length - width
        fraction = code & ((1 << fraction_bits) - 1)
        field = (code >> fraction_bits) & ((1 << width) - 1)
        exponent = 0
        if width:
            magnitude = (field & ((1 << (width - 1)) - 1)) | (1 << (width - 1))
            exponent = -magnitude if field >> (width - 1) else magnitude
        return sign * math.ldexp((1 << fraction_bits) + fraction, exponent - fraction_bits)


Scaling = Literal["none", "block", "tensor", "block_and_tensor"]
Rounding = Literal["nearest", "half_away", "stochastic"]
Overflow = Literal["saturate", "inf"]
ScaleRule = Literal["floor", "ceil", "even", "rceil"]


@dataclass(frozen=True)
class Format:
    """One number format.

    scaling     none: values are rounded as they are
                block: `block_size` values along the contracted axis share a power of two (E8M0, byte 255 = NaN)
                tensor: the tensor shares one float32 scale, max / absmax
                block_and_tensor: NVFP4's E4M3 block scale and float32 tensor scale
    rounding    "nearest" is ties to even, "half_away" ties away from zero
    overflow    what a finite value beyond the largest becomes by default
    """

    name: str
    title: str
    element: Element
    scaling: Scaling = "none"
    block_size: int | None = None
    rounding: Rounding = "nearest"
    overflow: Overflow = "saturate"
    source: str = ""

    @property
    def scale_rules(self) -> tuple[str, ...]:
        """What `scale_rule` may be, the default first."""
        if self.scaling == "none":
            return ("none", "pow2") if len(self.element.tiers) > 1 else ("none",)
        return {"block": get_args(ScaleRule), "tensor": ("amax", "none"), "block_and_tensor": ("nvfp4",)}[self.scaling]

    @property
    def bits_per_value(self) -> float:
        """Bits stored for one value, the block's scale byte shared out; the tensor's own scale not counted."""
        return self.element.bits + (8 / self.block_size if self.block_size else 0)

    @property
    def max(self) -> float:
        return self.element.max


class UnknownFormatError(ValueError, KeyError):
    """The name is not in FORMATS. A ValueError to callers, a KeyError to Mapping's own methods."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


E5M10 = Minifloat("e5m10", 5, 10, "ieee")
E8M7 = Minifloat("e8m7", 8, 7, "ieee")
E4M3 = Minifloat("e4m3", 4, 3, "nan")
E5M2 = Minifloat("e5m2", 5, 2, "ieee")
E3M2 = Minifloat("e3m2", 3, 2, "none")
E2M3 = Minifloat("e2m3", 2, 3, "none")
E2M1 = Minifloat("e2m1", 2, 1, "none")
INT8 = FixedPoint("int8", 8, 6)
HIF8 = HiFloat8()

_MX = "OCP Microscaling Formats v1.0"
_OFP8 = "OCP OFP8 v1.0, current scaling as in Transformer Engine"


class Formats(Mapping[str, Format]):
    """FORMATS: by name, aliases too; iterates over the canonical names only. Raises UnknownFormatError."""

    def __init__(self, formats: list[Format], aliases: dict[str, str]) -> None:
        self._formats = {f.name: f for f in formats}
        self.aliases = dict(aliases)

    def __getitem__(self, name: str) -> Format:
        try:
            return self._formats[self.aliases.get(name, name)]
        except (KeyError, TypeError):
            raise UnknownFormatError(f"format {name!r} is unknown: {', '.join([*self, *self.aliases])}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._formats or name in self.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)


FORMATS = Formats(
    [
        Format("bf16", "bfloat16", E8M7, overflow="inf", source="IEEE 754 rounding of binary32"),
        Format("fp16", "IEEE binary16", E5M10, overflow="inf", source="IEEE 754"),
        Format("fp8_e4m3", "FP8 E4M3, tensor scale", E4M3, "tensor", source=_OFP8),
        Format("fp8_e5m2", "FP8 E5M2, tensor scale", E5M2, "tensor", source=_OFP8),
        Format("hifp8", "HiFloat8", HIF8, rounding="half_away", source="arXiv 2409.16626"),
        Format("mxfp8", "MXFP8 E4M3", E4M3, "block", 32, source=_MX),
        Format("mxfp8_e5m2", "MXFP8 E5M2", E5M2, "block", 32, source=_MX),
        Format("mxfp6_e3m2", "MXFP6 E3M2", E3M2, "block", 32, source=_MX),
        Format("mxfp6_e2m3", "MXFP6 E2M3", E2M3, "block", 32, source=_MX),
        Format("mxfp4", "MXFP4 E2M1", E2M1, "block", 32, source=_MX),
        Format("mxint8", "MXINT8", INT8, "block", 32, source=_MX),
        Format("nvfp4", "NVFP4 E2M1", E2M1, "block_and_tensor", 16, source="NVIDIA Transformer Engine"),
    ],
    aliases={"mxfp8_e4m3": "mxfp8"},
)


@dataclass(frozen=True)
class GemmFormats:
    """Format names of the six operands of a product's three GEMMs; None runs the operand as it is.

    For a linear layer a is the input and b the weight; for `gemm.matmul` they are its two arguments.
    """

    forward_a: str | None = None
    forward_b: str | None = None
    dgrad_grad: str | None = None
    dgrad_b: str | None = None
    wgrad_grad: str | None = None
    wgrad_a: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (name := getattr(self, field.name)) is not None:
                object.__setattr__(self, field.name, FORMATS[name].name)  # aliases resolved, unknown names refused

    @property
    def quantized(self) -> bool:
        return any(getattr(self, f.name) is not None for f in fields(self))
