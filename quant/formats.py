"""The number formats as data: FORMATS[name] is a frozen descriptor.

A format is an `Element` (how one value is coded, see `elements`), the values that share a scale, and the rules by which
that scale may be found (see `scaling`). Adding a format of a known family is one entry in FORMATS. With every option
decided it is a `Spec` (see `specs`). This module imports no torch.

Differences from other libraries, on purpose
    * ml_dtypes turns an E4M3 overflow into NaN and an E5M2 overflow into Inf, en_dtypes a HiFloat8 overflow into Inf.
      The MX specification leaves it open and training frameworks saturate: `overflow=saturate` is the default for
      every format but fp16 and bf16.
    * A NaN or Inf makes its whole block NaN; other libraries let some of a block's values through.
    * HiFloat8's exponents are read from the bits. fake_quant_ops takes log2(x + 2^-45): its values below 2^-22 become
      2^-22, and its largest is 0.95 · 2^15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from binade.quant.elements import (
    E1M2,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E5M10,
    E8M7,
    HIF8,
    INT4,
    INT8,
    Element,
    Overflow,
    Rounding,
)


class ScaleRule(StrEnum):
    """How the scale of a block or a tensor is computed. `scaling.SCALINGS` holds the arithmetic of each."""

    NONE = "none"
    """No scale: values are rounded as they are. HiFloat8 is published without one."""
    FLOOR = "floor"
    """Block scale 2^(floor(log2 absmax) - emax), E8M0: the largest values may saturate. MX specification 6.3; NVIDIA's
    MXFP8 training uses rceil instead (arXiv 2506.08027)."""
    CEIL = "ceil"
    """Block scale 2^(ceil(log2 absmax) - emax), E8M0: fewer values saturate. torchao, ScaleCalculationMode.CEIL."""
    EVEN = "even"
    """As floor, after absmax is rounded to the element's mantissa, E8M0. torchao, ScaleCalculationMode.EVEN."""
    RCEIL = "rceil"
    """Block scale 2^ceil(log2(absmax / max)), E8M0: no value saturates. NVIDIA cuDNN, Transformer Engine, torchao's
    RCEIL. Transformer Engine's kernel for tiles multiplies by float32(1/max): another scale within an ulp of max · 2^k.
    """
    FOUR_THIRDS = "4over3"
    """Block scale 4/3 · 2^(floor(log2 absmax) - emax): no value saturates. Quartet's backward pass."""
    QUEST = "quest"
    """Block scale 2^floor(log2(0.487 · standard deviation of the block)). Quartet's forward pass, which rounds ties
    toward zero."""
    AMAX = "amax"
    """Float32 scale max / absmax, for a tensor, a row or a tile: current scaling of Transformer Engine. DeepGEMM's
    scale is the reciprocal, of an absmax that is at least 1e-4."""
    POW2 = "pow2"
    """As amax, rounded down to a power of two: Transformer Engine's use_power_2_scales, torchao's rowwise recipes.
    DeepGEMM's ue8m0 is the same where absmax is at least 1e-4."""
    AMAX8 = "amax8"
    """Float32 scale that maps absmax to 8, so that large values keep HiFloat8's 3 mantissa bits. fake_quant_ops
    3617c05, hifp.py; the target of Huawei's own training is not known."""
    AMAX15 = "amax15"
    """As amax8, with 15, which comments in fake_quant_ops mention as a target."""
    E4M3 = "e4m3"
    """Block scale absmax / max rounded to E4M3, without a tensor scale: for quotients from 2^-9 to 448."""
    UE5M3 = "ue5m3"
    """Block scale absmax / max rounded to UE5M3, without a tensor scale. No document fixes UE5M3: here it is unsigned,
    has bias 15 and the largest value 114688."""
    FLOAT32 = "float32"
    """Block scale absmax / max in float32, without a tensor scale."""
    NVFP4 = "nvfp4"
    """E4M3 block scale, absmax / max, over a float32 tensor scale, tensor absmax / (448 · max). Transformer Engine."""
    NVFP4_ROW = "nvfp4_row"
    """As nvfp4 with one float32 scale for each row. Transformer Engine, row_scaled_activation."""
    NVFP4_128 = "nvfp4_1x128"
    """As nvfp4 with one float32 scale for every 128 values. TetraJet-v2, whose stochastic rounding takes block scales
    of at least 2^-9."""
    FOUR_OVER_SIX = "4over6"
    """As nvfp4, each block scaled to 6 or to 4, whichever has the smaller error. arXiv 2512.02010; `FourOverSix` in
    `scaling` says where libraries differ."""
    UNCLIPPED = "16over17"
    """As nvfp4, with absmax at 16/17 of the largest element, so that a scale rounded down clips nothing and stochastic
    rounding is unbiased. Quartet II, fouroversix; Transformer Engine and torchao clip instead."""
    EDEN = "eden"
    """MS-EDEN of Quartet II: nearest rounding that may clip, corrected by block scales that are rounded
    stochastically; unbiased over random rotations."""
    HIF4 = "hif4"
    """One E6M2 scale for 64 values, and a one-bit exponent for every 8 and every 4 of them. arXiv 2602.11287."""


