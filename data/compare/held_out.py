"""Held-out gaps: the losses of the same sequences while two runs train, a reading of their experiments.

Two runs that are compared (data.compare.same_data) have their differences taken sequence by sequence, after as many
iterations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from binade.data.compare import evidence
from binade.data.compare.evidence import GAP, Estimate, Sentence
from binade.data.run.directory import RunError
from binade.data.run.evaluations import HeldOut, read_held_out
from binade.data.words.text import counted

if TYPE_CHECKING:
    import pandas as pd

DOUBLING = replace(GAP, title="Change per doubling", unit="nats per doubling of tokens")
FEWEST = 3  # evaluations of a slope
Evaluations = Mapping[int, HeldOut]
Differences = dict[int, tuple[int | None, tuple[float, ...]]]


def differences(run: Evaluations, reference: Evaluations) -> Differences:
    """By iteration, (tokens, the run's loss minus the reference's for each sequence), where both have evaluated the
    same sequences after the same iterations."""
    return {
        iteration: (
            evaluation.tokens,
            tuple(a - b for a, b in zip(evaluation.losses, reference[iteration].losses, strict=True)),
        )
        for iteration, evaluation in run.items()
        if iteration in reference and evaluation.data_sha256 == reference[iteration].data_sha256
        if len(evaluation.losses) == len(reference[iteration].losses)
    }


@dataclass(frozen=True)
class HeldOutGap:
    """The held-out loss of a recipe minus that of its references.

    iteration  after how many iterations under the recipe
    tokens     that were trained until then; None if unknown
    gap        of one run: the mean over sequences; of several seeds: the mean over seeds
    slope      the change of the gap per doubling of tokens, over all evaluations; NaN for fewer than FEWEST; of one run
               without an interval
    parameters  of the model; None if unknown
    """

    iteration: int
    tokens: int | None
    gap: Estimate
    slope: Estimate
    parameters: int | None = None

    @property
    def trained(self) -> str:
        """How far the runs were trained, in words."""
        ratio = f", {self.tokens / self.parameters:.3g} per parameter" if self.tokens and self.parameters else ""
        tokens = f" ({self.tokens:,} tokens{ratio})" if self.tokens else ""
        return f"{counted(self.iteration, 'iteration')}{tokens}"


def held_out_gap(pairs: Sequence[Differences]) -> HeldOutGap | None:
    """The gap at the last iteration that all pairs of runs have; None without one. pairs: of each seed, those without
    evaluations left out."""
    known = [pair for pair in pairs if pair]
    common = set.intersection(*map(set, known)) if known else set()
    if not common:
        return None
    last = max(common)
    slopes = [of_pair for pair in known if (of_pair := slopes_of(pair))]
    if len(known) == 1:
        gap = evidence.mean(GAP, known[0][last][1], "sequences")
        slope = evidence.mean(DOUBLING, [_mean(slopes[0])] if slopes else ())
    else:
        gap = evidence.mean(GAP, (_mean(pair[last][1]) for pair in known))
        slope = evidence.mean(DOUBLING, map(_mean, slopes) if len(slopes) == len(known) else ())
    return HeldOutGap(last, known[0][last][0], gap, slope)


def slopes_of(pair: Differences) -> list[float]:
    """The slope of each sequence's difference over the logarithm of the tokens to base 2 (least squares); empty for
    fewer than FEWEST evaluations of the same number of sequences after different numbers of tokens. The mean of the
    slopes is the slope of the mean."""
    points = [(math.log2(tokens), values) for tokens, values in pair.values() if tokens]
    if len({at for at, _ in points}) < FEWEST or len({len(values) for _, values in points}) > 1:
        return []
    middle = _mean([at for at, _ in points])
    weights = [at - middle for at, _ in points]
    square = math.fsum(weight**2 for weight in weights)
    columns = zip(*(values for _, values in points), strict=True)
    return [
        math.fsum(weight * value for weight, value in zip(weights, column, strict=True)) / square for column in columns
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def evaluations_of(root: Path, run_ids: Iterable[str]) -> dict[str, Evaluations]:
    """The evaluations of runs; files that cannot be read are left out."""
    evaluations: dict[str, Evaluations] = {}
    for run_id in run_ids:
        with suppress(OSError, RunError):
            evaluations[run_id] = read_held_out(root / run_id)
    return evaluations


def last_in_common(gaps: pd.DataFrame) -> dict[str, int]:
    """The last iteration of each run at which it had read the data of its reference. gaps: of `loss_gaps`."""
    last = gaps.groupby("run_id")["iteration"].max()
    return {str(run_id): int(at) for run_id, at in last.items()}


def pairs_of(
    table: pd.DataFrame, run_ids: Iterable[str], evaluations: Mapping[str, Evaluations], same: Mapping[str, int]
) -> list[Differences]:
    """The differences of each of these runs to the reference with most evaluations in common. table: of
    `runs_with_references`. same: of `last_in_common`; later evaluations are left out."""
    rows: dict[Any, Any] = table.set_index("run_id")["references"].to_dict()
    selection = []
    for run_id in run_ids:
        run_evaluations = {
            at: evaluation for at, evaluation in evaluations.get(run_id, {}).items() if at <= same.get(run_id, -1) + 1
        }
        pairs = [differences(run_evaluations, evaluations.get(other, {})) for other in rows[run_id] if other != run_id]
        selection.append(max(pairs, key=len, default={}))
    return selection


def repeated(
    table: pd.DataFrame, run_ids: Iterable[str], evaluations: Mapping[str, Evaluations], iteration: int
) -> Estimate | None:
    """By how much the mean held-out losses of two runs differ that differ in bits alone: of the bf16 runs on the data
    of these, which are evaluated after this iteration; None if no two of them differ. table: of
    `runs_with_references`."""
    references = table.set_index("run_id")["references"]
    groups = []
    for on_data in dict.fromkeys(references[run_id] for run_id in run_ids):
        known = [evaluations[other][iteration] for other in on_data if iteration in evaluations.get(other, {})]
        alike = [one.losses for one in known if one.data_sha256 == known[0].data_sha256]
        groups.append([_mean(losses) for losses in dict.fromkeys(alike)])
    return evidence.between_alike(GAP, groups, "runs")


def held_out_sentence(
    known: Sequence[tuple[str, HeldOutGap]], base: str, bits: Mapping[str, Estimate | None] | None = None
) -> Sentence:
    """Which held-out gaps of several seeds can be told from 0, and which change with the tokens; the gaps of one seed,
    which are described; and how far training was followed. known: the names of recipes with their gaps; base: what the
    gaps are to; bits: of `repeated`, by name."""
    if not known:
        return Sentence()
    single = [(label, gap) for label, gap in known if gap.gap.of == "sequences"]
    several = [(label, gap) for label, gap in known if gap.gap.of != "sequences"]
    pairs = [(label, gap.gap) for label, gap in several]
    said = [evidence.effects(pairs, f"{base} on held-out sequences", ("higher loss", "lower loss"))]
    if single:
        gaps = [(label, gap.gap) for label, gap in single]
        text = "Held-out gap to {base} of one seed, which another seed may change: {gaps}."
        shown = evidence.several(gaps, lambda gap: f"{gap.text} (mean of {counted(gap.n, 'sequence')})")
        said.append(evidence.say(text, base=base, gaps=shown))
        said.append(_of_bits([label for label, _ in single], bits or {}))
    slopes = [(label, gap.slope) for label, gap in several if math.isfinite(gap.slope.error)]
    judged = zip(slopes, evidence.holm([slope for _, slope in slopes]), strict=True)
    apart = [item for item, is_apart in judged if is_apart]
    said.append(evidence.each_of(apart, "The held-out gap changes when the tokens double"))
    if alike := [label for label, slope in slopes if label not in dict(apart)]:
        text = "No change of the held-out gap over tokens can be told from chance: {names}."
        said.append(evidence.say(text, names=evidence.listed(alike)))
    longest = max((gap for _, gap in known), key=lambda gap: (gap.tokens or 0, gap.iteration))
    said.append(evidence.say("Held-out losses are known up to {trained}, not beyond.", trained=longest.trained))
    return evidence.together(*said)


def _of_bits(labels: Sequence[str], bits: Mapping[str, Estimate | None]) -> Sentence:
    """What is known of the deviation between runs that differ in bits alone."""
    measured = [(label, estimate) for label in labels if (estimate := bits.get(label))]
    sentences = []
    if measured:
        widest = max((estimate for _, estimate in measured), key=lambda estimate: estimate.high)
        text = "Two bf16 runs that differ in bits alone differ by up to {half} ({n} runs, 95%)."
        half = evidence.exact(replace(GAP, format=".4f"), widest.high)
        sentences.append(evidence.say(text, half=half, n=widest.n))
    if len(measured) < len(labels):
        text = "By how much two runs differ that differ in bits alone is unknown: repeat the bf16 run with --tp 2, or "
        sentences.append(evidence.say(text + "train several seeds."))
    return evidence.together(*sentences)
