"""Recipes: which operand of which GEMM gets which format. Plain data, no torch.

    bf16                nothing is quantized
    FA_<format>         the two operands of QKᵀ (the attention's backward products stay in bf16)
    linear_<format>     the three GEMMs of every linear layer
    FA_linear_<format>  both
    <format>            everything: linear layers, QKᵀ, PV and declared products, forward and backward

A spec can be used in place of any format: `linear_nvfp4(block=16x16)`. Under `mxfp8`, gradients are rounded to
`mxfp8_e5m2`, with the same options; under `mxfp8_e4m3`, to E4M3. The LM head and the embedding stay in bf16. The router
stays in float32 unless it is given a format.

    <published>         a recipe of `collector/recipes/*.toml`, see collector.recipes.files
    <path>.toml         one of the user's own
    <path>.yaml         Megatron Core's precision file, see collector.recipes.precision_file
    <recipe>+<path>.yaml   one that says what differs from a recipe: te_mxfp8+mine.yaml

`without=` turns ingredients off, to see what each is for: `nvidia_nvfp4(without=rounding+rotation)`, see INGREDIENTS.
`backward=dequantized` and `backward=high_precision` run dgrad and wgrad of every linear layer in bf16, on what the
forward GEMM read or on the originals: `te_mxfp8(backward=dequantized)`.

The most specific format wins: that of a part (linear, qk, pv, router, product) replaces the recipe's, that of one GEMM
of the linear layers (forward, dgrad, wgrad) replaces the part's, and that of an operand (OPERANDS) replaces the GEMM's.
"bf16" turns quantization off. Only an operand's format is taken literally: there `mxfp8` means E4M3 for a gradient too.
These options also replace the formats of a recipe's modules and of its schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from binade.collector.recipes import precision_file
from binade.collector.recipes.draft import BACKWARDS, GRADIENT_FORMAT, INGREDIENTS, RecipeDraft, formats_of
from binade.collector.recipes.files import ON_BASE, PUBLISHED, Reader, draft_of, read_draft
from binade.collector.recipes.recipe import OPERANDS, Recipe, RecipeError
from binade.quant.formats import FORMATS
from binade.quant.specs import Softmax, Spec

# What a recipe named after a format covers, by the prefix of the format; longer prefixes come first.
ALL = ("linear", "qk", "pv", "product")
PREFIXES = {"FA_linear_": ("linear", "qk"), "FA_": ("qk",), "linear_": ("linear",), "": ALL}
READERS: dict[str, Reader] = {".toml": draft_of, ".yaml": precision_file.draft_of}
"""What reads the user's own files, by the end of their name."""
READERS_TOO: dict[str, Reader] = {".yml": precision_file.draft_of, ".cfg": precision_file.draft_of,
                                  ".json": precision_file.draft_of_json}  # fmt: skip
"""The same for names that other tools use."""
WITHOUT = re.compile(r",?\s*without=([^,()]*)")
BACKWARD = re.compile(r",?\s*backward=([^,()]*)")


def _operand_formats(assignments: Iterable[str]) -> dict[str, str]:
    """{"linear.dgrad.grad_output": "mxfp6_e3m2"} for "linear.dgrad.grad_output=mxfp6_e3m2"."""
    formats: dict[str, str] = {}
    for text in assignments:
        operand, equals, requested = (word.strip() for word in text.partition("="))
        if not equals:
            raise RecipeError(
                f"{text!r} does not set an operand: write PART.GEMM.OPERAND=FORMAT, as in qk.forward.key=mxfp8"
            )
        if operand not in OPERANDS:
            raise RecipeError(f"unknown operand {operand!r}: expected one of {', '.join(OPERANDS)}")
        name = str(Spec.of(requested))
        if formats.setdefault(operand, name) != name:
            raise RecipeError(f"operand {operand} is given two formats, {formats[operand]} and {name}: give one")
    return formats


def _by_format(name: str) -> RecipeDraft:
    """The recipe of a format, in all parts or in those of a prefix."""
    for prefix in PREFIXES:
        fmt = name.removeprefix(prefix)
        if name.startswith(prefix) and fmt.partition("(")[0] in FORMATS:
            break
    else:
        known = [*PUBLISHED, *(prefix + fmt for prefix in PREFIXES for fmt in (*FORMATS, *FORMATS.aliases))]
        near = get_close_matches(re.split(r"[ (]", name)[0].lower(), known)
        meant = f" (did you mean {', '.join(near)}?)" if near else ""
        raise RecipeError(
            f"unknown recipe {name!r}{meant}: expected a name from `binade list recipes`, or a file that ends in "
            f"{' or '.join(READERS)}"
        )
    draft = RecipeDraft()
    for part in PREFIXES[prefix]:
        draft.quant_types[part] = str(Spec.of(fmt))
        draft.formats[part] = formats_of(fmt, backward=part == "linear" or not prefix)
    return draft


