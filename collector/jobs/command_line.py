"""Runs in words and as command lines, for people, and the recipes that they may name."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from binade.collector.datasets.inputs import describe_inputs
from binade.collector.pretrained.directory import describe_weights
from binade.collector.recipes.files import PUBLISHED
from binade.collector.recipes.recipe import BF16, TEN_RECIPES
from binade.collector.recipes.selection import SiteSelection, by_layer
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import Plan
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


def describe(plan: Plan, root: Path) -> str:
    """What --dry-run prints of a run, and New collection shows: all that it does, operand by operand."""
    config, shape, recipe = plan.config, plan.shape, plan.recipe
    tokens = config.dp * config.micro_batches * config.micro_batch_size * config.sequence_length
    rows = [
        f"recipe    {recipe.name}{f': {recipe.about.title}' * bool(recipe.about.title)}",
        *(f"{'source' if not n else '':<9} {text}" for n, text in enumerate(recipe.about.source)),
        *(f"{'omits' if not n else '':<9} {text}" for n, text in enumerate(recipe.about.leaves_out)),
        *(f"{'uncertain' if not n else '':<9} {text}" for n, text in enumerate(recipe.about.uncertain)),
        *(f"{'note' if not n else '':<9} {text}" for n, text in enumerate(recipe.check_modules(shape.sites()))),
        f"model     {config.model_title}: {shape.describe()}, "
        f"vocabulary {shape.vocab}; {shape.parameters / 1e6:.1f} M weights",
        f"weights   {describe_weights(Path(config.model)) if config.has_path else f'random, seed {config.seed}'}",
        *([f"start     {plan.branch.describe(config)}"] if plan.branch else []),
        f"data      {describe_inputs(config.dataset, config.tokenizer_name)}, {tokens} tokens per iteration",
        f"length    {config.warmup_iterations} warm-up iterations in bf16, then {config.iterations} with the recipe",
        f"record    {recorded(config)}",
        f"device    {config.device}, {_ranks(config)}, operands quantized with {config.quantized_by}",
        f"root      {root}",
    ]
    if kept := plan.kept_layers:
        model = shape.sites()
        rows.append(f"skip      {'; '.join(by_layer(model, SiteSelection.parse(kept).of(model), 'bf16', 'as below'))}")
    rows.append("operand by operand (part.GEMM.operand, contracted axis, format):")
    return "\n".join([*rows, *(f"    {line}" for line in recipe.lines())])


def _ranks(config: RunConfig) -> str:
    if config.world_size == 1:
        return "one rank"
    split = f"TP {config.tp}{' with sequence parallelism' if config.sequence_parallel else ''}"
    return f"{config.world_size} ranks ({split}, DP {config.dp})"


def recorded(config: RunConfig) -> str:
    """Describe what is recorded."""
    if not config.save_tensors:
        return "nothing"
    taken = config.recorded_iterations
    shown = ", ".join(map(str, taken if len(taken) < 5 else [*taken[:2], "...", taken[-1]]))
    places = [
        *([f"of {', '.join(config.modules)}"] if config.modules else []),
        *([f"of layers {config.capture_layers}"] if config.capture_layers else []),
        *([f"on ranks {', '.join(map(str, config.ranks))}"] if config.ranks else []),
    ]
    values = f"kept, {_size(config.max_bytes)} at most" if config.raw else "not kept"
    return (
        f"{' '.join([', '.join(config.tensors) or 'all default tensors', *places])}, {config.recorded_micro_batches} "
        f"of {config.micro_batches} micro-batches of iterations {shown}; scores in "
        f"{', '.join(config.scores) or 'no format'}; values {values}"
    )


def _size(number: int) -> str:
    """Bytes in the units of --max-bytes."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit:
            return f"{round(number / unit, 2):,} {name}"
    return f"{number} bytes"
