"""The number formats as data: FORMATS[name] is a frozen descriptor.

A format is an `Element` (how one value is coded, see `elements`), the values that share a scale, and the schemes by
which that scale may be computed (see `scaling`). Adding a format of a known family is one entry in FORMATS. With every
option decided it is a `Spec` (see `specs`). This module imports no torch.

Differences from other libraries, on purpose
    * ml_dtypes turns an E4M3 overflow into NaN and an E5M2 overflow into Inf, en_dtypes a HiFloat8 overflow into Inf.
      The MX specification leaves it open and training frameworks saturate: `overflow=saturate` is the default for
      every format but fp16 and bf16.
    * A NaN or Inf makes its whole block NaN; other libraries let some of a block's values through. With amax and pow2,
      an Inf saturates, as in Transformer Engine.
    * Every MX format scales by floor unless told otherwise, as the MX specification does, so that formats are compared
      with the same rule. Sources of single formats choose others: see docs/fake_quantization.md.
    * HiFloat8's exponents are read from the bits. fake_quant_ops takes log2(x + 2^-45): its values below 2^-22 become
      2^-22, and its largest is 0.95 · 2^15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from binade.quant.elements import (
    E1M2,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E5M10,
    E8M7,
    HIF8,
    INT4,
    INT8,
    Element,
    Overflow,
    RoundingMode,
)

# Names of scale schemes, see scaling.SCALINGS.
POW2_RULES = ("floor", "ceil", "even", "rceil")
BF16 = "bf16"  # what is not quantized has this format
OTHER_BLOCK_RULES = ("float32", "e4m3", "ue5m3")
FP8_RULES = ("amax", "pow2", "torchao", "torchao_pow2", "none", "float32", "deepgemm")
TAPERED_RULES = ("none", "pow2", "amax8", "amax15")
MX_RULES = (*POW2_RULES, *OTHER_BLOCK_RULES, "nearest")
MXFP4_RULES = (*MX_RULES, "4over3", "quest", "quest_nearest", "deviation")
NV_RULES = ("nvfp4", "nvfp4_row", "nvfp4_1x128", *OTHER_BLOCK_RULES, *POW2_RULES)
NVFP4_RULES = ("nvfp4", "4over6", "16over17", "eden", "headroom", *NV_RULES[1:])


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        scale_rules: The scale schemes that may be chosen, the default first: names in `scaling.SCALINGS`.
        block_size: How many values along the contracted axis share a scale; None if, by default, a whole tensor does or
            nothing is shared.
        rounding: The default rounding mode.
        overflow: The default overflow behavior.
        source: Where the format is defined.
    """

    name: str
    title: str
    element: Element
    scale_rules: tuple[str, ...] = ("none",)
    block_size: int | None = None
    rounding: RoundingMode = RoundingMode.NEAREST
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
_FNUZ = "the FP8 elements of AMD's MI300 (arXiv 2206.02915)"
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
        Format("fp8_e4m3", "FP8 E4M3", E4M3, FP8_RULES, source=_OFP8),
        Format("fp8_e5m2", "FP8 E5M2", E5M2, FP8_RULES, source=_OFP8),
        Format(
            "fp8_e4m3fnuz", "FP8 E4M3 FNUZ", E4M3FNUZ, FP8_RULES, source=f"{_FNUZ}, scaled as in Transformer Engine"
        ),
        Format(
            "fp8_e5m2fnuz", "FP8 E5M2 FNUZ", E5M2FNUZ, FP8_RULES, source=f"{_FNUZ}, scaled as in Transformer Engine"
        ),
        Format("hifp8", "HiFloat8", HIF8, TAPERED_RULES, rounding=RoundingMode.HALF_AWAY, source="arXiv 2409.16626"),
        Format("mxfp8", "MXFP8 E4M3", E4M3, MX_RULES, 32, source=_MX),
        Format("mxfp8_e5m2", "MXFP8 E5M2", E5M2, MX_RULES, 32, source=_MX),
        Format("mxfp6_e3m2", "MXFP6 E3M2", E3M2, MX_RULES, 32, source=_MX),
        Format("mxfp6_e2m3", "MXFP6 E2M3", E2M3, MX_RULES, 32, source=_MX),
        Format("mxfp4", "MXFP4 E2M1", E2M1, MXFP4_RULES, 32, source=_MX),
        Format("mxint8", "MXINT8", INT8, MX_RULES, 32, source=_MX),
        Format("mxfp8_e4m3fnuz", "MXFP8 E4M3 FNUZ", E4M3FNUZ, MX_RULES, 32, source=f"{_FNUZ}, scaled as in MX"),
        Format("mxfp8_e5m2fnuz", "MXFP8 E5M2 FNUZ", E5M2FNUZ, MX_RULES, 32, source=f"{_FNUZ}, scaled as in MX"),
        Format("nvfp4", "NVFP4 E2M1", E2M1, NVFP4_RULES, 16, source="Transformer Engine, quantize_nvfp4"),
        Format("hif4", "HiFloat4", E1M2, ("hif4",), 64, RoundingMode.HALF_AWAY, source="arXiv 2602.11287"),
        Format("nvint4", "NVINT4", INT4, NV_RULES, 16, source=_INT4),
        Format("mxint4", "MXINT4", INT4, MX_RULES, 32, source=f"{_INT4}, which scales all MX formats by rceil"),
    ],
    aliases={"mxfp8_e4m3": "mxfp8"},
)
