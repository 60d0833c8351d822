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
from functools import cached_property, lru_cache
from typing import Any

from binade.quant.elements import Overflow, RoundingMode
from binade.quant.formats import FORMATS, Format, UnknownFormatError
from binade.quant.options import FULL, ROW, TENSOR, Block, Options, Smooth, Softmax, SpecError
from binade.quant.scaling import SCALINGS
from binade.quant.scheme import Scaling

__all__ = [
    "FULL",
    "OPERAND_FIELDS",
    "OPTIONS",
    "ROW",
    "TENSOR",
    "Block",
    "GemmFormats",
    "KVCache",
    "Smooth",
    "Softmax",
    "Spec",
    "SpecError",
    "known_specs",
]

TILED = Block(1, 128)  # what shares a scale of a scheme for blocks, in a format without a block size
TEXT = re.compile(r"\s*([\w-]+)\s*(?:\((.*)\)\s*)?", re.DOTALL)


@dataclass(frozen=True)
class Spec(Options):
    """A format with every option decided. Made by `Spec.of`, which checks them; the options are those of OPTIONS."""

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
        match = TEXT.fullmatch(text)
        if not match and "(" in text:
            raise SpecError(f"{text!r} is not a spec: write a format and its options, as in nvfp4(block=16x16)")
        fmt = FORMATS[match[1] if match else text]
        given: dict[str, str] = {}
        for item in filter(None, (item.strip() for item in ((match and match[2]) or "").split(","))):
            name, equals, value = (word.strip() for word in item.partition("="))
            if not equals:
                raise SpecError(
                    f"{item!r} in {text!r} sets no option: write option=value, where option is one of "
                    f"{', '.join(OPTIONS)}"
                )
            if name in given:
                raise SpecError(f"{name} is given twice in {text!r}: give it once")
            given[name] = value
        return _of_texts(fmt, tuple(given.items()))

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

    @property
    def has_blocks(self) -> bool:
        """Whether the values of a tensor have several scales."""
        return self.block not in (None, TENSOR)

    @property
    def of_tensor(self) -> bool:
        """Whether its scales follow from the largest magnitude of the tensor."""
        return TENSOR in (self.block, self.scaling.outer) and not self.scaling.of_blocks

    def run(self, axis: int) -> int | None:
        """How many neighbors along a contracted axis of this length share a scale; None if a whole tensor does, or
        nothing is shared."""
        return None if self.block in (None, TENSOR) else self.block.columns or max(axis, 1)

    @cached_property
    def scaling(self) -> Scaling:
        """The scheme of its scales."""
        return SCALINGS[self.scale]

    @property
    def bits_per_value(self) -> float:
        """Bits stored per value, with its share of the scales. Scales of a row or a tensor do not count."""
        scales = ((self.block, self.scaling.scale_bits), (self.scaling.outer, 32))
        return self.format.element.bits + sum(bits / block.size for block, bits in scales if block and block.size)

    @property
    def centered(self) -> bool:
        """Whether the mean over tokens is subtracted before rounding, and added to the result."""
        return self.center == "tokens"

    @cached_property
    def transforms(self) -> bool:
        """Whether the values that are rounded are not those of the tensor: see `quant.transform`."""
        return self.centered or self.hadamard > 0

    @property
    def noisy(self) -> bool:
        """Whether rounding draws random numbers."""
        return self.rounding == RoundingMode.STOCHASTIC or self.scaling.stochastic

    @property
    def random(self) -> bool:
        """Whether the result depends on a seed."""
        return self.noisy or self.signs == "random"

    @property
    def biased(self) -> bool:
        """Whether stochastic rounding is biased: the scale lets values exceed the largest code, which clips them. With
        delayed scaling, values outgrow the scale."""
        return self.rounding == RoundingMode.STOCHASTIC and (self.scaling.clips or self.history > 0)

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
class SpecOption:
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


def _whole(name: str, signed: bool = False) -> Callable[[object], int]:
    lowest = "-999,999,999" if signed else "0"

    def read(value: object) -> int:
        if isinstance(value, bool) or not re.fullmatch(r"-?\d{1,9}" if signed else r"\d{1,9}", str(value)):
            raise SpecError(f"{name}={value} is not an integer from {lowest} to 999,999,999")
        return int(str(value))

    return read


def _scaling(chosen: Chosen) -> Scaling:
    return SCALINGS[chosen["scale"]]


def _default_block(chosen: Chosen) -> Block | None:
    if not _scaling(chosen).blocks:
        return None
    size = chosen["format"].block_size
    usual = Block(1, size) if size else TENSOR
    return usual if _scaling(chosen).fits(usual) else TILED


