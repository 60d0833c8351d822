"""Treatments: a recipe in a group of products, while everything else is rounded as by a base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from binade.collector.errors import ConfigError
from binade.collector.models.site import Site
from binade.collector.recipes.files import to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import PARTS, Recipe
from binade.collector.recipes.selection import SiteSelection
from binade.data.run.effects import recipe_sha256
from binade.data.run.experiment import NONE, EffectGroup, TreatmentKey
from binade.data.run.tensor_kinds import Product
from binade.quant.specs import OPERAND_FIELDS, GemmFormats, SpecError

BY: dict[str, tuple[str, ...]] = {
    "site": ("part", "layer_index", "module"),
    "layer": ("part", "layer_index"),
    "module": ("part", "module"),
    "part": ("part",),
    "model": (),
}
"""What the products of a group have in common, by the granularity of an experiment; for `model`, only the recipe."""

Key = tuple[Site, Product]


@dataclass(frozen=True)
class Treatment:
    """How each product of a model is rounded in a pass.

    key             what is kept of it
    formats         of the products whose forward operands are rounded; the others are not
    base            the treatment that it differs from in its group; None for a base
    keeps_tokens    whether the log-probability of each token is kept, and KL(treatment ‖ base) measured
    keeps_routes    whether the choices of routers are kept
    keeps_blocks    whether the errors of the blocks' outputs are measured
    """

    key: TreatmentKey
    formats: Mapping[Key, GemmFormats] = field(default_factory=dict, compare=False, repr=False)
    base: Treatment | None = None
    keeps_tokens: bool = False
    keeps_routes: bool = False
    keeps_blocks: bool = False


def recipes_of(texts: Iterable[str]) -> dict[str, Recipe]:
    """The recipes or formats of these names. Raises RecipeError and SpecError."""
    return {text: parse_recipe(text) for text in texts}


def part_of(key: Key) -> str:
    """The name of the part of a recipe that rounds a product."""
    site, product = key
    return "router" if product is Product.LINEAR and site.is_of_router else product.value


def group_of(key: Key, by: str) -> EffectGroup:
    """The group of a product, at a granularity of BY."""
    site, _ = key
    values: dict[str, Any] = {"part": part_of(key), "layer_index": site.layer_index, "module": site.module}
    return EffectGroup(**{name: values[name] for name in BY[by]})


def holds(group: EffectGroup, key: Key) -> bool:
    """Whether a product belongs to a group."""
    site, _ = key
    return (
        group.part in ("", part_of(key))
        and group.layer_index in (None, site.layer_index)
        and group.module in (None, site.module)
    )


def forward_formats(recipe: Recipe, products: Sequence[Key]) -> dict[Key, GemmFormats]:
    """How a recipe rounds the forward operands of these products in its first iteration, of those that it rounds.
    Raises ConfigError if this depends on earlier passes."""
    sites = [site for site, _ in products]
    kept = SiteSelection.parse(recipe.keep).of(sites) if recipe.keep else frozenset()
    formats = {key: recipe.part_of(key[1], key[0]).formats for key in products if key[0] not in kept}
    formats = {key: gemm_formats for key, gemm_formats in formats.items() if _rounds_forward(gemm_formats)}
    if any(gemm_formats.delayed for gemm_formats in formats.values()):
        raise ConfigError(
            f"{recipe.name} takes its scales from earlier steps, so one pass does not show its effect: choose a "
            "recipe with current scales, such as te_current"
        )
    backward: dict[str, Any] = dict.fromkeys(name for name in OPERAND_FIELDS if not name.startswith("forward"))
    return {key: replace(gemm_formats, **backward, of_rounded=()) for key, gemm_formats in formats.items()}


def _rounds_forward(formats: GemmFormats) -> bool:
    return bool(formats["forward_a"] or formats["forward_b"] or formats.softmax.tile or formats.cache)


def base_of(
    text: str, recipe: Recipe, products: Sequence[Key], keeps_tokens: bool = False, keeps_routes: bool = False
) -> Treatment:
    """A recipe in all products, as a base. One that rounds no forward operand is the base without rounding."""
    formats = forward_formats(recipe, products)
    key = TreatmentKey(text, recipe_sha256(to_toml(recipe))) if formats else NONE
    return Treatment(key, formats, None, keeps_tokens, keeps_routes)


def replayed(base: Treatment, chooser: Treatment) -> Treatment:
    """A base with the experts that another base chooses, which keeps its routes: a treatment of that other base."""
    key = TreatmentKey(base.key.text, base.key.recipe_sha256, replays=True, base=chooser.key)
    return Treatment(key, base.formats, chooser, keeps_tokens=True)


def treatments_of(
    products: Sequence[Key],
    recipes: Mapping[str, Recipe],
    by: Iterable[str],
    *,
    parts: Sequence[str] = (),
    base: Treatment | None = None,
    operands: bool = False,
    keeps_tokens: bool = False,
    keeps_blocks: bool = False,
) -> list[Treatment]:
    """The treatments of recipes at granularities of BY: the products that differ from the base, one group at a time,
    the largest groups first.

    parts         of the recipes; all if empty
    base          without rounding if None
    operands      whether the operands of each group are changed one at a time as well, where both differ and a product
                  can have one of them rounded as by the recipe and the other as by the base
    keeps_blocks  whether the errors of the blocks' outputs are measured, of groups in all layers: parts and the model

    Raises ConfigError if a recipe rounds none of these products in another way than the base, or if errors of blocks
    are requested of no such group."""
    base = base or Treatment(NONE)
    treatments = []
    if keeps_blocks and not {"part", "model"} & set(by):
        raise ConfigError("errors of blocks are those of what is rounded in all layers: add part or model to --by")
    for granularity in sorted(by, key=lambda name: len(BY[name])):
        for text, recipe in recipes.items():
            formats = forward_formats(recipe, products)
            changed = [key for key in products if formats.get(key) != base.formats.get(key)]
            if not changed:
                raise ConfigError(_alike(recipe, base))
            keys = [key for key in changed if not parts or not BY[granularity] or part_of(key) in parts]
            if not keys:
                raise ConfigError(f"{text} rounds no forward operand of {', '.join(parts)}: choose other parts")
            words = TreatmentKey(text, recipe_sha256(to_toml(recipe)), base=base.key)
            for group in dict.fromkeys(group_of(key, granularity) for key in keys):
                own = [key for key in changed if holds(group, key)]
                blocks = keeps_blocks and granularity in ("part", "model")
                treatments += [
                    Treatment(
                        replace(words, group=group, operand=operand, is_whole=whole), mixed, base, keeps_tokens,
                        keeps_blocks=blocks,
                    )
                    for operand, whole, mixed in _changes(own, formats, base.formats, operands)
                ]  # fmt: skip
    return list({treatment.key: treatment for treatment in treatments}.values())


def _alike(recipe: Recipe, base: Treatment) -> str:
    if base.key == NONE:
        return f"{recipe.name} rounds no forward operand of this model: choose another recipe or format"
    return (
        f"{recipe.name} and {base.key.text} round the forward operands of this model alike: give two recipes that "
        "differ there"
    )


def _changes(
    keys: Sequence[Key], formats: Mapping[Key, GemmFormats], base: Mapping[Key, GemmFormats], operands: bool
) -> list[tuple[str, bool, dict[Key, GemmFormats]]]:
    """(the operand that differs, whether all that differs is changed, the formats of all products): of a whole group,
    and of its operands one at a time."""
    none = GemmFormats()
    new, old = ({key: known.get(key, none) for key in keys} for known in (formats, base))
    fields = [
        name
        for name in ("forward_a", "forward_b")
        if any(getattr(new[key], name) != getattr(old[key], name) for key in keys)
    ]
    cached = {_cached(new[key]) or _cached(old[key]) for key in keys}
    same_softmax = all(new[key].softmax == old[key].softmax for key in keys)
    same_cache = all(new[key].cache == old[key].cache for key in keys)
    differ = {*fields, *(() if same_cache else cached)}
    names = {name: _operand(name, keys) for name in differ}
    only = names[differ.pop()] if len(differ) == 1 and same_softmax else ""
    changes = [(only, True, {**base, **new})]
    if operands and len(fields) == 2 and same_softmax and same_cache and all(names.values()):
        for name in fields:
            with suppress(SpecError):  # such as one of two operands that are rotated together
                mixed = {key: replace(old[key], **{name: getattr(new[key], name)}) for key in keys}
                changes.append((names[name], False, {**base, **mixed}))
    return changes


def _cached(formats: GemmFormats) -> str:
    """The operand that a KV cache holds; "" for none."""
    return formats.cache.operand if formats.cache else ""


def _operand(name: str, keys: Iterable[Key]) -> str:
    """The name of an operand, a field of GemmFormats, in its products: "weight"; "" if it has several."""
    names = {operand.name for key in keys for operand in PARTS[part_of(key)] if operand.field == name}
    return names.pop() if len(names) == 1 else ""
