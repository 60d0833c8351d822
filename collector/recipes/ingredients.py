"""What of a recipe can be turned off (`without=`), and its backward GEMMs in bf16 (`backward=`). No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from binade.collector.recipes.recipe import BF16, MODULES, REUSED_OPERANDS, TABLES, Part, Recipe
from binade.quant.elements import RoundingMode
from binade.quant.specs import OPERAND_FIELDS, Block, GemmFormats, Smooth, Spec

INGREDIENTS = {
    "dgrad": "the GEMM for the gradient of the input runs in bf16",
    "wgrad": "the GEMM for the gradient of the weight runs in bf16",
    "scale": "the format's default scale rule",
    "rounding": "to nearest instead of stochastic",
    "center": "the mean over tokens is not subtracted",
    "rotation": "no Hadamard rotation",
    "tiles": "vectors along the contracted axis instead of tiles",
    "rounded": "backward operands are rounded from the original, not from the rounded forward operand",
    "smooth": "the means of keys and queries are not subtracted",
    "keep": "no layer stays in bf16",
    "schedule": "the recipe does not change during the run",
    "deoscillation": "weights that oscillate are left alone",
    "state": "the optimizer's state stays as the optimizer holds it",
    "communication": "ranks exchange values that are not rounded",
    "kv_cache": "a KV cache holds keys and values as they are",
}
"""What `without=` turns off, and what happens instead."""


BACKWARDS = ("dequantized", "high_precision")


def leave_out(recipe: Recipe, ingredient: str) -> Recipe:
    """The recipe without one of INGREDIENTS, also in its schedule; an equal one if it does not have it."""
    if ingredient == "keep":
        return replace(recipe, keep="")
    if ingredient == "schedule":
        return replace(recipe, schedule=())
    return recipe.in_each_stage(partial(_left_out, ingredient=ingredient))


def _left_out(stage: Recipe, ingredient: str) -> Recipe:
    if ingredient in TABLES:
        left_out: dict[str, Any] = {ingredient: None}
        return replace(stage, **left_out)
    if ingredient == "smooth":
        return stage.with_parts({"qk": stage.qk.changed("qk", {"smooth": Smooth.NONE})})
    made = stage.with_parts({name: _plainer(name, part, ingredient) for name, part in stage.by_name().items()})
    tables: dict[str, Any] = {}
    for name in ("state", "communication"):
        if table := getattr(stage, name):
            specs = {key: spec for key, spec in table.specs.items() if isinstance(spec, Spec)}
            tables[name] = replace(table, **{key: _without(ingredient, key, spec) for key, spec in specs.items()})
    return replace(made, **tables)


def _plainer(name: str, part: Part, ingredient: str) -> Part:
    """A part without an ingredient."""
    if ingredient == "rounded":
        return part.changed(name, {"of_rounded": ()})
    specs = {field: spec for field in OPERAND_FIELDS if (spec := part.formats[field])}
    changes: dict[str, Any] = {field: _without(ingredient, field, spec) for field, spec in specs.items()}
    in_bf16 = {field: BF16 for field, spec in changes.items() if spec is None}
    rounded = tuple(field for field in part.formats.of_rounded if field not in in_bf16)
    return part.changed(name, {**changes, "of_rounded": rounded}, in_bf16)


def _without(ingredient: str, field: str, spec: Spec) -> Spec | None:
    """The spec of an operand without an ingredient; None for bf16."""
    if field.startswith(ingredient):  # dgrad, wgrad
        return None
    options, plain = spec.options(), Spec.of(spec.format)
    dropped: set[str] = set()
    if ingredient == "scale":
        dropped = {"scale", "error", "bound", "history", "algorithm", "margin", *(["block"] * (plain.block is None))}
        options |= {"block": spec.block}  # the scheme may have another one by default
    elif ingredient == "rounding" and spec.scaling.stochastic:
        dropped = {"scale"}
    elif ingredient == "rounding" and spec.rounding == RoundingMode.STOCHASTIC:
        dropped = {"rounding"}
    elif ingredient == "center":
        dropped = {"center"}
    elif ingredient == "rotation":
        dropped = {"hadamard", "signs"}
    elif ingredient == "tiles" and spec.block and (spec.block.rows or 1) > 1:
        options["block"] = Block(1, spec.block.columns)
    return Spec.of(spec.format, **{name: value for name, value in options.items() if name not in dropped})


def with_backward(recipe: Recipe, source: str) -> Recipe:
    """The recipe with dgrad and wgrad of every linear layer in bf16: on what the forward GEMM read, rounded
    ("dequantized"), or on the originals ("high_precision"). Transformer Engine's `backward_override`."""

    def changed(stage: Recipe) -> Recipe:
        parts = {name: part for name, part in stage.by_name().items() if name == "linear" or name.startswith(MODULES)}
        return stage.with_parts(
            {name: Part.requested(part.quant_type, _in_bf16(part.formats, source)) for name, part in parts.items()}
        )

    return recipe.in_each_stage(changed)


def _in_bf16(formats: GemmFormats, source: str) -> GemmFormats:
    backward: dict[str, Any] = {field: None for field in OPERAND_FIELDS if not field.startswith("forward")}
    forward = dict(zip(REUSED_OPERANDS, ("forward_b", "forward_a"), strict=True))
    rounded = tuple(field for field, operand in forward.items() if source == BACKWARDS[0] and formats[operand])
    return replace(formats, **backward, of_rounded=rounded)
