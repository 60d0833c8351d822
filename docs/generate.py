"""Prints docs/reference.md from what the program declares: python docs/generate.py > docs/reference.md"""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click

from binade.app.glossary import TERMS
from binade.app.questions import registry
from binade.app.style import MEASURES
from binade.cli import build
from binade.collector.cli.options import training_params
from binade.collector.recipes.files import PUBLISHED
from binade.collector.recipes.parse import parse_recipe
from binade.data import catalog
from binade.data.tensor_kinds import TENSOR_KINDS
from binade.data.text import markdown_table
from binade.quant.formats import FORMATS
from binade.quant.specs import Spec
from binade.terminal import Option

FILES = [
    (
        "`run.json`",
        "JSON",
        "configuration, versions, device, command line; its last field is a CRC-32",
    ),
    ("`status.json`", "JSON", "state, process, iteration, counts of tensors and bytes, last loss, heartbeat"),
    ("`notes.json`", "JSON", "name, color and note that users gave the run"),
    ("`loss.jsonl`", "JSON lines", "iteration, loss in nats per token, seconds, SHA-256 of the data so far, CRC-32"),
    ("`events.jsonl`", "JSON lines", "what happened while the run was watched: triggers, captures, the first NaN"),
    ("`tensors/**/*.pt`", "torch", "`{tensor, tensor_info, metadata}`; loads with `weights_only=True` and `mmap=True`"),
    ("`segments/**/*.parquet`", "Parquet", "rows of the tables tensor, sketch, score, block and trace"),
    ("`segments/**/manifest.json`", "JSON", "size and SHA-256 of each file of the segment"),
    ("`checkpoints/`", "torch", "weights, optimizer and position, for `--resume`"),
]
INTRODUCTION = "# Reference\n\nPrinted by `python docs/generate.py` from what the program declares."


def commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Each command with the words that call it."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command
        words = f"{context.info_name} {name}"
        yield words, command
        if isinstance(command, click.Group):
            yield from commands(command, click.Context(command, info_name=words))


def options() -> list[str]:
    """Every command with its options; those that others share with `binade run`, once."""
    group = build()
    found = []
    filters = ""
    training = {param.opts[0] for param in training_params("run")}
    for words, command in commands(group, click.Context(group, info_name="binade")):
        shared = training if words in ("binade batch", "binade quick", "binade ablate") else set()
        own = [param for param in command.params if param.opts[0] not in shared]
        context = click.Context(command)
        usage = " ".join(command.collect_usage_pieces(context))
        found += [f"### {words}", f"    {words} {usage}", cleandoc(command.help or "")]
        if shared:
            absent = sorted(f"`{name}`" for name in shared.difference(*(param.opts for param in command.params)))
            found.append(f"The options of `binade run`{' except ' * bool(absent)}{', '.join(absent)}.")
        titles: dict[str, list[Option]] = {}
        for param in own:
            if isinstance(param, Option):
                titles.setdefault(param.title, []).append(param)
        for title, members in titles.items():
            about = max((option.about for option in members), key=len)
            if title == "Filter" and filters:
                found.append(f"**Filter**: the filter options of `{filters}`.")
                continue
            filters = words if title == "Filter" else filters
            usages = [
                f"{o.opts[0]} {'' if o.is_flag else o.metavar or o.make_metavar(context)}".strip() for o in members
            ]
            rows = [
                (f"`{usage}`".replace("|", "\\|"), str(option.help).replace("|", "\\|"))
                for usage, option in zip(usages, members, strict=True)
            ]
            heading = [f"**{title}**"] * (len(titles) > 1)
            found += [*heading, *([about] if about else []), markdown_table(("Option", "Meaning"), rows)]
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


def tables() -> list[str]:
    """The tables of the index that the SQL page and `binade export --to tables` show, from data/schema.sql."""
    found = []
    schema = (Path(catalog.__file__).parent / "schema.sql").read_text()
    for about, name, body in re.findall(r"((?:^--.*\n)*)^CREATE TABLE (\w+) \(\n((?:^ .*\n)*)^\);", schema, re.M):
        if name not in catalog.PUBLIC_TABLES:
            continue
        columns = re.findall(r"^    (\w+) +([A-Z]\w*(?:\[\])?)[^\n]*?(?:-- (.*))?$", body, re.M)
        rows = [
            (f"`{column}`", kind, meaning) for column, kind, meaning in columns if column not in ("CHECK", "PRIMARY")
        ]
        sentences = "" if name == "run" else " ".join(line.removeprefix("--").strip() for line in about.splitlines())
        found += [
            f"### {name}",
            *([sentences] if sentences else []),
            markdown_table(("Column", "Type", "Meaning"), rows),
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
        "## Commands",
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
        "## Metrics",
        "x is the tensor before, q the tensor after rounding, e = q − x.",
        markdown_table(
            ("Metric", "Unit", "Definition"),
            [(m.label, m.unit, m.definition.replace("|", "\\|")) for m in MEASURES.values()],
        ),
        "## Index schema",
        "`<root>/index.duckdb` is derived from the runs: it can be deleted at any time and is rebuilt when next "
        "opened. Units: counts are elements, `nbytes` and `bytes` are bytes, times are UTC, `sqnr_db` is decibels, "
        "fractions are 0 to 1. "
        "[SQL](reports.md#exports-to-other-dashboards) can also run on an export: `binade export --to tables`.",
        *tables(),
        "## File formats",
        markdown_table(("File of a run", "Format", "Holds"), FILES),
        "[Architecture](architecture.md#a-run-on-disk-the-source-of-truth) has the guarantees and the names of "
        "tensor files.",
        "## Glossary",
        markdown_table(("Term", "Meaning"), list(TERMS.items())),
    ]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    print(page(), end="")
