"""Runs as command lines, for people, and the recipes that they may name."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby

from binade.collector.recipes.files import PUBLISHED
from binade.collector.recipes.recipe import BF16, TEN_RECIPES
from binade.collector.training.config import RunConfig
from binade.collector.training.slurm_options import SlurmOptions
from binade.quant.formats import FORMATS


def command_line(runs: Sequence[RunConfig], start: SlurmOptions | None = None) -> str:
    """The commands for these runs: one batch for successive runs that differ only in their recipes."""
    where = start.arguments() if start else []
    lines = []
    for rest, group in groupby((config.arguments() for config in runs), key=lambda line: line[3:]):
        recipes = [line[2] for line in group]
        command = "batch" if len(recipes) > 1 else "run"
        lines.append(shlex.join(["binade", command, "--quantization", ",".join(recipes), *rest, *where]))
    return "\n".join(lines)


def recipes() -> tuple[str, ...]:
    """Every name of a recipe: the ten, the published ones, then each format alone, in one part and in both."""
    parts = ("", "FA_", "linear_", "FA_linear_")
    others = [f"{part}{name}" for name in FORMATS for part in parts if name != BF16]
    return tuple(dict.fromkeys([*TEN_RECIPES, *PUBLISHED, *others]))
