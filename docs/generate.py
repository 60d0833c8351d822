"""Prints docs/reference.md from what the program declares: python docs/generate.py > docs/reference.md"""

from __future__ import annotations

from binade.app.questions import registry
from binade.collector.cli.options import training_params
from binade.collector.recipes.files import PUBLISHED
from binade.collector.recipes.parse import parse_recipe
from binade.data.tensor_kinds import TENSOR_KINDS
from binade.data.text import markdown_table
from binade.quant.formats import FORMATS
from binade.quant.specs import Spec
from binade.terminal import Option

INTRODUCTION = "# Reference\n\nPrinted by `python docs/generate.py` from what the program declares."


def options() -> list[str]:
    titles: dict[str, list[Option]] = {}
    for param in training_params("run"):
        if isinstance(param, Option):
            titles.setdefault(param.title, []).append(param)
    found = [
        "## Options",
        "`binade run`, `batch` and `quick` take them; the defaults are those of `run`. `ablate` takes them too, but "
        "for those that say what is quantized: of these it takes `--skip-layers` alone.",
    ]
    for title, group in titles.items():
        about = max((option.about for option in group), key=len)
        usages = [" ".join([o.opts[0], *([o.metavar] if o.metavar and not o.is_flag else [])]) for o in group]
        rows = [
            (f"`{usage}`".replace("|", "\\|"), str(option.help).replace("|", "\\|"))
            for usage, option in zip(usages, group, strict=True)
        ]
        found += [f"### {title}", *([about] if about else []), markdown_table(("Option", "Meaning"), rows)]
    return found


def recipes() -> list[str]:
    """Each published recipe: what it is, and where it differs from what it names."""
    found = []
    for name in PUBLISHED:
        recipe = parse_recipe(name)
        about = recipe.about
        kept = [f"Layers kept in bf16: {recipe.keep}."] * bool(recipe.keep)
        lines = [f"Source: {'; '.join(about.source)}.", *kept]
        lines += [f"Left out: {text}" for text in about.leaves_out] + [
            f"Not certain: {text}" for text in about.uncertain
        ]
        shown = [line.split(maxsplit=1) for line in recipe.lines() if not line.rstrip().endswith(" bf16")]
        rows = [(f"`{operand}`", " ".join(rest.split())) for operand, rest in shown]
        found += [
            f"### {name}: {about.title} ({about.read})",
            "\n".join(f"- {line}" for line in lines),
            markdown_table(("Operand", "Contracted axis, spec"), rows),
        ]
    return found


def page() -> str:
    tensors = [(f"`{k.name}`", k.product, k.operation, k.phase, k.label) for k in TENSOR_KINDS]
    formats = [
        (f"`{f.name}`", f.title, f"{Spec.of(f.name).bits_per_value:g}", f"{f.max:g}", f.rounding, f.source)
        for f in FORMATS.values()
    ]
    sections = [
        INTRODUCTION,
        *options(),
        "## Questions of the app",
        registry.describe(),
        "## Recorded tensors",
        markdown_table(("Name", "Product", "Operation", "Phase", "Label"), tensors),
        "## Published recipes",
        "`code`: read in its own code; `excerpt`: read in parts of its paper. What was only recalled is said to be.",
        *recipes(),
        "## Formats",
        markdown_table(("Name", "Format", "Bits per value", "Largest", "Rounding", "Defined by"), formats),
    ]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    print(page(), end="")
