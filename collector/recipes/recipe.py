"""Recipes: which operand of which GEMM gets which format. Plain data, no torch.

    bf16                nothing is quantized
    FA_<format>         the two operands of QKᵀ (the attention's backward products stay in bf16)
    linear_<format>     the three GEMMs of every linear layer
    FA_linear_<format>  both
    <format>            everything: linear layers, QKᵀ and PV, forward and backward

Gradients take `mxfp8_e5m2` under `mxfp8`. The LM head and the embedding stay in bf16. The router stays in float32
unless it is given a format.

The most specific format wins: that of a part (linear, qk, pv, router) replaces the recipe's, that of one GEMM of the
linear layers (forward, dgrad, wgrad) replaces the part's, and that of an operand (OPERANDS) replaces the GEMM's. "bf16"
turns quantization off. Only an operand's format is taken literally: there `mxfp8` means E4M3 for a gradient too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from binade.quant.formats import FORMATS, GemmFormats

BF16 = "bf16"
NAMED_FORMATS = ("mxfp8", "mxfp4", "hifp8")
TEN_RECIPES = (BF16, *(f"{part}_{name}" for part in ("FA", "linear", "FA_linear") for name in NAMED_FORMATS))

# The format of gradients, where it differs from the requested one: they need range more than precision.
GRADIENT_FORMAT = {"mxfp8": "mxfp8_e5m2"}


class RecipeError(ValueError):
    """The recipe is unknown or contradicts itself. The message lists what is known."""


class Operand(NamedTuple):
    """An operand of a part's GEMM, quantized along the axis that the GEMM contracts."""

    field: str  # of GemmFormats
    gemm: str
    name: str
    axis: str


def _operands(a: str, b: str, grad: str, gemms: Sequence[str], axes: Sequence[str]) -> tuple[Operand, ...]:
    """The operands of the product of a and b, and of its two backward products: of grad and b, and of grad and a. gemms
    are the names of the three products, axes what they contract."""
    pairs = (
        (("forward_a", a), ("forward_b", b)),
        (("dgrad_grad", grad), ("dgrad_b", b)),
        (("wgrad_grad", grad), ("wgrad_a", a)),
    )
    products = zip(gemms, axes, pairs, strict=True)
    return tuple(Operand(field, gemm, name, axis) for gemm, axis, pair in products for field, name in pair)


LINEAR_OPERANDS = _operands(
    "input", "weight", "grad_output", ("forward", "dgrad", "wgrad"), ("input size", "output size", "tokens")
)
QK_OPERANDS = _operands("query", "key", "grad_scores", ("forward", "dquery", "dkey"), ("head size", "keys", "queries"))
PV_OPERANDS = _operands(
    "attention_probs", "value", "grad_output", ("forward", "dprobs", "dvalue"), ("keys", "head size", "queries")
)
PARTS = {"linear": LINEAR_OPERANDS, "qk": QK_OPERANDS, "pv": PV_OPERANDS, "router": LINEAR_OPERANDS}

# Every operand by its name: linear.dgrad.grad_output -> (linear, dgrad_grad)
OPERANDS = {f"{part}.{o.gemm}.{o.name}": (part, o.field) for part, operands in PARTS.items() for o in operands}


@dataclass(frozen=True)
class Part:
    """The quantization of one kind of product.

    quant_type  the requested format
    formats     the formats that its six operands are rounded to
    overrides   (field of GemmFormats, requested format) of the operands that differ, set alone or with their GEMM
    """

    quant_type: str = BF16
    formats: GemmFormats = field(default_factory=GemmFormats)
    overrides: tuple[tuple[str, str], ...] = ()

    def quant_type_of(self, field: str) -> str:
        """The format requested for an operand: "mxfp8" also where that rounds a gradient to mxfp8_e5m2. It is recorded
        as the tensor's quant_type. The result of a GEMM has that of its first operand."""
        return dict(self.overrides).get(field, self.quant_type)

    def rounded_to(self, field: str) -> str:
        """The format that an operand is rounded to."""
        name: str | None = getattr(self.formats, field)
        return name or BF16


