"""The band of bf16: the paired gaps of a loss between bf16 runs that differ in bits alone.

A paired gap is the loss of a run minus that of a bf16 run with the same weights and data at the same iteration. Two
bf16 runs of the same weights and data whose bits differ (another parallel layout, order of reduction or machine) have
such gaps too. A recipe *leaves bf16* at the first iteration from which its gap, the mean over its seeds, is beyond the
band in every iteration up to the last, at least LASTING.

The band at an iteration is ±t·s·√(2/n) for a recipe of n seeds. s is the standard deviation of bf16 runs around the
mean of those with the same weights and data, pooled over these; t is Student's quantile, two-sided, at LEVEL divided by
the number of recipes that are compared (Bonferroni). A recipe that rounds nothing is beyond the band at the last
iteration in at most LEVEL of the cases, however the gaps of successive iterations depend on each other: so it leaves in
at most as many. tests/bench/bench_null.py counts them. A gap that comes back leaves nothing.

Runs count if they state all their settings: see `same_data.states_all`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import pandas as pd

from binade.data.compare.evidence import LEVEL
from binade.data.compare.loss_gaps import Losses, RecipeRuns
from binade.data.compare.same_data import losses_on_same_data
from binade.data.compare.student import quantile
from binade.quant.formats import BF16

LASTING = 3  # iterations in a row, up to the last, that a gap must be beyond the band
RULE = (
    "A recipe leaves bf16 at the first iteration from which its gap to bf16, the mean over its seeds, is beyond the "
    f"band in every iteration up to the last, at least {LASTING}. The band holds the gaps between bf16 runs of the "
    "same weights and data that differ in bits alone, for all recipes together in 95% of cases (Student’s t)"
)


NO_BAND = (
    "no two of your bf16 runs with the same weights and data differ in bits. Repeat one with --tp 2, or on another "
    "machine. Imported losses and instrumented runs do not count, since they do not state all settings."
)


@dataclass(frozen=True)
class PlainRun:
    """A bf16 run: its data key and its lines of loss.jsonl."""

    data: str
    steps: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Band:
    """
    runs        how many bf16 runs it is from, those that have another one of the same weights and data; 0 if unknown
    degrees     their degrees of freedom: runs minus distinct data
    deviations  (iteration, standard deviation of their losses in nats per token); empty if unknown
    """

    runs: int = 0
    degrees: int = 0
    deviations: tuple[tuple[int, float], ...] = ()

    @property
    def is_known(self) -> bool:
        return bool(self.deviations)

    def halves(self, seeds: int, recipes: int) -> dict[int, float]:
        """Half of the band by iteration, in nats per token: for the mean gap of a recipe over so many seeds, one of so
        many recipes."""
        if not self.is_known:
            return {}
        factor = quantile(self.degrees, LEVEL / recipes) * math.sqrt(2 / seeds)
        return {iteration: factor * deviation for iteration, deviation in self.deviations}

    def left_at(self, gaps: Mapping[int, float], seeds: int, recipes: int) -> int | None:
        """The iteration at which a recipe leaves bf16; None if it does not. gaps: its mean gap by iteration."""
        halves = self.halves(seeds, recipes)
        known = sorted(iteration for iteration in gaps if iteration in halves)
        outside = list(takewhile(lambda at: abs(gaps[at]) > halves[at], reversed(known)))
        return outside[-1] if len(outside) >= LASTING else None


def band_of(runs: Iterable[PlainRun], iterations: Iterable[int]) -> Band:
    """The band over these iterations. runs: bf16 runs with the same settings, oldest first. Those that lack one of the
    iterations do not count, and of runs that agree in all bits only one does."""
    at = sorted(iterations)
    first: dict[str, Sequence[Mapping[str, Any]]] = {}
    distinct: dict[str, dict[tuple[float, ...], None]] = {}
    for run in runs:
        loss = {i: run_loss for i, run_loss, _ in losses_on_same_data(run.steps, first.setdefault(run.data, run.steps))}
        if at and all(i in loss for i in at):
            distinct.setdefault(run.data, {})[tuple(loss[i] for i in at)] = None
    several = [np.array([*losses]) for losses in distinct.values() if len(losses) > 1]
    if not several:
        return Band()
    deviations = np.concatenate([losses - losses.mean(0) for losses in several])  # [runs, iterations]
    degrees = len(deviations) - len(several)
    by_iteration = np.sqrt((deviations**2).sum(0) / degrees)
    return Band(len(deviations), degrees, tuple(zip(at, by_iteration.tolist(), strict=True)))


def bands_of(recipes: Sequence[RecipeRuns], table: pd.DataFrame, losses: Losses, gaps: pd.DataFrame) -> dict[str, Band]:
    """The band of each recipe by its run_id: of the bf16 runs with the settings of its reference, over the iterations
    of its gap. table: of `runs_with_references`; gaps: of `loss_gaps`."""
    settings = settings_of_references(table)
    plain = (table["recipe"] == BF16) & ~table["quantized"] & table["stated"]
    alike = dict(iter(table[plain].groupby("settings", sort=False)))
    at = {str(run_id): frozenset(part) for run_id, part in gaps.groupby("run_id")["iteration"]}
    known: dict[Any, Band] = {}
    bands = {}
    for recipe in recipes:
        of, iterations = settings[recipe.run_id], at.get(recipe.run_id, frozenset())
        if not iterations:
            continue
        if (of, iterations) not in known:
            runs = alike.get(of, table.iloc[:0])
            plain_runs = [
                PlainRun(data, [step for step in losses.get(run_id, ()) if step["loss"] is not None])
                for data, run_id in zip(runs["data"], runs["run_id"], strict=True)
            ]
            known[of, iterations] = band_of(plain_runs, iterations)
        bands[recipe.run_id] = known[of, iterations]
    return bands


def settings_of_references(table: pd.DataFrame) -> dict[str, Any]:
    """The settings of the first reference of each run that has one."""
    own = dict(zip(table["run_id"], table["settings"], strict=True))
    references = zip(table["run_id"], table["references"], strict=True)
    return {run_id: own[ids[0]] for run_id, ids in references if ids and ids[0] in own}
