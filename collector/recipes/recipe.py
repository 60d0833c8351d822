"""Recipes: which operand of which GEMM gets which format. Plain data, no torch.

    bf16                nothing is quantized
    FA_<format>         the two operands of QKᵀ (the attention's backward products stay in bf16)
    linear_<format>     the three GEMMs of every linear layer
    FA_linear_<format>  both
    <format>            everything: linear layers, QKᵀ and PV, forward and backward

Gradients take `mxfp8_e5m2` under `mxfp8`. The LM head and the embedding stay in bf16, and the router in its own float32
unless it is given a format by name.

What is more exact wins: a part's format (linear, qk, pv, router) replaces the recipe's, that of one of the linear
layers' GEMMs (forward, dgrad, wgrad) the part's, that of an operand (OPERANDS) the GEMM's. "bf16" turns each off. Only
an operand's is taken literally: there `mxfp8` is E4M3 for a gradient too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from binade.quant.formats import FORMATS, GemmFormats

BF16 = "bf16"
NAMED_FORMATS = ("mxfp8", "mxfp4", "hifp8")
TEN_RECIPES = (BF16, *(f"{part}_{name}" for part in ("FA", "linear", "FA_linear") for name in NAMED_FORMATS))

# What gradients are rounded to where it differs from the format asked for: they need range more than precision.
GRADIENT_FORMAT = {"mxfp8": "mxfp8_e5m2"}


class RecipeError(ValueError):
    """The recipe's name cannot be understood. The message lists what can."""


# (field of GemmFormats, GEMM, operand, contracted axis)
LINEAR_OPERANDS = (
    ("forward_a", "forward", "input", "input size"),
    ("forward_b", "forward", "weight", "input size"),
    ("dgrad_grad", "dgrad", "grad_output", "output size"),
    ("dgrad_b", "dgrad", "weight", "output size"),
    ("wgrad_grad", "wgrad", "grad_output", "tokens"),
    ("wgrad_a", "wgrad", "input", "tokens"),
)
QK_OPERANDS = (
    ("forward_a", "forward", "query", "head size"),
    ("forward_b", "forward", "key", "head size"),
    ("dgrad_grad", "dquery", "grad_scores", "keys"),
    ("dgrad_b", "dquery", "key", "keys"),
    ("wgrad_grad", "dkey", "grad_scores", "queries"),
    ("wgrad_a", "dkey", "query", "queries"),
)
PV_OPERANDS = (
    ("forward_a", "forward", "attention_probs", "keys"),
    ("forward_b", "forward", "value", "keys"),
    ("dgrad_grad", "dprobs", "grad_output", "head size"),
    ("dgrad_b", "dprobs", "value", "head size"),
    ("wgrad_grad", "dvalue", "grad_output", "queries"),
    ("wgrad_a", "dvalue", "attention_probs", "queries"),
)
PARTS = {"linear": LINEAR_OPERANDS, "qk": QK_OPERANDS, "pv": PV_OPERANDS, "router": LINEAR_OPERANDS}

# Every operand by its name: linear.dgrad.grad_output -> (linear, dgrad_grad)
OPERANDS = {
    f"{part}.{gemm}.{operand}": (part, field)
    for part, operands in PARTS.items()
    for field, gemm, operand, _ in operands
}


@dataclass(frozen=True)
class Part:
    """The quantization of one kind of product.

    quant_type  the format asked for, by its name for people
    formats     what its six operands are rounded to
    apart       (field of GemmFormats, format asked for) of the operands that were given one of their own, alone or with
                their GEMM
    """

    quant_type: str = BF16
    formats: GemmFormats = GemmFormats()
    apart: tuple[tuple[str, str], ...] = ()

    def asked(self, field: str) -> str:
        """The format asked for an operand, "mxfp8" also where that makes a gradient mxfp8_e5m2. It is the quant_type of
        what is recorded there; a GEMM's result has that of its first operand."""
        return dict(self.apart).get(field, self.quant_type)