@dataclass(frozen=True)
class Recipe:
    """`linear` covers every linear layer but the routers, `qk` and `pv` cover the products of the attention core, and
    `router` covers the linear layer that chooses the experts."""

    name: str
    linear: Part = field(default_factory=Part)
    qk: Part = field(default_factory=Part)
    pv: Part = field(default_factory=Part)
    router: Part = field(default_factory=Part)

    def lines(self) -> list[str]:
        """One line per operand: "linear.dgrad.grad_output    output size  mxfp8_e5m2"."""
        return [
            f"{f'{name}.{operand.gemm}.{operand.name}':<27} {operand.axis:<12} {part.rounded_to(operand.field)}"
            for name, part in self.parts().items()
            for operand in PARTS[name]
        ]

    def parts(self) -> dict[str, Part]:
        """The parts by name, without the router if it is not quantized."""
        parts = {"linear": self.linear, "qk": self.qk, "pv": self.pv}
        return parts if self.router == Part() else parts | {"router": self.router}

    def describe(self) -> str:
        """linear mxfp8, qk bf16, pv bf16; for a part with overrides: linear (forward mxfp8 x mxfp4, ...)"""
        described = []
        for name, part in self.parts().items():
            gemms: dict[str, dict[str, None]] = {}
            for operand in PARTS[name]:
                gemms.setdefault(operand.gemm, {})[part.rounded_to(operand.field)] = None
            mixed = ", ".join(f"{gemm} {' x '.join(formats)}" for gemm, formats in gemms.items())
            described.append(f"{name} ({mixed})" if part.overrides else f"{name} {part.quant_type}")
        return ", ".join(described)


def _part(requested: str, *, backward: bool = True) -> Part:
    name = FORMATS[requested].name
    if name == BF16:
        return Part()
    if not backward:
        return Part(name, GemmFormats(forward_a=name, forward_b=name))
    gradient = GRADIENT_FORMAT.get(name, name)
    return Part(name, GemmFormats(name, name, gradient, name, gradient, name))


def _override(part: Part, formats: dict[str, str | None], requested: str) -> Part:
    overrides = dict(part.overrides) | dict.fromkeys(formats, requested)
    different = tuple(sorted((field, name) for field, name in overrides.items() if name != part.quant_type))
    return replace(part, formats=replace(part.formats, **formats), overrides=different)


def _operand_formats(assignments: Iterable[str]) -> dict[str, str]:
    """{"linear.dgrad.grad_output": "mxfp6_e3m2"} of "linear.dgrad.grad_output=mxfp6_e3m2"."""
    formats: dict[str, str] = {}
    for text in assignments:
        operand, equals, requested = (word.strip() for word in text.partition("="))
        if not equals:
            raise RecipeError(f"{text!r} sets no operand: write PART.GEMM.OPERAND=FORMAT, as in qk.forward.key=mxfp8")
        if operand not in OPERANDS:
            raise RecipeError(f"operand {operand!r} is unknown: {', '.join(OPERANDS)}")
        name = FORMATS[requested].name
        if formats.setdefault(operand, name) != name:
            raise RecipeError(f"operand {operand} is given two formats, {formats[operand]} and {name}: give one")
    return formats


def parse_recipe(
    name: str,
    *,
    linear: str | None = None,
    qk: str | None = None,
    pv: str | None = None,
    router: str | None = None,
    forward: str | None = None,
    dgrad: str | None = None,
    wgrad: str | None = None,
    operands: Sequence[str] = (),
) -> Recipe:
    """The recipe of a name, with formats replaced where they are given ("bf16" turns off): of a part (linear, qk, pv,
    router), then of one GEMM of every linear layer (forward, dgrad, wgrad), then of operands, each written
    "linear.dgrad.grad_output=mxfp6_e3m2" with a name of OPERANDS.

    Raises RecipeError or UnknownFormatError.
    """
    for prefix in ("FA_linear_", "FA_", "linear_", ""):
        if name.startswith(prefix) and name.removeprefix(prefix) in FORMATS:
            fmt = name.removeprefix(prefix)
            break
    else:
        raise RecipeError(
            f"recipe {name!r} is unknown: bf16, FA_<format>, linear_<format>, FA_linear_<format> or <format>, "
            f"with a format of {', '.join([*FORMATS, *FORMATS.aliases])}"
        )
    parts = dict.fromkeys(PARTS, Part())
    if not prefix or "linear_" in prefix:
        parts["linear"] = _part(fmt)
    if not prefix or "FA_" in prefix:
        parts["qk"] = _part(fmt, backward=not prefix)
    if not prefix:
        parts["pv"] = _part(fmt)
    for part, requested in (("linear", linear), ("qk", qk), ("pv", pv), ("router", router)):
        if requested is not None:
            parts[part] = _part(requested, backward=part not in ("qk", "pv"))
    for gemm, requested in (("forward", forward), ("dgrad", dgrad), ("wgrad", wgrad)):
        if requested is not None:
            whole = _part(requested)
            formats = {o.field: getattr(whole.formats, o.field) for o in LINEAR_OPERANDS if o.gemm == gemm}
            parts["linear"] = _override(parts["linear"], formats, whole.quant_type)
    for operand, requested in _operand_formats(operands).items():
        part, changed = OPERANDS[operand]
        parts[part] = _override(parts[part], {changed: None if requested == BF16 else requested}, requested)
    return Recipe(name, **parts)
