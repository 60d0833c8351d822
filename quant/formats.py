"""What each number format is, as data: FORMATS[name] is a frozen descriptor.

A format is an `Element` (how one value is coded, see `elements`) and the rules by which its scale may be found (see
`scaling`). Adding a format of a known family is one entry in FORMATS. This module imports no torch.

Sources
    MX         "OCP Microscaling Formats (MX) Specification v1.0", sections 5 and 6
    NVFP4      NVIDIA Transformer Engine, quantize_nvfp4: blocks of 16, E4M3 block scale, float32 tensor scale

Differences from other libraries, on purpose
    * ml_dtypes turns an E4M3 overflow into NaN and an E5M2 overflow into Inf, en_dtypes a HiFloat8 overflow into Inf.
      The MX specification leaves it open and training frameworks saturate: `overflow="saturate"` is the default for
      every format but fp16 and bf16.
    * torchao clamps the NVFP4 block scale from below at 2^-6. Here E4M3's subnormal block scales are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

from binade.quant.elements import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E5M10,
    E8M7,
    HIF8,
    INT8,
    Element,
    Overflow,
    Rounding,
)


class ScaleRule(StrEnum):
    """How the scale of a block or a tensor is found. `scaling.SCALINGS` holds the arithmetic of each."""

    NONE = "none"
    """No scale: values are rounded as they are."""
    FLOOR = "floor"
    """Block scale 2^(floor(log2 absmax) - emax), E8M0. MX specification 6.3."""
    CEIL = "ceil"
    """Block scale 2^(ceil(log2 absmax) - emax), E8M0: fewer values saturate. torchao, ScaleCalculationMode.CEIL."""
    EVEN = "even"
    """As floor, after absmax is rounded to the element's mantissa, E8M0. torchao, ScaleCalculationMode.EVEN."""
    RCEIL = "rceil"
    """Block scale 2^ceil(log2(absmax / max)), E8M0: no value saturates. NVIDIA cuDNN and torchao, RCEIL."""
    AMAX = "amax"
    """One float32 scale for the tensor, max / absmax: current scaling of Transformer Engine."""
    POW2 = "pow2"
    """One power of two for the tensor that puts absmax into the highest binade with all mantissa bits."""
    NVFP4 = "nvfp4"
    """E4M3 block scale, absmax / 6 over a float32 tensor scale, tensor absmax / 2688. NVIDIA Transformer Engine."""


UNSCALED = (ScaleRule.NONE,)
TENSOR = (ScaleRule.AMAX, ScaleRule.NONE)
TAPERED = (ScaleRule.NONE, ScaleRule.POW2)
MX = (ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN, ScaleRule.RCEIL)


@dataclass(frozen=True)
class Format:
    """One number format.

    scale_rules   the scale rules that may be chosen, the default first: members of ScaleRule or keys of
                  `scaling.SCALINGS`
    block_size    how many values along the contracted axis share a scale; None for formats without a block scale
    rounding      the default
    overflow      the default
    """

    name: str
    title: str
    element: Element
    scale_rules: tuple[str, ...] = UNSCALED
    block_size: int | None = None
    rounding: Rounding = Rounding.NEAREST
    overflow: Overflow = Overflow.SATURATE
    source: str = ""

    @property
    def bits_per_value(self) -> float:
        """Bits stored for one value, its part of the block's 8-bit scale included, the tensor's scale not."""
        return self.element.bits + (8 / self.block_size if self.block_size else 0)

    @property
    def max(self) -> float:
        return self.element.max


class UnknownFormatError(ValueError, KeyError):
    """The name is not in FORMATS. A ValueError to callers, a KeyError to Mapping's own methods."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


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
        Format("bf16", "bfloat16", E8M7, overflow=Overflow.INF, source="IEEE 754 rounding of binary32"),
        Format("fp16", "IEEE binary16", E5M10, overflow=Overflow.INF, source="IEEE 754"),
        Format("fp8_e4m3", "FP8 E4M3, tensor scale", E4M3, TENSOR, source=_OFP8),
        Format("fp8_e5m2", "FP8 E5M2, tensor scale", E5M2, TENSOR, source=_OFP8),
        Format("hifp8", "HiFloat8", HIF8, TAPERED, rounding=Rounding.HALF_AWAY, source="arXiv 2409.16626"),
        Format("mxfp8", "MXFP8 E4M3", E4M3, MX, 32, source=_MX),
        Format("mxfp8_e5m2", "MXFP8 E5M2", E5M2, MX, 32, source=_MX),
        Format("mxfp6_e3m2", "MXFP6 E3M2", E3M2, MX, 32, source=_MX),
        Format("mxfp6_e2m3", "MXFP6 E2M3", E2M3, MX, 32, source=_MX),
        Format("mxfp4", "MXFP4 E2M1", E2M1, MX, 32, source=_MX),
        Format("mxint8", "MXINT8", INT8, MX, 32, source=_MX),
        Format("nvfp4", "NVFP4 E2M1", E2M1, (ScaleRule.NVFP4,), 16, source="NVIDIA Transformer Engine"),
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
