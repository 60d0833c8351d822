"""The ladder of a recipe: the runs of its ablation, in the order in which papers print them. No torch.

    bf16                the reference of every gap
    forward             the recipe with dgrad and wgrad in bf16
    + dgrad             with wgrad in bf16
    + wgrad             the recipe itself
    without <name>      the recipe with one ingredient off, for each of INGREDIENTS that it has

A recipe that rounds nothing in a GEMM has no rung for it. The text of a recipe says which rung it is, so that runs on
disk are found without the recipe's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from binade.collector.recipes.ingredients import INGREDIENTS
from binade.collector.recipes.parse import ingredients_of, parse_recipe, split_without
from binade.collector.recipes.recipe import BF16, RecipeError
from binade.data.compare.ladder import Ladder, Rung

Off = frozenset[str]  # the ingredients that a text turns off
WHOLE, DGRAD, WGRAD = Off(), Off({"dgrad"}), Off({"wgrad"})
GEMMS = DGRAD | WGRAD


def ladder(recipe: str) -> Ladder:
    """The ladder of a recipe: a name, a format or the path of a .toml or .yaml file, with or without `without=`.

    Raises as `parse_recipe`; RecipeError if nothing of the recipe can be turned off.
    """
    base, given = split_without(recipe)
    common = frozenset(given)
    has = frozenset(ingredients_of(recipe))
    offs = {has & GEMMS, has & WGRAD, WHOLE, *(Off({ingredient}) for ingredient in has - GEMMS)}
    texts = {off: _text(base, common | off) for off in offs}
    # Without its backward GEMMs a recipe may round nothing: that is bf16.
    texts = {off: text for off, text in texts.items() if parse_recipe(text).quantized}
    if not has:
        raise RecipeError(f"recipe {recipe} has no ingredient to leave out: expected one of {', '.join(INGREDIENTS)}")
    return _ladder(_text(base, common), texts)


def ladders(recipes: Iterable[str]) -> list[Ladder]:
    """The ladders of these recipes, by name, each with those of its rungs that are present.

    Recipes that belong to no ladder are left out.
    """
    bases: dict[str, dict[Off, str]] = {}
    for text in dict.fromkeys(recipes):
        try:
            base, off = split_without(text)
        except RecipeError:
            continue
        bases.setdefault(base, {})[frozenset(off)] = text
    made = []
    for base, texts in sorted(bases.items()):
        for common in sorted({off - GEMMS for off in texts}, key=sorted):
            rungs = {off - common: text for off, text in texts.items() if off >= common}
            rungs = {off: text for off, text in rungs.items() if off <= GEMMS or len(off) == 1}
            if any(off & GEMMS for off in rungs) or (not common and any(rungs)):
                made.append(_ladder(_text(base, common), rungs))
    return made


def without(recipe: str, *ingredients: str) -> str:
    """The text of a recipe with these ingredients off, and those that it already turns off. Raises RecipeError."""
    base, given = split_without(recipe)
    return _text(base, Off({*given, *ingredients}))


def _text(base: str, off: Off) -> str:
    """The text of a recipe with ingredients off."""
    listed = "+".join(ingredient for ingredient in INGREDIENTS if ingredient in off)
    if not off:
        return base
    return f"{base[:-1]}, without={listed})" if base.endswith(")") else f"{base}(without={listed})"


def _ladder(name: str, texts: Mapping[Off, str]) -> Ladder:
    """The ladder of these texts, given by the ingredients they turn off."""
    steps = [off for off in (GEMMS, WGRAD, DGRAD, WHOLE) if off in texts]
    if DGRAD in steps[1:]:  # not a step on the way from forward to the full recipe
        steps.remove(DGRAD)
    before = [BF16, *(texts[off] for off in steps)]
    rungs = [Rung(_title(off, texts), texts[off], other) for off, other in zip(steps, before, strict=False)]
    single = [
        Off({ingredient}) for ingredient in INGREDIENTS if Off({ingredient}) in texts and Off({ingredient}) not in steps
    ]
    rungs += [Rung(_title(off, texts), texts[off], texts.get(WHOLE, "")) for off in single]
    return Ladder(name, (Rung(BF16, BF16), *rungs))


def _title(off: Off, texts: Mapping[Off, str]) -> str:
    """The title of a step says what it adds, if the previous step is present."""
    if off == GEMMS:
        return "forward"
    if off == WGRAD and GEMMS in texts:
        return "+ dgrad"
    if off == WHOLE:
        return "+ wgrad" if WGRAD in texts else "full recipe"
    return f"without {min(off)}"
