"""binade list."""

from __future__ import annotations

from binade.collector.recipes.recipe import OPERANDS, TEN_RECIPES
from binade.collector.training.config import BYTE, DATASETS, MODELS
from binade.data.tensor_kinds import tensor_names
from binade.quant.formats import FORMATS
from binade.terminal import Command, print_text


def _list() -> None:
    """List the models, datasets, recipes, formats, operands and modules."""
    print_text(choices())


def choices() -> str:
    """Everything that can be chosen, by kind."""
    lines = ["models"]
    for name, sizes in MODELS.items():
        for size, shape in sizes.items():
            weights = f"{shape.parameters / 1e6:,.1f} M weights"
            lines.append(
                f"    {name} {size}: {shape.layers} layers, hidden {shape.hidden}, vocabulary {shape.vocab}, {weights}"
            )
        modules = dict.fromkeys(site.module for site in sizes["full"].sites())
        lines.append(f"        modules {', '.join(modules)}")
    lines += [
        f"datasets\n    {', '.join(DATASETS)}",
        '    a path to .jsonl, .jsonl.gz or .parquet: documents under "text"',
        "    a path to .bin/.idx, as Megatron's preprocess_data writes them: either file, or their prefix",
        f"tokenizers\n    {BYTE}: a token is a byte, 256 ends a document",
        "    a path to a Hugging Face tokenizer.json, or to its directory",
        "recipes\n    " + "\n    ".join(TEN_RECIPES),
        "    and FA_, linear_, FA_linear_ or nothing before any format: nothing quantizes everything",
        "formats",
        *(
            f"    {fmt.name:<11} {fmt.title}, {fmt.bits_per_value:g} bits per value, largest {fmt.max:g}"
            for fmt in FORMATS.values()
        ),
        *(f"    {alias:<11} the same as {name}" for alias, name in FORMATS.aliases.items()),
        "operands, for --operand-quant\n    " + "\n    ".join(OPERANDS),
        f"tensors\n    {', '.join(tensor_names())}",
    ]
    return "\n".join(lines)


list_ = Command("list", callback=_list, help=_list.__doc__)
