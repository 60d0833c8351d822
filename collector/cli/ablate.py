"""binade ablate."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import click

from binade.collector.cli.options import request_of, training_params
from binade.collector.cli.train import queue
from binade.collector.jobs import command_line
from binade.collector.recipes.ladder import ladder
from binade.collector.training.config import FORMAT, LAYERS, RunConfig
from binade.collector.training.plan import Plan, plan
from binade.collector.training.slurm_options import SlurmOptions
from binade.data.compare.ladder import Ladder
from binade.terminal import CliOption, Command, fail, print_text, resolve_root

MOST_SEEDS = 100


def _seeds(text: str) -> tuple[int, ...] | int:
    """A list of seeds, or how many there are."""
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*,?", text.replace(" ", "")):
        raise click.BadParameter(f"{text!r} is neither a number of seeds nor a list: write 3, or 1,2,3")
    given = [int(number) for number in text.split(",") if number.strip()]
    if "," in text:
        return tuple(dict.fromkeys(given))
    if not 1 <= given[0] <= MOST_SEEDS:
        raise click.BadParameter(
            f"{text} seeds: expected 1 to {MOST_SEEDS}; for the single seed {text}, write '{text},' with the comma"
        )
    return given[0]


def _params() -> list[click.Parameter]:
    """The parameters of `run`, without those that choose formats: the ladder sets these."""
    params = [
        p
        for p in training_params("run")
        if p.name not in ("config", "resume") and (getattr(p, "title", "") != FORMAT.title or p.name == "skip_layers")
    ]
    for param in params:
        if isinstance(param, CliOption) and param.name == "skip_layers":
            param.about = LAYERS
    seeds = CliOption(
        ["--seeds"],
        type=_seeds,
        metavar="N|A,B,...",
        help="Number of seeds, counted from --seed, or a list of seeds; each also gets a bf16 run  [default: 1]",
    )
    return [click.Argument(["recipe"], metavar="RECIPE"), seeds, *params]


def runs_of(ladder: Ladder, params: dict[str, Any]) -> tuple[list[Plan], SlurmOptions]:
    """The runs, seed by seed, and where they run. Raises ConfigError."""
    seeds = params.pop("seeds") or 1
    request = request_of("run", {"operand_quant": ()} | params)
    (base,) = request.runs
    listed = range(base.seed, base.seed + seeds) if isinstance(seeds, int) else seeds
    plans = [plan(replace(base, recipe=rung.recipe, seed=seed)) for seed in listed for rung in ladder.rungs]
    request.start.for_run(base)
    return plans, request.start


def _ablate(recipe: str, **params: Any) -> None:
    """Queue an ablation of a recipe: how each part affects the loss.

    RECIPE is a name from `binade list`, or the path to a .toml or .yaml file. The runs are: bf16; the recipe in the
    forward GEMMs only; in dgrad as well; in wgrad as well (the full recipe); then the full recipe with one ingredient
    left out at a time. All train on the same data with the same options, for each seed.

    The runs are queued as `binade jobs add` does, with the tag "ablation RECIPE"; --dry-run prints them instead. Read
    the result with `binade compare`, or in the app under Runs › Recipes.
    """
    ablation = ladder(recipe)
    dry_run = params.get("dry_run")
    root = resolve_root(params.get("root"))
    plans, start = runs_of(ablation, params)
    runs = [plan.config for plan in plans]
    if runs[0].iterations == 1:
        fail(
            "only one iteration is trained, and its loss is computed before any backward pass: dgrad and wgrad affect "
            "later losses only. Give --train-iters"
        )
    if dry_run:
        print_text(_described(ablation, runs, start))
        return
    titles = {rung.recipe: rung.title for rung in ablation.rungs}
    named = [f"{ablation.name} · {titles[config.recipe]} · seed {config.seed}" for config in runs]
    queue(root, plans, start, named, tags=[f"ablation {ablation.name}"])


def _described(ladder: Ladder, runs: list[RunConfig], start: SlurmOptions) -> str:
    """The rungs, and the commands that would train them."""
    seeds = dict.fromkeys(str(config.seed) for config in runs)
    width = max(len(rung.title) for rung in ladder.rungs)
    return "\n".join(
        [
            f"ablation of {ladder.name}, seed {', '.join(seeds)}: {len(runs)} runs",
            *(f"    {rung.title:<{width}}  {rung.recipe}" for rung in ladder.rungs),
            command_line(runs, start),
        ]
    )


ablate = Command(
    "ablate",
    params=_params(),
    callback=_ablate,
    cancelled="cancelled; jobs already queued are kept",
    failed="the queue cannot be changed",
)
