"""binade list."""

from __future__ import annotations

from collections.abc import Callable

import click

from binade.collector.datasets.inputs import BYTE, DATASETS
from binade.collector.models.registry import MODELS
from binade.collector.recipes.files import PUBLISHED
from binade.collector.recipes.ingredients import INGREDIENTS
from binade.collector.recipes.parse import GRADIENT_FORMAT, parse_recipe
from binade.collector.recipes.recipe import OPERANDS, TEN_RECIPES
from binade.data.run.tensor_kinds import tensor_names
from binade.quant.formats import FORMATS, Format
from binade.quant.specs import OPTIONS, Spec
from binade.terminal import Command, print_text


def _list(kind: str | None) -> None:
    """List models, datasets, recipes, formats and more.

    Without an argument, all kinds are listed.
    """
    print_text("\n".join(f"{title}\n{lines()}" for title, lines in KINDS.items() if kind in (None, title)))


def _models() -> str:
    lines = []
    for name, sizes in MODELS.items():
        for size, shape in sizes.items():
            weights = f"{shape.parameters / 1e6:,.1f} M weights"
            lines.append(
                f"    {name} {size}: {shape.layers} layers, hidden {shape.hidden}, vocabulary {shape.vocab}, {weights}"
            )
        modules = dict.fromkeys(site.module for site in sizes["full"].sites())
        lines.append(f"        modules {', '.join(modules)}")
    lines.append("    a path: a Hugging Face directory with config.json and safetensors, or a GGUF file")
    return "\n".join(lines)


def _datasets() -> str:
    return (
        f"    {', '.join(DATASETS)}\n"
        '    a path to .jsonl, .jsonl.gz or .parquet: documents under "text"\n'
        "    a path to .bin/.idx, as Megatron's preprocess_data writes them: either file, or their prefix"
    )


def _tokenizers() -> str:
    return (
        f"    {BYTE}: each token is a byte; 256 ends a document\n"
        "    a path to a Hugging Face tokenizer.json, to its directory, or to a GGUF file"
    )


def _recipes() -> str:
    lines = [f"    {name}" for name in TEN_RECIPES]
    for name in PUBLISHED:
        recipe = parse_recipe(name)
        about = recipe.about
        lines.append(f"    {name:<22}{about.title} ({about.read}{'; partly uncertain' * bool(about.uncertain)})")
        kept = {"in bf16": recipe.keep} if recipe.keep else {}
        lines += [f"        {gemm:<15} {operands}" for gemm, operands in (recipe.gemms() | kept).items()]
    return "\n".join(
        [
            *lines,
            "    any format after FA_ (QKᵀ, not PV), linear_ or FA_linear_; without a prefix, everything is quantized",
            *(f"        {name} rounds gradients to {other}" for name, other in GRADIENT_FORMAT.items()),
            "    the path to a .toml or .yaml file: see docs/recipes.md",
            "    RECIPE(without=A+B) leaves ingredients out:",
            *(f"        {name:<13} {meaning}" for name, meaning in INGREDIENTS.items()),
        ]
    )


def _formats() -> str:
    return "\n".join(
        [
            *(line for fmt in FORMATS.values() for line in _format(fmt)),
            *(f"    {alias:<15} the same as {name}, also for gradients" for alias, name in FORMATS.aliases.items()),
            "    options, as in nvfp4(block=16x16, rounding=stochastic):",
            *(f"        {option.name:<11} {option.help}" for option in OPTIONS.values()),
        ]
    )


KINDS: dict[str, Callable[[], str]] = {
    "models": _models,
    "datasets": _datasets,
    "tokenizers": _tokenizers,
    "recipes": _recipes,
    "formats": _formats,
    "operands": lambda: "\n".join(f"    {name}" for name in OPERANDS),
    "tensors": lambda: f"    {', '.join(tensor_names())}",
}


def _format(fmt: Format) -> list[str]:
    """A format, and the values of its options, with the default first if there are several."""
    spec = Spec.of(fmt)
    lines = [
        f"    {fmt.name:<15} {fmt.title}, {spec.bits_per_value:g} bits per value, largest {fmt.max:g}. {fmt.source}"
    ]
    if fmt.name in GRADIENT_FORMAT:
        other = GRADIENT_FORMAT[fmt.name]
        aliases = [alias for alias, name in FORMATS.aliases.items() if name == fmt.name]
        lines.append(f"        gradients: {other} in recipes of this name; {fmt.name} in those named {aliases[0]}")
    chosen = {"format": fmt} | {name: getattr(spec, name) for name in OPTIONS}
    for name, option in OPTIONS.items():
        allowed = option.allowed(chosen)
        if isinstance(allowed, str):
            choices = f"{chosen[name]}; {allowed}" if allowed not in ("", str(chosen[name])) else ""
        else:
            choices = ", ".join(sorted(allowed, key=lambda value: value != chosen[name])) if len(allowed) > 1 else ""
        lines += [f"        {name}: {choices}"] * bool(choices)
    return lines


list_ = Command(
    "list",
    params=[click.Argument(["kind"], required=False, type=click.Choice(list(KINDS)))],
    callback=_list,
    help=" ".join(str(_list.__doc__).split()),
)