def _delayed(chosen: Chosen) -> bool:
    return bool(chosen["history"])


def _enum(name: str, values: type[RoundingMode] | type[Overflow]) -> Callable[[object], RoundingMode | Overflow]:
    def read(value: object) -> RoundingMode | Overflow:
        if str(value) not in tuple(values):
            raise SpecError(f"{name}={value}: expected one of {', '.join(values)}")
        return values(str(value))

    return read


def _of_scheme(name: str, help: str, read: Callable[[Any], Any] = str) -> SpecOption:
    """An option of some schemes only."""

    def values(chosen: Chosen) -> tuple[str, ...]:
        return _scaling(chosen).options.get(name, ())

    return SpecOption(name, help, lambda chosen: next(map(read, values(chosen)), None), values, read)


OPTIONS = {
    option.name: option
    for option in (
        SpecOption("scale", "How the scale is computed",
               lambda chosen: chosen["format"].scale_rules[0],
               lambda chosen: chosen["format"].scale_rules),
        SpecOption("block", "The values that share a scale", _default_block,
               lambda chosen: ", ".join(map(str, _scaling(chosen).blocks)),
               Block.parse,
               lambda block, chosen: _scaling(chosen).fits(block)),
        _of_scheme("error", "The error that chooses between 4 and 6"),
        _of_scheme("bound", "The largest scale of a block that 4over6 scales to 6", _whole("bound")),
        SpecOption("rounding", "How a value between two codes is rounded",
               lambda chosen: min(_scaling(chosen).roundings, key=lambda value: value != chosen["format"].rounding),
               lambda chosen: _scaling(chosen).roundings,
               _enum("rounding", RoundingMode)),
        SpecOption("overflow", "What a value beyond the largest code becomes",
               lambda chosen: chosen["format"].overflow,
               lambda chosen: tuple(Overflow) if chosen["format"].element.has_infinity else (Overflow.SATURATE,),
               _enum("overflow", Overflow)),
        SpecOption("center", "Subtract the mean over tokens before rounding, as Averis does. Of the operands of a "
               "linear layer, its input and the gradient of its output have tokens",
               lambda chosen: "none",
               lambda chosen: ("none", "tokens")),
        SpecOption("hadamard", "Rotate groups of this many values by a Hadamard matrix before rounding",
               lambda chosen: 0,
               lambda chosen: "a power of two from 2 to 4096",
               _whole("hadamard"),
               lambda size, chosen: 2 <= size <= 4096 and size & (size - 1) == 0),
        SpecOption("signs", "Signs of the values before the rotation: none, fixed (Transformer Engine's vector of 16), "
               "random (from the seed of the call), or a seed",
               lambda chosen: "none",
               lambda chosen: "none, fixed (with hadamard=16), random or a seed" if chosen["hadamard"] else "",
               str,
               lambda signs, chosen: signs == "random" or (signs.isascii() and signs.isdecimal())
               or (signs == "fixed" and chosen["hadamard"] == 16)),
        SpecOption("history",
               "Delayed scaling: number of previous absmax values from which the tensor's scale is computed",
               lambda chosen: 0,
               lambda chosen: "a number of iterations, for a tensor scale"
               if chosen["block"] == TENSOR else "",
               _whole("history")),
        SpecOption("algorithm", "Which absmax of the history is used",
               lambda chosen: "max" if _delayed(chosen) else None,
               lambda chosen: ("max", "most_recent") if _delayed(chosen) else ()),
        SpecOption("margin", "A delayed scale is divided by 2^margin",
               lambda chosen: 0,
               lambda chosen: "a whole number from -32 to 127, with history" if _delayed(chosen) else "",
               _whole("margin", signed=True),
               lambda margin, chosen: bool(-32 <= margin <= 127)),
    )
}  # fmt: skip
"""The options of a spec, in the order in which they are decided."""


@lru_cache(maxsize=4096)  # a page reads the same texts many times
def _of_texts(fmt: Format, given: tuple[tuple[str, str], ...]) -> Spec:
    return Spec._decide(fmt, dict(given))


def known_specs(texts: Iterable[str]) -> list[str]:
    """Those of the texts that are specs, each once, in the order of FORMATS, without options first."""
    order = {name: index for index, name in enumerate(FORMATS)}
    positions: dict[str, int] = {}
    for text in texts:
        try:
            positions[text] = order[Spec.of(text).format.name]
        except (UnknownFormatError, SpecError):
            continue
    return sorted(positions, key=lambda text: (positions[text], text))


