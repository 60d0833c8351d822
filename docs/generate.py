"""Prints docs/reference.md from what the program declares: python docs/generate.py > docs/reference.md"""

from __future__ import annotations

from binade.app.questions import registry
from binade.collector.cli.options import training_params
from binade.data.tensor_kinds import TENSOR_KINDS
from binade.data.text import markdown_table
from binade.quant.formats import FORMATS
from binade.terminal import Option

INTRODUCTION = "# Reference\n\nPrinted by `python docs/generate.py` from what the program declares."


def options() -> list[str]:
    titles: dict[str, list[Option]] = {}
    for param in training_params("run"):
        if isinstance(param, Option):
            titles.setdefault(param.title, []).append(param)
    found = ["## Options", "`binade run`, `batch` and `quick` take them; the defaults are those of `run`."]
    for title, group in titles.items():
        about = max((option.about for option in group), key=len)
        usages = [" ".join([o.opts[0], *([o.metavar] if o.metavar and not o.is_flag else [])]) for o in group]
        rows = [
            (f"`{usage}`".replace("|", "\\|"), str(option.help).replace("|", "\\|"))
            for usage, option in zip(usages, group, strict=True)
        ]
        found += [f"### {title}", *([about] if about else []), markdown_table(("Option", "Meaning"), rows)]
    return found


def page() -> str:
    tensors = [(f"`{k.name}`", k.product, k.operation, k.phase, k.label) for k in TENSOR_KINDS]
    formats = [
        (f"`{f.name}`", f.title, f"{f.bits_per_value:g}", f"{f.max:g}", f.rounding, f.source) for f in FORMATS.values()
    ]
    sections = [
        INTRODUCTION,
        *options(),
        "## Questions of the app",
        registry.describe(),
        "## Recorded tensors",
        markdown_table(("Name", "Product", "Operation", "Phase", "Label"), tensors),
        "## Formats",
        markdown_table(("Name", "Format", "Bits per value", "Largest", "Rounding", "Defined by"), formats),
    ]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    print(page(), end="")
