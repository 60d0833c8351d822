"""The runs that test an advised recipe: trained beside bf16 and the best single format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from binade.collector.advice.advice import Advice
from binade.collector.jobs import Job, add_runs, start_runner
from binade.collector.recipes.recipe import BF16
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import plan
from binade.collector.training.slurm_options import SlurmOptions

PREFIXES = {frozenset({"linear"}): "linear_", frozenset({"linear", "qk"}): "FA_linear_"}
"""How the recipe is named that rounds only these parts to a format."""


def uniform_recipe(advice: Advice) -> str:
    """The text of the recipe that rounds the same parts to the best single format; "" if there is none."""
    if advice.uniform in ("", BF16):
        return ""
    return f"{PREFIXES.get(frozenset(each.part for each in advice.operands), '')}{advice.uniform}"


def verification(config: RunConfig, advice: Advice, recipe: str, seeds: int, iterations: int) -> list[RunConfig]:
    """The runs that test it, with these settings: bf16, the best single format of at most as many bits, and the advised
    recipe, whose file is `recipe`, for as many seeds on the same data."""
    plain = replace(config, train_iters=iterations, save_tensors=False, collect_micro_batches=0)
    recipes = dict.fromkeys([BF16, *filter(None, [uniform_recipe(advice)]), recipe])
    return [replace(plain, recipe=text, seed=config.seed + number) for number in range(seeds) for text in recipes]


def queue_verification(root: Path, runs: Sequence[RunConfig], name: str, target: str | None = None) -> list[Job]:
    """Queue the runs of `verification`, of the recipe of this name, whose file exists now; target is one of
    binade.toml. Raises ConfigError, JobError, SubmissionError, OSError."""
    titles = [f"advice {name} · {Path(config.recipe).stem} · seed {config.seed}" for config in runs]
    queued = add_runs(
        root, [plan(config) for config in runs], SlurmOptions(target=target), titles, tags=[f"advice {name}"]
    )
    start_runner(root)
    return queued
