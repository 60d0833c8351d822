"""Bands: the gaps of a loss that chance explains, from the user's own bf16 runs with the same settings.

| band | what its runs share | what differs |
|---|---|---|
| seeds | nothing but the settings | weights, data |
| reordering | weights, data | bits: order of reduction, parallel layout, machine |

A band holds 95% of the gaps between two such runs, each gap the mean over the same iterations. Runs count if they state
all their settings: see `same_data.states_all`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import Any

import numpy as np

from binade.data import evidence
from binade.data.evidence import GAP, LEVEL, Estimate, Named, Sentence
from binade.data.same_data import losses_on_same_data
from binade.data.student import quantile


class BandKind(Enum):
    """What sets the runs of a band apart: the name of the band."""

    SEEDS = "seeds"
    REORDERING = "reordering"


SOURCES = {
    BandKind.SEEDS: "own bf16 runs with other seeds",
    BandKind.REORDERING: "own bf16 runs of the same weights and data",
}
LOST = "outside (diverged)"
LASTING = 3  # iterations in a row, up to the last, that a gap must be beyond a band to have left it
UNSTATED = "Imported losses and instrumented runs do not count, since they do not state all settings."
MISSING = {
    BandKind.SEEDS: "No seed baseline: record bf16 runs with two seeds. Train one with --quantization bf16 and another "
    f"--seed. {UNSTATED}",
    BandKind.REORDERING: "No reordering baseline: record two bf16 runs of the same weights and data that differ in "
    f"bits. Repeat one with --tp 2, or on another machine. {UNSTATED}",
}


@dataclass(frozen=True)
class PlainRun:
    """A bf16 run: its seed, its data key and its lines of loss.jsonl."""

    seed: str
    data: str
    steps: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Band:
    """
    gap           between two bf16 runs: 0, with the interval that holds 95% of such gaps, without ends if unknown
    by_iteration  (iteration, half of the interval of the gaps at it); empty if unknown
    """

    kind: BandKind
    gap: Estimate
    by_iteration: tuple[tuple[int, float], ...] = ()

    @property
    def source(self) -> str:
        return SOURCES[self.kind]

    @property
    def missing(self) -> str:
        """Why it is unknown, and how to get it; "" if it is known."""
        return "" if self.by_iteration else MISSING[self.kind]

    def left_at(self, gaps: Mapping[int, float]) -> int | None:
        """The first iteration from which gaps, by iteration, are beyond the band in all iterations up to the last, at
        least LASTING; None if there is none."""
        halves = dict(self.by_iteration)
        known = sorted(iteration for iteration in gaps if iteration in halves)
        outside = list(takewhile(lambda at: abs(gaps[at]) > halves[at], reversed(known)))
        return outside[-1] if len(outside) >= LASTING else None

    def place(self, gaps: Sequence[Named]) -> Sentence:
        """Which gaps lie inside the band, outside it, and which intervals reach across its edge. A gap without an
        interval, that of one seed, is placed by its value. Outside means beyond the band that all gaps together leave
        by chance at LEVEL (Bonferroni). A gap that is NaN is one of a run that diverged."""
        beyond = quantile(self.gap.degrees, LEVEL / len(gaps)) * self.gap.error
        places: dict[str, list[str]] = {"inside": [], "outside": [], "not distinguishable from its edge": [], LOST: []}
        for name, gap in gaps:
            if math.isnan(gap.value):
                places[LOST].append(name)
                continue
            low, high = (gap.low, gap.high) if gap.n > 1 else (gap.value, gap.value)
            inside, outside = self.gap.low <= low and high <= self.gap.high, low > beyond or high < -beyond
            places["inside" if inside else "outside" if outside else "not distinguishable from its edge"].append(name)
        listed = "; ".join(f"{evidence.listed(names)} {place}" for place, names in places.items() if names)
        text = f"Band of {self.kind.value} ({self.gap.interval}): {listed}."
        return Sentence(text, (self.gap, *(gap for _, gap in gaps)))


def own_bands(runs: Iterable[PlainRun], iterations: Iterable[int]) -> tuple[Band, Band]:
    """The bands of seeds and of reordering over these iterations.

    runs: those with the same settings, oldest first. Runs that lack one of the iterations do not count, and of runs
    that agree in all bits only one does. Of a seed's runs, the band of seeds takes the newest.
    """
    at = sorted(iterations)
    first: dict[str, Sequence[Mapping[str, Any]]] = {}
    newest: dict[str, list[float]] = {}
    distinct: dict[str, dict[tuple[float, ...], None]] = {}
    for run in runs:
        loss = {i: run_loss for i, run_loss, _ in losses_on_same_data(run.steps, first.setdefault(run.data, run.steps))}
        if all(i in loss for i in at):
            newest[run.seed] = [loss[i] for i in at]
            distinct.setdefault(run.data, {})[tuple(newest[run.seed])] = None
    seeds = _band(BandKind.SEEDS, [[*newest.values()]], at, "seeds")
    return seeds, _band(BandKind.REORDERING, [[*losses] for losses in distinct.values()], at, "runs")


def _band(kind: BandKind, groups: Iterable[Sequence[Sequence[float]]], at: Sequence[int], of: str) -> Band:
    """The band of the deviations within groups of runs, pooled. groups: losses by group, run and iteration."""
    several = [np.array(runs) for runs in groups if len(runs) > 1]
    if not several:
        return Band(kind, evidence.between_two(GAP, math.nan, 0, 1, of))
    deviations = np.concatenate([runs - runs.mean(0) for runs in several])  # [runs, iterations]
    n, degrees = len(deviations), len(deviations) - len(several)
    of_means = math.sqrt((deviations.mean(1) ** 2).sum() / degrees)
    halves = quantile(degrees) * np.sqrt(2 * (deviations**2).sum(0) / degrees)
    gap = evidence.between_two(GAP, of_means, degrees, n, of)
    return Band(kind, gap, tuple(zip(at, halves.tolist(), strict=True)))


def placed(recipes: Iterable[tuple[str, Estimate, Iterable[Band]]]) -> list[Sentence]:
    """A sentence for each known band, which places the gaps in it. recipes: (name, mean gap, its bands)."""
    gaps: dict[Band, list[Named]] = {}
    for name, gap, bands in recipes:
        for band in bands:
            if not band.missing:
                gaps.setdefault(band, []).append((name, gap))
    return [band.place(named) for band, named in gaps.items()]


def missing(bands: Iterable[Band]) -> list[str]:
    """Why bands are unknown, each reason once."""
    return list(dict.fromkeys(band.missing for band in bands if band.missing))