@dataclass(frozen=True)
class KVCache:
    """How an operand of a forward GEMM is rounded where it is written to a KV cache, before the GEMM rounds it.

    operand  the field of GemmFormats: forward_b for keys and values, forward_a for a latent
    by_head  whether each head has a tensor scale of its own, over all its tokens
    trains   whether passes that train use it, too
    """

    operand: str
    spec: Spec
    by_head: bool = False
    trains: bool = False

    def __post_init__(self) -> None:
        if self.spec.random or self.spec.history or self.spec.centered:
            raise SpecError(
                f"{self.spec} rounds differently each time: a cache is written once, so leave out history, center, "
                "stochastic rounding and random signs"
            )
        if self.by_head and self.spec.block != TENSOR:
            raise SpecError(
                f"{self.spec} has scales of blocks: a scale for each head replaces that of a tensor, as of fp8_e4m3"
            )


@dataclass(frozen=True)
class GemmFormats:
    """The specs that the six operands of a product's three GEMMs are rounded to; None leaves the operand unrounded.
    Names and texts of specs become specs.

    For a linear layer a is the input and b the weight; for `gemm.matmul` they are its two arguments. `of_rounded` names
    those of dgrad_b and wgrad_a that are rounded from the rounded forward operand, not from the original. softmax says
    what a is in the product of attention probabilities and values, smooth from which operands of QKᵀ a mean is
    subtracted before they are rounded. cache is what an operand is rounded to before all of this.

    Raises SpecError if the operands of a GEMM are not rotated alike, because rotations cancel only then; if the mean
    over tokens is subtracted from an operand without tokens, or from only one of the two that wgrad contracts over
    tokens; or if they cannot be rounded tile by tile as `softmax` needs it.
    """

    forward_a: Spec | None = None
    forward_b: Spec | None = None
    dgrad_grad: Spec | None = None
    dgrad_b: Spec | None = None
    wgrad_grad: Spec | None = None
    wgrad_a: Spec | None = None
    of_rounded: tuple[str, ...] = ()
    softmax: Softmax = FULL
    cache: KVCache | None = None
    smooth: Smooth = Smooth.NONE

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
            if a.centered != b.centered if gemm == "wgrad" else b.centered:
                raise SpecError(
                    f"center=tokens in {gemm} is possible for {CENTERED[gemm]}, not for {a} and {b}: a weight has no "
                    "tokens, and wgrad needs both operands without their means"
                )
        if tile := self.softmax.tile:
            self._check_tiles(tile)

    def _check_tiles(self, tile: int) -> None:
        for spec in filter(None, (self.forward_a, self.forward_b)):
            columns = spec.block.columns if spec.block else None
            for name, size in (("block", columns), ("hadamard", spec.hadamard)):
                if size and tile % size:
                    raise SpecError(
                        f"softmax={self.softmax} rounds tiles of {tile} keys, which {name} of {spec} does not divide: "
                        f"expected a tile that is a multiple of {size}"
                    )
        if "wgrad_a" in self.of_rounded:
            raise SpecError(
                f"softmax={self.softmax} computes the probabilities again in the backward pass: they cannot be rounded "
                "from the rounded forward operand"
            )

    def __getitem__(self, operand: str) -> Spec | None:
        spec: Spec | None = getattr(self, operand)
        return spec

    def is_same(self, operand: str) -> bool:
        """Whether a backward operand, before any rounding, is the forward operand of that name."""
        return not (operand == "wgrad_a" and self.softmax.tile)

    def rounds(self, gemm: str) -> bool:
        """Whether an operand of this GEMM is rounded, by it or by the forward GEMM before."""
        again = (*self.of_rounded, *(("wgrad_a",) if self.softmax.rounded and self.forward_a else ()))
        return any(self[name] or name in again for name in OPERAND_FIELDS if name.startswith(gemm))

    @property
    def quantized(self) -> bool:
        """Whether the product is not the plain one: an operand is rounded, or the softmax is that of flash kernels."""
        return (self.softmax.tile or self.cache) is not None or any(self[name] is not None for name in OPERAND_FIELDS)

    @property
    def delayed(self) -> bool:
        """Whether a scale follows from earlier values."""
        return any(spec.history > 0 for name in OPERAND_FIELDS if (spec := self[name]))

    @property
    def random(self) -> bool:
        """Whether rounding draws random numbers."""
        return any(spec.random for name in OPERAND_FIELDS if (spec := self[name]))

    @property
    def varies(self) -> bool:
        """Whether rounding equal operands may differ between passes, because of a seed or of earlier passes."""
        return self.random or self.delayed


CENTERED = {"forward": "the input", "dgrad": "grad_output", "wgrad": "both operands or none"}
OPERAND_FIELDS = ("forward_a", "forward_b", "dgrad_grad", "dgrad_b", "wgrad_grad", "wgrad_a")
