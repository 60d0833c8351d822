"""A spec is a format with every option decided, as a frozen object and as text.

    nvfp4                                           the format as published
    nvfp4(block=16x16)                              one scale for each tile of 16 rows and 16 columns
    fp8_e4m3(block=1x128, scale=pow2)
    nvfp4(rounding=stochastic, hadamard=16)

The text leaves defaults out, and `Spec.of(str(spec)) == spec`. OPTIONS says what each format allows. This module
imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from binade.quant.elements import Overflow, Rounding
from binade.quant.formats import FORMATS, Format, ScaleRule, UnknownFormatError

TEXT = re.compile(r"\s*([\w-]+)\s*(?:\((.*)\)\s*)?", re.DOTALL)
TENSOR_OR_BLOCK = (ScaleRule.AMAX, ScaleRule.POW2, ScaleRule.AMAX8, ScaleRule.AMAX15)


class SpecError(ValueError):
    """An option is unknown or impossible for the format. The message says what is allowed."""

    exit_status = 2  # of a command


@dataclass(frozen=True)
class Block:
    """The values that share a scale: `columns` neighbors along the contracted axis in each of `rows` neighboring lines
    along it, all other axes taken as one. None is the whole length."""

    rows: int | None
    columns: int | None

    def __str__(self) -> str:
        if self.columns is None:
            return "row" if self.rows else "tensor"
        return f"{self.rows}x{self.columns}"

    @property
    def words(self) -> str:
        """The block in a sentence: "the tensor", "each row", "every 32 values"."""
        if self.columns is None:
            return "each row" if self.rows else "the tensor"
        return f"every {self.columns} values" if self.rows == 1 else f"every {self.rows} × {self.columns} values"

    @classmethod
    def parse(cls, value: object) -> Block:
        """Parse 32, "32" or "1x32" (a vector), "16x16" (a tile), "row" or "tensor". Raises SpecError."""
        if isinstance(value, Block):
            return value
        if value in ("row", "tensor"):
            return ROW if value == "row" else TENSOR
        sizes = re.fullmatch(r"(?:([1-9]\d{0,8})x)?([1-9]\d{0,8})", "" if isinstance(value, bool) else str(value))
        if not sizes:
            raise SpecError(f"block={value} is not a block: expected 32 (a vector), 16x16 (a tile), row or tensor")
        return cls(int(sizes[1] or 1), int(sizes[2]))


ROW, TENSOR = Block(1, None), Block(None, None)


SCALE_BITS: dict[str, int] = dict.fromkeys((*TENSOR_OR_BLOCK, ScaleRule.FLOAT32, ScaleRule.HIF4), 32)
"""Bits of a block's scale where they are not 8."""

CLIPPING = (
    *(ScaleRule.FLOOR, ScaleRule.EVEN, ScaleRule.QUEST, ScaleRule.E4M3, ScaleRule.UE5M3),
    *(ScaleRule.NVFP4, ScaleRule.NVFP4_ROW, ScaleRule.NVFP4_128, ScaleRule.FOUR_OVER_SIX),
)
"""The rules whose scale may be too small for a block's largest value, for example because it is rounded down."""