POW2_RULES = (ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN, ScaleRule.RCEIL)
OTHER_BLOCK_RULES = (ScaleRule.FLOAT32, ScaleRule.E4M3, ScaleRule.UE5M3)
TENSOR_RULES = (ScaleRule.AMAX, ScaleRule.POW2, ScaleRule.NONE)
TAPERED_RULES = (ScaleRule.NONE, ScaleRule.POW2, ScaleRule.AMAX8, ScaleRule.AMAX15)
MX_RULES = POW2_RULES + OTHER_BLOCK_RULES
MXFP4_RULES = (*MX_RULES, ScaleRule.FOUR_THIRDS, ScaleRule.QUEST)
NV_RULES = (ScaleRule.NVFP4, ScaleRule.NVFP4_ROW, ScaleRule.NVFP4_128, *OTHER_BLOCK_RULES, *POW2_RULES)
NVFP4_RULES = (NV_RULES[0], ScaleRule.FOUR_OVER_SIX, ScaleRule.UNCLIPPED, ScaleRule.EDEN, *NV_RULES[1:])


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        scale_rules: The scale rules that may be chosen, the default first: members of ScaleRule or keys of
            `scaling.SCALINGS`.
        block_size: How many values along the contracted axis share a scale; None if, by default, a whole tensor does or
            nothing is shared.
        rounding: The default rounding mode.
        overflow: The default overflow behavior.
        source: Where the format is defined.
    """

    name: str
    title: str
    element: Element
    scale_rules: tuple[str, ...] = (ScaleRule.NONE,)
    block_size: int | None = None
    rounding: Rounding = Rounding.NEAREST
    overflow: Overflow = Overflow.SATURATE
    source: str = ""

    @property
    def max(self) -> float:
        return self.element.max


class UnknownFormatError(ValueError, KeyError):
    """The name is not in FORMATS. A ValueError to callers, a KeyError to Mapping's own methods."""

    exit_status = 2  # of a command
    __str__ = Exception.__str__  # KeyError would print the message in quotes


_MX = "OCP Microscaling Formats v1.0, sections 5 and 6"
_OFP8 = "OCP OFP8 v1.0, scaled as in Transformer Engine"
_INT4 = "arXiv 2510.25602"


class Formats(Mapping[str, Format]):
    """A mapping from format names, including aliases, to formats. It iterates over canonical names only.

    Raises UnknownFormatError.
    """

    def __init__(self, formats: list[Format], aliases: dict[str, str]) -> None:
        self._formats = {f.name: f for f in formats}
        self.aliases = dict(aliases)

    def __getitem__(self, name: str) -> Format:
        try:
            return self._formats[self.aliases.get(name, name)]
        except (KeyError, TypeError):
            raise UnknownFormatError(
                f"unknown format {name!r}: expected one of {', '.join([*self, *self.aliases])}"
            ) from None

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
        Format("fp8_e4m3", "FP8 E4M3", E4M3, TENSOR_RULES, source=_OFP8),
        Format("fp8_e5m2", "FP8 E5M2", E5M2, TENSOR_RULES, source=_OFP8),
        Format("hifp8", "HiFloat8", HIF8, TAPERED_RULES, rounding=Rounding.HALF_AWAY, source="arXiv 2409.16626"),
        Format("mxfp8", "MXFP8 E4M3", E4M3, MX_RULES, 32, source=_MX),
        Format("mxfp8_e5m2", "MXFP8 E5M2", E5M2, MX_RULES, 32, source=_MX),
        Format("mxfp6_e3m2", "MXFP6 E3M2", E3M2, MX_RULES, 32, source=_MX),
        Format("mxfp6_e2m3", "MXFP6 E2M3", E2M3, MX_RULES, 32, source=_MX),
        Format("mxfp4", "MXFP4 E2M1", E2M1, MXFP4_RULES, 32, source=_MX),
        Format("mxint8", "MXINT8", INT8, MX_RULES, 32, source=_MX),
        Format("nvfp4", "NVFP4 E2M1", E2M1, NVFP4_RULES, 16, source="Transformer Engine, quantize_nvfp4"),
        Format("hif4", "HiFloat4", E1M2, (ScaleRule.HIF4,), 64, Rounding.HALF_AWAY, source="arXiv 2602.11287"),
        Format("nvint4", "NVINT4", INT4, NV_RULES, 16, source=_INT4),
        Format("mxint4", "MXINT4", INT4, (ScaleRule.RCEIL, *MX_RULES[:3], *OTHER_BLOCK_RULES), 32, source=_INT4),
    ],
    aliases={"mxfp8_e4m3": "mxfp8"},
)