def split_without(name: str) -> tuple[str, list[str]]:
    """("nvidia_nvfp4", ["rounding", "keep"]) for "nvidia_nvfp4(without=rounding+keep)". Raises RecipeError."""
    match = WITHOUT.search(name)
    if not match:
        return name, []
    ingredients = match[1].split("+")
    if unknown := [ingredient for ingredient in ingredients if ingredient not in INGREDIENTS]:
        raise RecipeError(
            f"without={unknown[0]} is not an ingredient of a recipe: expected one of {', '.join(INGREDIENTS)}"
        )
    return without_none(name), ingredients


def without_none(name: str) -> str:
    """ "nvidia_nvfp4" for "nvidia_nvfp4(without=rounding+keep)"."""
    return WITHOUT.sub("", name).replace("()", "")


def _draft(text: str) -> tuple[str, RecipeDraft]:
    """The name and the draft of a recipe's text, its ingredients left out. Raises as `parse_recipe`."""
    base, ingredients = split_without(text)
    backward = "".join(BACKWARD.findall(base)).strip()
    if BACKWARD.search(base) and backward not in BACKWARDS:
        raise RecipeError(f"backward={backward} is not possible: expected {' or '.join(BACKWARDS)}")
    base = BACKWARD.sub("", base).replace("()", "")
    under = ""
    if on_base := ON_BASE.fullmatch(base):
        under, base = on_base["base"], on_base["file"]
    readers = READERS | READERS_TOO
    path = PUBLISHED.get(base) or (Path(base) if Path(base).suffix in readers else None)
    options = [f"backward={backward}"] * bool(backward) + [f"without={'+'.join(ingredients)}"] * bool(ingredients)
    reader = readers[path.suffix] if path else None
    name = path.stem + f"({', '.join(options)})" * bool(options) if path else text
    if under:
        of_base, draft = _draft(under)
        name, reader = f"{of_base}+{name}", partial(precision_file.draft_of, base=draft)
    draft = read_draft(path, name, reader) if path else _by_format(base)
    for stage in draft.stages() if backward else ():
        stage.set_backward(backward)
    for ingredient in ingredients:
        present = [stage.leave_out(ingredient) for stage in draft.stages()]
        if not any(present):
            raise RecipeError(f"recipe {base} does not have the ingredient {ingredient!r}")
    return name, draft


def recipe_of(config: Mapping[str, Any]) -> Recipe | None:
    """The recipe of a run, from its run.json: by its text, else by its name; None if it has neither. No file of a user
    is read."""
    name = str(config.get("recipe"))
    try:
        if "recipe_toml" in config:
            return draft_of(str(config["recipe_toml"]), name).recipe(name)
        return None if any(suffix in name for suffix in READERS | READERS_TOO) else parse_recipe(name)
    except ValueError:
        return None


def gradients_note(configs: Iterable[Mapping[str, Any]]) -> str:
    """A sentence on a comparison of runs, if a format that one of them requested is another for gradients, else "".
    configs: run.json of each."""
    found: dict[str, str] = {}
    for recipe in filter(None, map(recipe_of, configs)):
        for part in recipe.every_part():
            for name in ("dgrad_grad", "wgrad_grad"):
                plain, spec = part.quant_type_of(name).partition("(")[0], part.formats[name]
                if spec and GRADIENT_FORMAT.get(plain) == spec.format.name:
                    found[plain] = spec.format.name
    texts = [f"Plain {plain} rounds gradients to {spec}, and nothing else to it" for plain, spec in found.items()]
    return f"{'; '.join(texts)}." if texts else ""


def ingredients_of(text: str) -> list[str]:
    """The INGREDIENTS that a recipe has. Raises as `parse_recipe`."""
    draft = _draft(text)[1]
    return [
        ingredient
        for ingredient in INGREDIENTS
        if any(stage.leave_out(ingredient) for stage in deepcopy(draft).stages())
    ]


def parse_recipe(
    name: str,
    *,
    linear: str | None = None,
    qk: str | None = None,
    pv: str | None = None,
    router: str | None = None,
    product: str | None = None,
    forward: str | None = None,
    dgrad: str | None = None,
    wgrad: str | None = None,
    operands: Sequence[str] = (),
    softmax: str | None = None,
) -> Recipe:
    """The recipe of a name or of a file, with formats or specs replaced where they are given ("bf16" turns off): of a
    part (linear, qk, pv, router, product), then of one GEMM of every linear layer (forward, dgrad, wgrad), then of
    operands, each written "linear.dgrad.grad_output=mxfp6_e3m2" with a name of OPERANDS. softmax: see `Softmax.parse`.

    Raises RecipeError, UnknownFormatError, or SpecError for options that are not possible.
    """
    name, draft = _draft(name)
    for stage in draft.stages():
        parts = {"linear": linear, "qk": qk, "pv": pv, "router": router, "product": product}
        for part, text in parts.items():
            if text is not None:
                stage.set_part(part, text)
        for gemm, text in (("forward", forward), ("dgrad", dgrad), ("wgrad", wgrad)):
            if text is not None:
                stage.set_gemm(gemm, text)
        for operand, text in _operand_formats(operands).items():
            stage.set_operand(*OPERANDS[operand], text)
        if softmax is not None:
            stage.softmax = Softmax.parse(softmax)
    return draft.recipe(name)
