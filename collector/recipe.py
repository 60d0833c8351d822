"""Recipes: which operand of which GEMM gets which format. Plain data, no torch.

    bf16                nothing is quantized
    FA_<format>         the two operands of QKᵀ (the attention's backward products stay in bf16)
    linear_<format>     the three GEMMs of every linear layer
    FA_linear_<format>  both
    <format>            everything: linear layers, QKᵀ and PV, forward and backward

Gradients take `mxfp8_e5m2` under `mxfp8`. The LM head and the embedding stay in bf16, and the router in its own float32
unless it is given a format by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quant.formats import FORMATS, GemmFormats

BF16 = "bf16"
NAMED_FORMATS = ("mxfp8", "mxfp4", "hifp8")
TEN_RECIPES = (BF16, *(f"{part}_{name}" for part in ("FA", "linear", "FA_linear") for name in NAMED_FORMATS))

# What gradients are rounded to where it differs from the format asked for: they need range more than precision.
GRADIENT_FORMAT = {"mxfp8": "mxfp8_e5m2"}


class RecipeError(ValueError):
    """The recipe's name cannot be understood. The message lists what can."""


@dataclass(frozen=True)
class Part:
    """The quantization of one kind of product: quant_type is its name for people, formats its six operands."""

    quant_type: str = BF16
    formats: GemmFormats = GemmFormats()


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
        """One line a GEMM operand: "linear  dgrad    grad_output · output axis   mxfp8_e5m2". The router has lines only
        if it is quantized."""
        rows = []
        for title, part, operands in (
            ("linear", self.linear, LINEAR_OPERANDS),
            ("QK^T", self.qk, QK_OPERANDS),
            ("PV", self.pv, PV_OPERANDS),
            *([("router", self.router, LINEAR_OPERANDS)] if self.router != Part() else []),
        ):
            for field, gemm, operand, axis in operands:
                rows.append(f"{title:<7} {gemm:<8} {operand:<16} {axis:<12} {getattr(part.formats, field) or BF16}")
        return rows


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


def _part(fmt: str, *, backward: bool = True) -> Part:
    name = FORMATS[fmt].name
    if name == BF16:
        return Part()
    if not backward:
        return Part(name, GemmFormats(forward_a=name, forward_b=name))
    gradient = GRADIENT_FORMAT.get(name, name)
    return Part(name, GemmFormats(name, name, gradient, name, gradient, name))


def parse_recipe(
    name: str,
    *,
    linear: str | None = None,
    qk: str | None = None,
    pv: str | None = None,
    router: str | None = None,
) -> Recipe:
    """The recipe of a name, with the format of a part replaced where one is given ("bf16" turns it off).

    Raises RecipeError or UnknownFormat.
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
    if linear:
        recipe = replace(recipe, linear=_part(linear))
    if qk:
        recipe = replace(recipe, qk=_part(qk, backward=False))
    if pv:
        recipe = replace(recipe, pv=_part(pv, backward=False))
    if router:
        recipe = replace(recipe, router=_part(router))
    return recipe
