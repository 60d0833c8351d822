"""What a job may be asked to do: a command line of `run`, checked and written in one way. No shell ever reads it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import MISSING, fields

from binade.collector.cli.options import configs, read
from binade.collector.recipes.recipe import BF16, TEN_RECIPES
from binade.collector.training.config import ConfigError, RunConfig
from binade.quant.formats import FORMATS

COMMANDS = ("run", "batch", "quick")
_OTHERWISE = {"recipe", "save_tensors", "raw", "sequence_parallel", "micro_batches"}  # written in ways of their own


def asked(line: Sequence[str]) -> list[RunConfig]:
    """The runs that a command line of run, batch or quick asks for, checked.

    Raises ConfigError, RecipeError or UnknownFormatError for what cannot be run, and ConfigError for what is no job:
    another command, --dry-run, --launcher slurm.
    """
    if not line or line[0] not in COMMANDS:
        raise ConfigError(f"a job is a command line of {', '.join(COMMANDS)}, such as: run --quantization mxfp8")
    given = read(line)
    if given.dry_run:
        raise ConfigError("--dry-run runs nothing: leave it out, or call binade with it directly")
    if given.launcher != "local":
        raise ConfigError(f"--launcher {given.launcher} has a queue of its own: call binade directly")
    return configs(given)


def arguments_of(config: RunConfig) -> list[str]:
    """`run` with the options that differ from their defaults: `asked` makes the same configuration of it, less a byte
    budget for values that are not kept."""
    line = ["run", "--quantization", config.recipe]
    for field in fields(RunConfig):
        value = getattr(config, field.name)
        if field.name in _OTHERWISE or field.default is MISSING or value == field.default:
            continue
        if field.name == "max_bytes" and not (config.raw and config.save_tensors):
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        line += _option(f"--{field.name.replace('_', '-')}", text)
    if config.micro_batches != max(1, config.collect_micro_batches):
        line += ["--micro-batches", str(config.micro_batches)]
    flags = {
        "--no-save-tensors": not config.save_tensors,
        "--no-raw": not config.raw,
        "--sequence-parallel": config.sequence_parallel,
    }
    return line + [flag for flag, given in flags.items() if given]


def _option(name: str, text: str) -> list[str]:
    """A value that begins with a dash would be read as an option."""
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def command_line(runs: Sequence[RunConfig]) -> str:
    """What to type for these runs, one command for all of them where they differ in nothing but the recipe."""
    lines = [arguments_of(config) for config in runs]
    rest = [line[3:] for line in lines]
    if len(lines) > 1 and all(other == rest[0] for other in rest):
        lines = [["batch", "--quantization", ",".join(config.recipe for config in runs), *rest[0]]]
    return "\n".join(shlex.join(["binade", *line]) for line in lines)


def modules_of(config: RunConfig) -> tuple[str, ...]:
    """The modules of its model, in their order."""
    return tuple(dict.fromkeys(site.module for site in config.shape().sites()))


def recipes() -> tuple[str, ...]:
    """Every name of a recipe: the ten, then each format alone, in one part, in both."""
    parts = ("", "FA_", "linear_", "FA_linear_")
    others = [f"{part}{name}" for name in FORMATS for part in parts if name != BF16]
    return tuple(dict.fromkeys([*TEN_RECIPES, *others]))