@dataclass(frozen=True)
class Recipe:
    """What is quantized to what. `linear` covers every linear layer but the routers, `qk` and `pv` the attention core's
    products, `router` the linear layer that chooses the experts."""

    name: str
    linear: Part = Part()
    qk: Part = Part()
    pv: Part = Part()
    router: Part = Part()

    def lines(self) -> list[str]:
        """One line an operand, "linear.dgrad.grad_output    output size  mxfp8_e5m2"; of the router only if it is
        quantized."""
        return [
            f"{f'{name}.{gemm}.{operand}':<27} {axis:<12} {getattr(part.formats, field) or BF16}"
            for name, part in self.parts()
            for field, gemm, operand, axis in PARTS[name]
        ]

    def parts(self) -> list[tuple[str, Part]]:
        """The parts by name; the router only if it is quantized."""
        return [(name, getattr(self, name)) for name in PARTS if name != "router" or self.router != Part()]

    def describe(self) -> str:
        """linear mxfp8, qk bf16, pv bf16; of a part with operands of their own, linear (forward mxfp8 x mxfp4, ...)"""
        said = []
        for name, part in self.parts():
            gemms: dict[str, dict[str, None]] = {}
            for field, gemm, *_ in PARTS[name]:
                gemms.setdefault(gemm, {})[getattr(part.formats, field) or BF16] = None
            mixed = ", ".join(f"{gemm} {' x '.join(formats)}" for gemm, formats in gemms.items())
            said.append(f"{name} ({mixed})" if part.apart else f"{name} {part.quant_type}")
        return ", ".join(said)


def _part(asked: str, *, backward: bool = True) -> Part:
    name = FORMATS[asked].name
    if name == BF16:
        return Part()
    if not backward:
        return Part(name, GemmFormats(forward_a=name, forward_b=name))
    gradient = GRADIENT_FORMAT.get(name, name)
    return Part(name, GemmFormats(name, name, gradient, name, gradient, name))


def _with_gemm(part: Part, gemm: str, asked: str) -> Part:
    """A part with the format of one of its GEMMs, "forward", "dgrad" or "wgrad", replaced."""
    whole = _part(asked)
    fields = [field for field, *_ in LINEAR_OPERANDS if field.startswith(gemm)]
    return _with(part, {field: getattr(whole.formats, field) for field in fields}, whole.quant_type)


def _with(part: Part, formats: dict[str, str | None], asked: str) -> Part:
    apart = dict(part.apart) | dict.fromkeys(formats, asked)
    kept = tuple(sorted((field, name) for field, name in apart.items() if name != part.quant_type))
    return replace(part, formats=replace(part.formats, **formats), apart=kept)


def _operand_formats(assignments: Iterable[str]) -> dict[str, str]:
    """{"linear.dgrad.grad_output": "mxfp6_e3m2"} of "linear.dgrad.grad_output=mxfp6_e3m2"."""
    formats: dict[str, str] = {}
    for text in assignments:
        operand, equals, asked = (word.strip() for word in text.partition("="))
        if not equals:
            raise RecipeError(f"{text!r} sets no operand: write PART.GEMM.OPERAND=FORMAT, as in qk.forward.key=mxfp8")
        if operand not in OPERANDS:
            raise RecipeError(f"operand {operand!r} is unknown: {', '.join(OPERANDS)}")
        name = FORMATS[asked].name
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
    recipe = Recipe(name)
    if "linear_" in prefix or not prefix:
        recipe = replace(recipe, linear=_part(fmt))
    if prefix.startswith("FA_"):
        recipe = replace(recipe, qk=_part(fmt, backward=False))
    if not prefix:
        recipe = replace(recipe, qk=_part(fmt), pv=_part(fmt))
    if linear is not None:
        recipe = replace(recipe, linear=_part(linear))
    if qk is not None:
        recipe = replace(recipe, qk=_part(qk, backward=False))
    if pv is not None:
        recipe = replace(recipe, pv=_part(pv, backward=False))
    if router is not None:
        recipe = replace(recipe, router=_part(router))
    for gemm, asked in (("forward", forward), ("dgrad", dgrad), ("wgrad", wgrad)):
        if asked is not None:
            recipe = replace(recipe, linear=_with_gemm(recipe.linear, gemm, asked))
    for operand, asked in _operand_formats(operands).items():
        part, field = OPERANDS[operand]
        changed = _with(getattr(recipe, part), {field: None if asked == BF16 else asked}, asked)
        recipe = replace(recipe, **{part: changed})
    return recipe
