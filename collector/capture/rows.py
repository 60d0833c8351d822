"""The rows of the steps that have not ended: drafts, to which the scores of later GEMMs are added until the step ends.

Then they are frozen, once, and handed to the writer's thread, which fetches their results and makes rows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from binade.collector.capture.clock import Moment
from binade.collector.capture.tried import Tried
from binade.collector.capture.valid import Valid
from binade.collector.capture.writing import Pending
from binade.collector.models.site import Site
from binade.data.run.columns import Score, TensorRow
from binade.data.run.tensor_kinds import Product
from binade.quant.later import Later
from binade.quant.measurements import Summary

Pass = tuple[Site, Moment]  # a layer's forward pass


@dataclass(frozen=True, eq=False)
class Draft:
    """A recorded tensor whose step has not ended.

    during    the pass of its layer
    path      of its values, relative to the run
    merged    whether it becomes part of a row of all ranks
    tried     its scores, to which those of later GEMMs are added until the step ends
    measured  what else its row needs of the device
    row       makes the row, given whether the pass was computed again in the backward pass
    """

    during: Pass
    path: Path | None
    merged: bool
    summary: Later[Summary]
    tried: list[Tried]
    measured: Sequence[Later[Any]]
    row: Callable[[bool], TensorRow]

    @property
    def results(self) -> list[Later[Any]]:
        """What the row needs of the device."""
        return [self.summary, *self.measured, *(result for tried in self.tried for result in tried.results)]


def completed(tried: Tried, summary: Summary, tokens_left_out: int | None, pairs_left_out: int | None) -> Score:
    """The score of a tensor with these statistics: with the tensor scale that follows from them, and without the pairs
    that the softmax does not see."""
    return _without(pairs_left_out or 0, _scaled(tried, summary, tokens_left_out), summary)


def _scaled(tried: Tried, summary: Summary, tokens_left_out: int | None) -> Score:
    """The score with the tensor scale, where that follows from the statistics of the values."""
    score, spec = tried.score(), tried.spec
    known = score.rounded_with
    finite = summary.numel > 0 and not (summary.nans or summary.infs)
    whole = tokens_left_out is None and finite and not spec.transforms
    if not (score.used and known.tensor_scale is None and whole):
        return score
    return replace(score, rounded_with=replace(known, tensor_scale=spec.scaling.of_tensor(spec, summary.absmax)))


def _without(pairs: int, score: Score, summary: Summary) -> Score:
    """The score without so many pairs that the softmax does not see, of which the summary has none: they are zero, and
    so are their errors."""
    if not (pairs and summary.numel):
        return score
    errors, factor = score.error, (summary.numel + pairs) / summary.numel
    means = {name: getattr(errors, name) * factor for name in ("mse", "underflow_of_all", "saturated")}
    return replace(score, error=replace(errors, **means))


@dataclass(eq=False)
class Drafts:
    """The drafts of the steps that have not ended.

    recomputed   the passes that were computed again in the backward pass
    scores       of each call of a product: those of its operands, by the name that an operand has in the product
    masked       the valid tokens of the forward pass that runs, if `Recorder.valid` gave a mask
    valid        those of each forward pass
    """

    drafts: list[Draft] = field(default_factory=list)
    recomputed: set[Pass] = field(default_factory=set)
    scores: dict[tuple[Site, Product, Moment], dict[str, list[Tried]]] = field(default_factory=dict)
    masked: Valid | None = None
    valid: dict[Moment, Valid] = field(default_factory=dict)

    def add(self, draft: Draft) -> Draft:
        self.drafts.append(draft)
        return draft

    def take(self, merged: bool) -> list[Draft]:
        """Remove the drafts that become part of rows of all ranks, or the others."""
        taken = [draft for draft in self.drafts if draft.merged == merged]
        self.drafts = [draft for draft in self.drafts if draft.merged != merged]
        return taken

    def freeze(self, drafts: Iterable[Draft], in_ring: Callable[[Moment], bool]) -> list[Pending]:
        """These drafts, for the writer. in_ring: whether the rows of a moment are kept in memory only."""
        return [
            Pending(
                draft.path,
                partial(draft.row, draft.during in self.recomputed),
                draft.results,
                in_ring(draft.during[1]),
            )
            for draft in drafts
        ]

    def reset(self) -> None:
        self.drafts.clear()
        self.recomputed.clear()
        self.scores.clear()
        self.valid.clear()

    def forget(self, iteration: int) -> None:
        """The steps before this iteration have ended."""
        self.scores.clear()
        self.valid = {moment: valid for moment, valid in self.valid.items() if moment.iteration >= iteration}
        self.recomputed = {(site, moment) for site, moment in self.recomputed if moment.iteration >= iteration}
