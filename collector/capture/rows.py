"""The rows of the steps that have not ended: drafts, to which the scores of later GEMMs are added until the step ends.

Then they are frozen, once, and handed to the writer's thread, which fetches their results and makes rows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from binade.collector.capture.clock import Moment
from binade.collector.capture.tried import Tried
from binade.collector.capture.valid import Valid
from binade.collector.capture.writing import Pending
from binade.collector.models.site import Site
from binade.data.segment import Identity, RoundedWith, Score, Shard, TensorRow, Trace
from binade.data.tensor_kinds import Gemm, Product
from binade.quant.later import Later
from binade.quant.summary import Summary

Pass = tuple[Site, Moment]  # a layer's forward pass


@dataclass(frozen=True, eq=False)
class DraftRow:
    """The row of a tensor whose step has not ended.

    during   the pass of its layer
    path     of its values, relative to the run
    format   that it was rounded to
    tried    its scores
    last_bin as in TensorRow
    tokens_left_out, pairs_left_out  as in TensorRow
    shard    with the number of this rank's replica, which the first DTensor of a step may correct
    merged   whether it becomes part of a row of all ranks
    """

    during: Pass
    tensor_id: str
    identity: Callable[[], Identity]
    captured: datetime
    format: str | None
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    path: Path | None
    contracted_axis: int | None
    gemm: Gemm | None
    summary: Later[Summary]
    tried: list[Tried]
    result_sqnr: Later[float] | None
    shard: Callable[[], Shard]
    trace: Later[Trace] | None
    last_bin: Later[dict[str, float]] | None
    tokens_left_out: int | None
    pairs_left_out: Later[int] | None
    merged: bool

    @property
    def results(self) -> list[Later[Any]]:
        """What the row needs of the device."""
        parts = self.summary, self.result_sqnr, self.trace, self.last_bin, self.pairs_left_out
        results: list[Later[Any]] = [result for result in parts if result]
        return results + [result for tried in self.tried for result in tried.results]

    def row(self, run_id: str, recomputed: bool) -> TensorRow:
        """recomputed: whether the pass was computed again in the backward pass."""
        summary = self.summary()
        pairs = self.pairs_left_out() if self.pairs_left_out else None
        scores = [_without(pairs or 0, self._scored(tried, summary), summary) for tried in self.tried]
        used = next((score for score in scores if score.used and score.gemm == self.gemm), None)
        return TensorRow(
            tensor_id=self.tensor_id,
            run_id=run_id,
            identity=self.identity(),
            captured=self.captured.replace(tzinfo=None),
            shape=self.shape,
            dtype=self.dtype,
            nbytes=self.nbytes,
            path=str(self.path) if self.path else None,
            contracted_axis=self.contracted_axis,
            summary=summary,
            format=self.format,
            error=used.error if used else None,
            rounded_with=used.rounded_with if used else RoundedWith(),
            scores=scores,
            gemm=self.gemm,
            result_sqnr_db=self.result_sqnr() if self.result_sqnr else None,
            shard=self.shard(),
            recomputed=recomputed,
            trace=self.trace() if self.trace else None,
            last_bin=self.last_bin() if self.last_bin else {},
            tokens_left_out=self.tokens_left_out,
            pairs_left_out=pairs,
        )

    def _scored(self, tried: Tried, summary: Summary) -> Score:
        """The score with the tensor scale, where that follows from the statistics of the values."""
        score, spec = tried.score(), tried.spec
        known = score.rounded_with
        finite = summary.numel > 0 and not (summary.nans or summary.infs)
        whole = self.tokens_left_out is None and finite and not spec.transforms
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

    drafts: list[DraftRow] = field(default_factory=list)
    recomputed: set[Pass] = field(default_factory=set)
    scores: dict[tuple[Site, Product, Moment], dict[str, list[Tried]]] = field(default_factory=dict)
    masked: Valid | None = None
    valid: dict[Moment, Valid] = field(default_factory=dict)

    def take(self, merged: bool) -> list[DraftRow]:
        """Remove the drafts that become part of rows of all ranks, or the others."""
        taken = [draft for draft in self.drafts if draft.merged == merged]
        self.drafts = [draft for draft in self.drafts if draft.merged != merged]
        return taken

    def freeze(self, drafts: Iterable[DraftRow], run_id: str, in_ring: Callable[[Moment], bool]) -> list[Pending]:
        """These drafts, for the writer. in_ring: whether the rows of a moment are kept in memory only."""
        return [
            Pending(
                draft.path,
                partial(draft.row, run_id, draft.during in self.recomputed),
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