@dataclass(frozen=True)
class Spec:
    """A format with every option decided. Made by `Spec.of`, which checks them; the options are those of OPTIONS."""

    format: Format
    block: Block | None
    scale: str
    error: str | None
    bound: int | None
    rounding: Rounding
    overflow: Overflow
    hadamard: int
    signs: str
    history: int
    algorithm: str | None
    margin: int

    @classmethod
    def of(cls, fmt: str | Format | Spec, **options: object) -> Spec:
        """The spec of a name or text, a Format or another Spec, with options replaced where they are not None.

        Raises UnknownFormatError, SpecError for an unknown or impossible option, TypeError for another type.
        """
        options = {name: value for name, value in options.items() if value is not None}
        if isinstance(fmt, Format):
            return cls._decide(fmt, options)
        if not isinstance(fmt, (str, Spec)):
            raise TypeError(f"expected the name of a format, a spec or a Format, not {fmt!r}")
        spec = cls._parse(fmt) if isinstance(fmt, str) else fmt
        return cls._decide(spec.format, spec.options() | options) if options else spec

    @classmethod
    def _parse(cls, text: str) -> Spec:
        found = TEXT.fullmatch(text)
        if not found and "(" in text:
            raise SpecError(f"{text!r} is not a spec: write a format and its options, as in nvfp4(block=16x16)")
        fmt = FORMATS[found[1] if found else text]
        given: dict[str, str] = {}
        for item in filter(None, (item.strip() for item in ((found and found[2]) or "").split(","))):
            name, equals, value = (word.strip() for word in item.partition("="))
            if not equals:
                raise SpecError(
                    f"{item!r} in {text!r} sets no option: write option=value, where option is one of "
                    f"{', '.join(OPTIONS)}"
                )
            if name in given:
                raise SpecError(f"{name} is given twice in {text!r}: give it once")
            given[name] = value
        return cls._decide(fmt, given)

    @classmethod
    def _decide(cls, fmt: Format, given: Mapping[str, object]) -> Spec:
        if unknown := [name for name in given if name not in OPTIONS]:
            raise SpecError(f"unknown option {unknown[0]!r}: expected one of {', '.join(OPTIONS)}")
        chosen: dict[str, Any] = {"format": fmt}
        for name, option in OPTIONS.items():
            chosen[name] = default = option.default(chosen)
            if name in given and (value := option.read(given[name])) != default:
                option.check(value, chosen)
                chosen[name] = value
        return cls(**chosen)

    def run(self, axis: int) -> int | None:
        """How many neighbors along a contracted axis of this length share a scale; None if a whole tensor does, or
        nothing is shared."""
        return None if self.block in (None, TENSOR) else self.block.columns or max(axis, 1)

    @property
    def bits_per_value(self) -> float:
        """Bits stored per value, with its share of the scales. Scales of a row or a tensor do not count."""
        shared = (self.block.rows or 1) * self.block.columns if self.block and self.block.columns else 0
        bits = self.format.element.bits + (SCALE_BITS.get(self.scale, 8) / shared if shared else 0)
        return bits + (32 / 128 if self.scale == ScaleRule.NVFP4_128 else 0)

    @property
    def random(self) -> bool:
        """Whether the result depends on a seed."""
        return self.rounding == Rounding.STOCHASTIC or self.scale == ScaleRule.EDEN or self.signs == "random"

    @property
    def biased(self) -> bool:
        """Whether stochastic rounding is biased: the scale lets values exceed the largest code, which clips them. With
        delayed scaling, values outgrow the scale."""
        return self.rounding == Rounding.STOCHASTIC and (self.scale in CLIPPING or self.history > 0)

    def options(self) -> dict[str, object]:
        """The options that are not at their defaults, in the order of the text."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {name for name, option in OPTIONS.items() if chosen[name] != option.default(chosen)}
        return {name: value for name, value in chosen.items() if name in changed}

    @cached_property
    def _text(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.options().items())
        return f"{self.format.name}({shown})" if shown else self.format.name

    def __str__(self) -> str:
        return self._text


Chosen = Mapping[str, Any]
"""The options decided so far, and the format as "format"."""


@dataclass(frozen=True)
class Option:
    """An option of a spec.

    default   its value if it is not given
    allowed   the values to choose from, or, in words, what fits; empty where the option does not apply
    read      a value of what was given, a text or the value itself. Raises SpecError
    fits      whether a value is possible where `allowed` is in words
    """

    name: str
    help: str
    default: Callable[[Chosen], Any]
    allowed: Callable[[Chosen], tuple[str, ...] | str]
    read: Callable[[Any], Any] = str
    fits: Callable[[Any, Chosen], bool] = lambda value, chosen: True

    def check(self, value: object, chosen: Chosen) -> None:
        allowed, fmt, scale = self.allowed(chosen), chosen["format"], chosen.get("scale")
        what = fmt.name if self.name == "scale" or scale == fmt.scale_rules[0] else f"{fmt.name}(scale={scale})"
        if not allowed:
            raise SpecError(f"{self.name}={value} does not apply to {what}")
        if str(value) not in allowed if isinstance(allowed, tuple) else not self.fits(value, chosen):
            listed = ", ".join(allowed) if isinstance(allowed, tuple) else allowed
            raise SpecError(f"{self.name}={value} is not possible for {what}: expected {listed}")


def _whole(name: str) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value)):
            raise SpecError(f"{name}={value} is not an integer from 0 to 999,999,999")
        return int(str(value))

    return read


RUNS = {ScaleRule.NVFP4_128: 16, ScaleRule.EDEN: 16, ScaleRule.HIF4: 64}
"""The length of the run, for rules that allow one block only."""


def _blocks(chosen: Chosen) -> str:
    if chosen["scale"] == ScaleRule.NONE:
        return ""
    if size := RUNS.get(chosen["scale"]):
        return f"1x{size}"
    if chosen["scale"] == ScaleRule.NVFP4_ROW:
        return "a vector such as 16"
    return "a vector such as 32, a tile such as 16x16" + (", row, tensor" if chosen["scale"] in TENSOR_OR_BLOCK else "")


def _block_fits(block: Block, chosen: Chosen) -> bool:
    if size := RUNS.get(chosen["scale"]):
        return block == Block(1, size)
    if chosen["scale"] == ScaleRule.NVFP4_ROW:  # each row has its own scale, which a tile would cross
        return block.rows == 1 and block.columns is not None
    return block.columns is not None or chosen["scale"] in TENSOR_OR_BLOCK


def _default_block(chosen: Chosen) -> Block | None:
    if chosen["scale"] == ScaleRule.NONE:
        return None
    size = chosen["format"].block_size
    return Block(1, size) if size else TENSOR


def _only(condition: Callable[[Chosen], bool], *values: str) -> Callable[[Chosen], tuple[str, ...]]:
    return lambda chosen: values if condition(chosen) else ()


def _four_over_six(chosen: Chosen) -> bool:
    return bool(chosen["scale"] == ScaleRule.FOUR_OVER_SIX)


def _delayed(chosen: Chosen) -> bool:
    return bool(chosen["history"])


def _enum(name: str, values: type[Rounding] | type[Overflow]) -> Callable[[object], Rounding | Overflow]:
    def read(value: object) -> Rounding | Overflow:
        if str(value) not in tuple(values):
            raise SpecError(f"{name}={value}: expected one of {', '.join(values)}")
        return values(str(value))

    return read


OPTIONS = {
    option.name: option
    for option in (
        Option("scale", "How the scale is computed",
               lambda chosen: chosen["format"].scale_rules[0],
               lambda chosen: chosen["format"].scale_rules),
        Option("block", "The values that share a scale", _default_block, _blocks, Block.parse, _block_fits),
        Option("error", "The error that chooses between 4 and 6",
               lambda chosen: "mse" if _four_over_six(chosen) else None,
               _only(_four_over_six, "mse", "mae")),
        Option("bound", "The largest scale of a block that 4over6 scales to 6",
               lambda chosen: 256 if _four_over_six(chosen) else None,
               _only(_four_over_six, "256", "448"),
               _whole("bound")),
        Option("rounding", "How a value between two codes is rounded",
               lambda chosen: Rounding.HALF_AWAY if chosen["scale"] == ScaleRule.EDEN else chosen["format"].rounding,
               lambda chosen: (Rounding.HALF_AWAY,) if chosen["scale"] in (ScaleRule.EDEN, ScaleRule.HIF4)
               else tuple(Rounding),
               _enum("rounding", Rounding)),
        Option("overflow", "What a value beyond the largest code becomes",
               lambda chosen: chosen["format"].overflow,
               lambda chosen: tuple(Overflow) if chosen["format"].element.has_infinity else (Overflow.SATURATE,),
               _enum("overflow", Overflow)),
        Option("hadamard", "Rotate groups of this many values by a Hadamard matrix before rounding",
               lambda chosen: 0,
               lambda chosen: "a power of two from 2 to 4096",
               _whole("hadamard"),
               lambda size, chosen: 2 <= size <= 4096 and size & (size - 1) == 0),
        Option("signs", "Signs of the values before the rotation: none, fixed (Transformer Engine's vector of 16), "
               "random (from the seed of the call), or a seed",
               lambda chosen: "none",
               lambda chosen: "none, fixed (with hadamard=16), random or a seed" if chosen["hadamard"] else "",
               str,
               lambda signs, chosen: signs == "random" or (signs.isascii() and signs.isdecimal())
               or (signs == "fixed" and chosen["hadamard"] == 16)),
        Option("history", "Delayed scaling: number of previous absmax values from which the tensor's scale is computed",
               lambda chosen: 0,
               lambda chosen: "a number of iterations, for a tensor scale"
               if chosen["block"] == TENSOR and chosen["scale"] in TENSOR_OR_BLOCK else "",
               _whole("history")),
        Option("algorithm", "Which absmax of the history is used",
               lambda chosen: "max" if _delayed(chosen) else None,
               _only(_delayed, "max", "most_recent")),
        Option("margin", "A delayed scale is divided by 2^margin",
               lambda chosen: 0,
               lambda chosen: "a whole number up to 127, with history" if _delayed(chosen) else "",
               _whole("margin"),
               lambda margin, chosen: bool(margin <= 127)),
    )
}  # fmt: skip
"""The options of a spec, in the order in which they are decided."""


def known_specs(texts: Iterable[str]) -> list[str]:
    """Those of the texts that are specs, each once, in the order of FORMATS, without options first."""
    order = {name: index for index, name in enumerate(FORMATS)}
    found: dict[str, int] = {}
    for text in texts:
        try:
            found[text] = order[Spec.of(text).format.name]
        except (UnknownFormatError, SpecError):
            continue
    return sorted(found, key=lambda text: (found[text], text))


@dataclass(frozen=True)
class GemmFormats:
    """The specs that the six operands of a product's three GEMMs are rounded to; None leaves the operand unrounded.
    Names and texts of specs become specs.

    For a linear layer a is the input and b the weight; for `gemm.matmul` they are its two arguments. `of_rounded` names
    those of dgrad_b and wgrad_a that are rounded from the rounded forward operand, not from the original.

    Raises SpecError if the operands of a GEMM are not rotated alike: rotations cancel only then.
    """

    forward_a: Spec | None = None
    forward_b: Spec | None = None
    dgrad_grad: Spec | None = None
    dgrad_b: Spec | None = None
    wgrad_grad: Spec | None = None
    wgrad_a: Spec | None = None
    of_rounded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in OPERAND_FIELDS:
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, Spec.of(given))
        for gemm in ("forward", "dgrad", "wgrad"):
            a, b = (self[name] or Spec.of("bf16") for name in OPERAND_FIELDS if name.startswith(gemm))
            if (a.hadamard, a.signs) != (b.hadamard, b.signs):
                raise SpecError(
                    f"the operands of {gemm} are rotated differently, {a} and {b}: a rotation cancels in a product if "
                    "both have the same hadamard and signs"
                )

    def __getitem__(self, operand: str) -> Spec | None:
        spec: Spec | None = getattr(self, operand)
        return spec

    @property
    def quantized(self) -> bool:
        return any(self[name] is not None for name in OPERAND_FIELDS)

    @property
    def random(self) -> bool:
        """Whether rounding draws random numbers."""
        return any(spec.random for name in OPERAND_FIELDS if (spec := self[name]))

    @property
    def varies(self) -> bool:
        """Whether rounding equal operands may differ between passes, because of a seed or of earlier passes."""
        return self.random or any(spec.history > 0 for name in OPERAND_FIELDS if (spec := self[name]))


OPERAND_FIELDS = ("forward_a", "forward_b", "dgrad_grad", "dgrad_b", "wgrad_grad", "wgrad_a")
