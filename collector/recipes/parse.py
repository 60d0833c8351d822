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
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from binade.collector.recipes import precision_file
from binade.collector.recipes.files import ON_BASE, PUBLISHED, Reader, for_operand, from_toml, read_recipe
from binade.collector.recipes.ingredients import BACKWARDS, INGREDIENTS, leave_out, with_backward
from binade.collector.recipes.recipe import BF16, GRADIENTS, LINEAR_OPERANDS, OPERANDS, PARTS, Part, Recipe, RecipeError
from binade.quant.formats import FORMATS
from binade.quant.specs import OPERAND_FIELDS, Softmax, Spec

# The format of gradients, which need range more than precision, by the name that the user wrote: mxfp8_e4m3 means E4M3
# for gradients too, mxfp8 does not.
GRADIENT_FORMAT = {"mxfp8": "mxfp8_e5m2"}

# What a recipe named after a format covers, by the prefix of the format; longer prefixes come first.
ALL = ("linear", "qk", "pv", "product")
PREFIXES = {"FA_linear_": ("linear", "qk"), "FA_": ("qk",), "linear_": ("linear",), "": ALL}
READERS: dict[str, Reader] = {".toml": from_toml, ".yaml": precision_file.read}
"""What reads the user's own files, by the end of their name."""
READERS_TOO: dict[str, Reader] = {".yml": precision_file.read, ".cfg": precision_file.read,
                                  ".json": precision_file.read_json}  # fmt: skip
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


def _specs(requested: str) -> tuple[Spec | None, Spec | None]:
    """The specs of a part's operands and of its gradients for a requested format; None for bf16."""
    spec = Spec.of(requested)
    if str(spec) == BF16:
        return None, None
    written = requested.partition("(")[0].strip()
    return spec, Spec.of(GRADIENT_FORMAT.get(written, spec), **spec.options())


def _formats_of(requested: str, *, backward: bool = True) -> dict[str, Spec | None]:
    """The specs that a part's operands are rounded to; the mean over tokens is not subtracted from weights."""
    spec, gradient = _specs(requested)
    return {
        field: for_operand(field, gradient if field.endswith("grad") else spec)
        if backward or field.startswith("forward")
        else None
        for field in OPERAND_FIELDS
    }


def _by_format(name: str, text: str) -> Recipe:
    """The recipe of a format, in all parts or in those of a prefix. text: its name with what it leaves out."""
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
    part = Part(str(Spec.of(fmt)))
    covered = {
        name: part.changed(name, _formats_of(fmt, backward=name == "linear" or not prefix)) for name in PREFIXES[prefix]
    }
    return Recipe(text).with_parts(covered)


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


def _recipe(text: str) -> Recipe:
    """The recipe of a text, its ingredients left out. Raises as `parse_recipe`."""
    base, ingredients = split_without(text)
    backward = "".join(BACKWARD.findall(base)).strip()
    if BACKWARD.search(base) and backward not in BACKWARDS:
        raise RecipeError(f"backward={backward} is not possible: expected {' or '.join(BACKWARDS)}")
    base = BACKWARD.sub("", base).replace("()", "")
    under = None
    if on_base := ON_BASE.fullmatch(base):
        under, base = _recipe(on_base["base"]), on_base["file"]
    readers = READERS | READERS_TOO
    path = PUBLISHED.get(base) or (Path(base) if Path(base).suffix in readers else None)
    if path:
        options = [f"backward={backward}"] * bool(backward) + [f"without={'+'.join(ingredients)}"] * bool(ingredients)
        name = path.stem + (f"({', '.join(options)})" if options else "")
        reader = readers[path.suffix]
        if under:
            name, reader = f"{under.name}+{name}", partial(precision_file.read, base=under)
        recipe = read_recipe(path, name, reader)
    else:
        recipe = _by_format(base, text)
    if backward:
        recipe = with_backward(recipe, backward)
    for ingredient in ingredients:
        before, recipe = recipe, leave_out(recipe, ingredient)
        if recipe == before:
            raise RecipeError(f"recipe {base} does not have the ingredient {ingredient!r}")
    return recipe


def recipe_of(config: Mapping[str, Any]) -> Recipe | None:
    """The recipe of a run, from its run.json: by its text, else by its name; None if it has neither. No file of a user
    is read."""
    name = str(config.get("recipe"))
    try:
        if "recipe_toml" in config:
            return from_toml(str(config["recipe_toml"]), name)
        return None if any(suffix in name for suffix in READERS | READERS_TOO) else parse_recipe(name)
    except ValueError:
        return None


def gradients_note(configs: Iterable[Mapping[str, Any]]) -> str:
    """A sentence on a comparison of runs, if a format that one of them requested is another for gradients, else "".
    configs: run.json of each."""
    found: dict[str, str] = {}
    for recipe in filter(None, map(recipe_of, configs)):
        for part in recipe.every_part():
            for name in GRADIENTS:
                plain, spec = part.quant_type_of(name).partition("(")[0], part.formats[name]
                if spec and GRADIENT_FORMAT.get(plain) == spec.format.name:
                    found[plain] = spec.format.name
    texts = [f"Plain {plain} rounds gradients to {spec}, and nothing else to it" for plain, spec in found.items()]
    return f"{'; '.join(texts)}." if texts else ""


def ingredients_of(text: str) -> list[str]:
    """The INGREDIENTS that a recipe has. Raises as `parse_recipe`."""
    recipe = _recipe(text)
    return [ingredient for ingredient in INGREDIENTS if leave_out(recipe, ingredient) != recipe]


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
    recipe = _recipe(name)
    parts = {"linear": linear, "qk": qk, "pv": pv, "router": router, "product": product}
    gemms = {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}
    change = partial(
        _with_formats,
        parts={part: text for part, text in parts.items() if text is not None},
        gemms={gemm: text for gemm, text in gemms.items() if text is not None},
        operands=_operand_formats(operands),
        softmax=None if softmax is None else Softmax.parse(softmax),
    )
    return recipe.in_each_stage(change).checked()


def _with_formats(
    stage: Recipe,
    parts: Mapping[str, str],
    gemms: Mapping[str, str],
    operands: Mapping[str, str],
    softmax: Softmax | None,
) -> Recipe:
    """The recipe with the formats that options request, see `parse_recipe`; operands by their names in OPERANDS. All
    operands of a part change at once, because they have to go together."""
    made = {}
    for name, part in stage.by_name().items():
        kind = name if name in PARTS else "linear"
        changes: dict[str, Any] = {}
        requested: dict[str, str] = {}
        if (text := parts.get(kind)) is not None:
            part = Part(str(Spec.of(text)), part.formats)
            changes |= _formats_of(text, backward=kind not in ("qk", "pv"))
        for gemm, text in gemms.items() if kind == "linear" else ():
            whole = _formats_of(text)
            fields = [operand.field for operand in LINEAR_OPERANDS if operand.gemm == gemm]
            changes |= {field: whole[field] for field in fields}
            requested |= dict.fromkeys(fields, str(Spec.of(text)))
        for operand, text in operands.items():
            of, field = OPERANDS[operand]
            if of == kind:
                changes[field], requested[field] = _specs(text)[0], str(Spec.of(text))
        if kind == "pv" and softmax is not None:
            changes["softmax"] = softmax
        made[name] = part.changed(name, changes, requested)
    return stage.with_parts(made)
