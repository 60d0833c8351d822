"""Parses, checks and writes the command line of a job. No shell ever reads it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby

import click

from binade.collector.cli.options import Request, read
from binade.collector.errors import ConfigError
from binade.collector.recipes.files import PUBLISHED
from binade.collector.recipes.recipe import BF16, TEN_RECIPES
from binade.collector.settings import declared
from binade.collector.training.config import RunConfig
from binade.collector.training.slurm_options import SlurmOptions
from binade.quant.formats import FORMATS
from binade.terminal import usage_message

COMMANDS = ("run", "batch", "quick")


def parse_runs(line: Sequence[str]) -> list[RunConfig]:
    """The runs of a command line of run, batch or quick, checked. Raises ConfigError, as `parse` does."""
    return parse(line).runs


def parse(line: Sequence[str]) -> Request:
    """The runs, and the root in the command line.

    Raises ConfigError for what cannot be run or queued: another command, --dry-run.
    """
    if not line or line[0] not in COMMANDS:
        raise ConfigError(f"a job is a command line of {', '.join(COMMANDS)}, such as: run --quantization mxfp8")
    try:
        request = read(line)
    except click.UsageError as error:
        raise ConfigError(usage_message(error)) from None
    if request.start.dry_run:
        raise ConfigError("--dry-run runs nothing: leave it out, or call binade with it directly")
    return request


def check_arguments(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the line if `arguments_of` and `SlurmOptions.arguments` could have written it. Raises ValueError for any
    other, such as a job's file with another command, another root, or --dry-run."""
    options = declared(RunConfig) | declared(SlurmOptions)
    del options["dry_run"]
    takes_value = dict.fromkeys(("--quantization", "--resume"), True)
    takes_value |= {each.flag: each.kind is not bool for each in options.values()}
    words = iter(arguments)
    if next(words, None) != "run":
        raise ValueError("a job must be a `binade run` command line")
    for word in words:
        if word not in takes_value:
            raise ValueError(f"{word[:40]!r} is not allowed in a job")
        if takes_value[word] and next(words, None) is None:
            raise ValueError(f"{word} has no value")
    return arguments


def arguments_of(config: RunConfig) -> list[str]:
    """`run` with the options that differ from their defaults. `parse_runs` restores the same configuration from it,
    without a byte budget if values are not kept."""
    line = ["run", "--quantization", config.recipe]
    defaults = {"micro_batches": max(1, config.collect_micro_batches), "recipe": config.recipe}
    if not (config.raw and config.save_tensors):
        defaults["max_bytes"] = config.max_bytes
    for name, each in declared(RunConfig).items():
        value = getattr(config, name)
        if value != defaults.get(name, each.default):
            line += [each.flag] if each.kind is bool else [each.flag, each.text(value)]
    return line


def command_line(runs: Sequence[RunConfig], start: SlurmOptions | None = None) -> str:
    """The commands for these runs: one batch for successive runs that differ only in their recipes."""
    where = start.arguments() if start else []
    lines = []
    for rest, group in groupby(map(arguments_of, runs), key=lambda line: line[3:]):
        recipes = [line[2] for line in group]
        command = "batch" if len(recipes) > 1 else "run"
        lines.append(shlex.join(["binade", command, "--quantization", ",".join(recipes), *rest, *where]))
    return "\n".join(lines)


def modules_of(config: RunConfig) -> tuple[str, ...]:
    """The modules of the model that can be recorded, in their order."""
    return tuple(dict.fromkeys(spec.site.module for spec in config.shape().recordable(config.tensors)))


def recipes() -> tuple[str, ...]:
    """Every name of a recipe: the ten, the published ones, then each format alone, in one part and in both."""
    parts = ("", "FA_", "linear_", "FA_linear_")
    others = [f"{part}{name}" for name in FORMATS for part in parts if name != BF16]
    return tuple(dict.fromkeys([*TEN_RECIPES, *PUBLISHED, *others]))
