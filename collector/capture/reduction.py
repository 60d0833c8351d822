"""Reduces the rows of several ranks to one row per logical tensor before they are written.

The statistics of watched steps are always reduced, the rows of recorded steps only if ranks are merged. The writers'
threads exchange rows in a separate group, once per step or micro-batch, so that neither training nor its collective
operations wait. If a rank does not answer, each writes its own rows from then on.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from binade.collector.ranks import RankGroup, Ranks
from binade.data.run.columns import RoundedWith, Score, Shard, TensorRow
from binade.data.run.tensor_kinds import Operation
from binade.data.words.text import describe
from binade.quant.block_histograms import Histogram
from binade.quant.measurements import Errors, Summary
from binade.quant.metrics import sqnr_db
from binade.quant.sketch import BINS

TIMEOUT = timedelta(minutes=10)  # for a rank to answer, which may be evaluating or writing a checkpoint
# A replica stands out if the absmax of a tensor is this many times the median over replicas, if its SQNR is this many
# dB below the median, or if it has values that are not finite while most replicas have none.
FAR = 10.0
FEW = 8  # at most one replica in this many keeps its rows for that reason

# The number of the replica, and the index of the rank among those of the same replica and place (context parallelism).
Replica = tuple[int, int]
Parts = dict[Replica, dict[int, TensorRow]]  # of one logical tensor: the slices by their index


class Reduction:
    """Reduces the rows of these ranks, in a separate process group.

    merges     whether whole rows are reduced, not only statistics of watched steps
    keeps_own  whether whole rows of this rank are left out, like those of all ranks of its replica
    """

    def __init__(self, members: Sequence[int], group: dist.ProcessGroup, merges: bool, keeps_own: bool) -> None:
        self.merges, self.keeps_own = merges, keeps_own
        self._group, self._size = group, len(members)
        self._first, self._is_first = members[0], members[0] == dist.get_rank()
        self.works = True

    @classmethod
    def of(cls, ranks: Ranks, watches: bool, merges: bool = False, unmerged: bool = False) -> Reduction | None:
        """The reduction among the ranks that merge or, if none do, that watch; None on other ranks, and if there is
        only one. Every rank of the run calls this at the same time. unmerged: this rank's replica keeps its rows.
        Raises PeerLostError."""
        if ranks.size == 1:
            return None
        given = [[watches, merges, merges and unmerged, ranks.replica]]
        roles = RankGroup(dist.group.WORLD).gather(torch.tensor(given, dtype=torch.int64, device=ranks.device)).tolist()
        members = [rank for rank, (_, merging, *_) in enumerate(roles) if merging]
        merging = len(members) > 1
        if not merging:
            members = [rank for rank, (watching, *_) in enumerate(roles) if watching]
        if len(members) < 2:
            return None
        group = dist.new_group(members, backend="gloo", timeout=TIMEOUT)
        unmerged_replicas = {replica for *_, keeps, replica in roles if keeps}
        return cls(members, group, merging, ranks.replica in unmerged_replicas) if ranks.rank in members else None

    def __call__(self, iteration: int, rows: list[TensorRow]) -> list[TensorRow]:
        """The rows of a step that this rank writes: the first rank writes those of all, the others none."""
        if not self.works:
            return rows
        gathered: list[tuple[int, list[TensorRow]]] | None = [(0, [])] * self._size if self._is_first else None
        try:
            dist.gather_object((iteration, rows), gathered, dst=self._first, group=self._group)
        except (RuntimeError, ValueError) as error:  # a ValueError if the process groups were destroyed
            self.works = False
            warnings.warn(f"rows are no longer merged over ranks: {describe(error)}", stacklevel=2)
            return rows
        together = [row for _, rank_rows in gathered or () for row in rank_rows]
        if len({number for number, _ in gathered or ()}) != 1:
            return together
        return reduced(together, keep_outlying=self.merges)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def reduced(rows: Iterable[TensorRow], keep_outlying: bool = False) -> list[TensorRow]:
    """One row per logical tensor: statistics, sketches, scores and blocks are those of the concatenated parts; the
    absmax and other extremes are the largest. Its id and rank are those of the worst part: the lowest SQNR, without one
    the largest absmax. keep_outlying: replicas that stand out keep their rows, which are then not part of the others.
    So do replicas that do not have all slices of a tensor."""
    tensors = _tensors(rows)
    kept = _outlying(tensors) if keep_outlying else set()
    reduced_rows: list[TensorRow] = []
    for parts in tensors:
        merged: list[list[TensorRow]] = []
        for replica, slices in parts.items():
            shard = next(iter(slices.values())).shard or Shard()
            if replica in kept or len(slices) < (1 if shard.kind == "whole" else shard.count):
                reduced_rows += slices.values()
            else:
                merged.append([slices[index] for index in sorted(slices)])
        if merged:
            reduced_rows.append(_merged(merged))
    return reduced_rows


def _tensors(rows: Iterable[TensorRow]) -> list[Parts]:
    tensors: dict[object, Parts] = {}
    calls: Counter[object] = Counter()  # of a module that runs several times in a step
    places: Counter[object] = Counter()
    for row in rows:
        shard = row.shard or Shard()
        calls[row.identity, row.gemm] += 1
        tensor = replace(row.identity, rank=None), row.gemm, calls[row.identity, row.gemm]
        place = tensor, shard.index, shard.replica
        replica = shard.replica, places[place]
        places[place] += 1
        # Ranks of one replica have the same whole tensors.
        index = 0 if shard.kind == "whole" else shard.index
        tensors.setdefault(tensor, {}).setdefault(replica, {}).setdefault(index, row)
    return [*tensors.values()]


def _outlying(tensors: Iterable[Parts]) -> Set[Replica]:
    """The replicas that stand out in the most tensors: at most one in FEW."""
    outlier_counts: Counter[Replica] = Counter()
    replicas: set[Replica] = set()
    for parts in tensors:
        replicas |= parts.keys()
        measured = {replica: _extremes(slices.values()) for replica, slices in parts.items()}
        usual = [_median(column) for column in zip(*measured.values(), strict=True)]
        for replica, extremes in measured.items():
            not_finite, absmax, low = (value > limit for value, limit in zip(extremes, _limits(usual), strict=True))
            outlier_counts[replica] += not_finite or absmax or low
    most = outlier_counts.most_common(max(1, len(replicas) // FEW)) if len(replicas) > 2 else []
    return {replica for replica, times in most if times}


def _extremes(rows: Iterable[TensorRow]) -> tuple[float, float, float]:
    """How many values are not finite, the largest absmax, and the lowest SQNR, negated."""
    slices = [*rows]
    low = [row.error.sqnr_db for row in slices if row.error and not math.isnan(row.error.sqnr_db)]
    absmax = [row.summary.absmax for row in slices if not math.isnan(row.summary.absmax)]
    bad = sum(row.summary.nans + row.summary.infs for row in slices)
    return bad, max(absmax, default=math.nan), -min(low, default=math.nan)


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def _limits(usual: Sequence[float]) -> tuple[float, float, float]:
    not_finite, absmax, low = usual
    # If most replicas are all zero or have no error, none counts as an outlier.
    return math.inf if not_finite else 0.0, FAR * absmax or math.inf, low + FAR if math.isfinite(low) else math.inf


def _is_same_in_replicas(row: TensorRow) -> bool:
    return row.identity.tensor_name in ("weight", "norm_gain") or row.identity.operation == Operation.OPTIMIZER


def _merged(replicas: Sequence[Sequence[TensorRow]]) -> TensorRow:
    """Merge the slices of all replicas into one row."""
    every = [row for slices in replicas for row in slices]
    if len(every) == 1:
        return every[0]
    parts = replicas[0] if _is_same_in_replicas(every[0]) else every
    worst = min(parts, key=_quality)
    scores = [score for worst_score in worst.scores if (score := _score(worst_score, parts, replicas))]
    if len(parts) == 1:
        return replace(worst, scores=scores)
    return replace(
        worst,
        shape=_shape(parts),
        nbytes=sum(part.nbytes for part in parts),
        summary=_summary([part.summary for part in parts]),
        error=_errors(parts, [part.error for part in parts]),
        rounded_with=worst.rounded_with if len({part.rounded_with for part in parts}) == 1 else RoundedWith(),
        scores=scores,
        shard=_shard(parts, worst),
        recomputed=any(part.recomputed for part in parts),
        tokens_left_out=_left_out([slices[0].tokens_left_out for slices in replicas]),
        pairs_left_out=_left_out([part.pairs_left_out for part in parts]),
        trace=every[0].trace if len(replicas[0]) == 1 else None,  # channels of slices are not those of the whole
    )


def _score(score: Score, parts: Sequence[TensorRow], replicas: Sequence[Sequence[TensorRow]]) -> Score | None:
    """Merge a score of all parts; None if one does not have it."""
    kind = score.format, score.gemm, score.used
    scores = {
        id(row): next((s for s in row.scores if (s.format, s.gemm, s.used) == kind), None)
        for slices in replicas
        for row in slices
    }
    error = _errors(parts, [part_score.error if (part_score := scores[id(part)]) else None for part in parts])
    if error is None:
        return None
    blocks = _added([part_score.blocks for part in parts if (part_score := scores[id(part)])])
    same = all(part_score.rounded_with == score.rounded_with for part_score in scores.values() if part_score)
    rounded_with = score.rounded_with if same else RoundedWith()
    again = score.second_sqnr_db if len(parts) == 1 else None
    return replace(score, second_sqnr_db=again, rounded_with=rounded_with, error=error, blocks=blocks)


def _added(given: Sequence[Mapping[str, Histogram]]) -> dict[str, Histogram]:
    """The sums of histograms, without measures that one of the parts lacks."""
    total = {}
    for name in given[0] if given else ():
        if all(name in histograms for histograms in given):
            bins, place = np.unique(np.concatenate([histograms[name][0] for histograms in given]), return_inverse=True)
            counts = np.zeros(len(bins), np.int64)
            np.add.at(counts, place, np.concatenate([histograms[name][1] for histograms in given]))
            total[name] = bins, counts
    return total


def _left_out(given: Sequence[int | None]) -> int | None:
    """Of all replicas or parts; None if none has a mask."""
    return None if set(given) == {None} else sum(count or 0 for count in given)


def _quality(row: TensorRow) -> float:
    measured = row.error.sqnr_db if row.error else row.result_sqnr_db
    value = -row.summary.absmax if measured is None else measured
    return math.inf if math.isnan(value) else value


def _shard(parts: Sequence[TensorRow], worst: TensorRow) -> Shard:
    """That of the merged row. The statistics of partial sums are not those of their sum, so they stay partial."""
    replica = min((part.shard or Shard()).replica for part in parts)
    shard = worst.shard or Shard()
    return replace(shard, replica=replica) if shard.kind == "partial" else Shard(replica=replica)


def _shape(parts: Sequence[TensorRow]) -> tuple[int, ...]:
    """Slices joined along their axis, replicas along the first."""
    shape, shard = list(parts[0].shape), parts[0].shard or Shard()
    if shape:
        shape[0] = sum(part.shape[0] for part in parts if (part.shard or Shard()).index == shard.index)
    if shard.axis is not None:
        shape[shard.axis] *= len({(part.shard or Shard()).index for part in parts})
    return tuple(shape)


def _column(parts: Sequence[object], name: str) -> np.ndarray:
    return np.array([getattr(part, name) for part in parts], np.float64)


def _summary(parts: Sequence[Summary]) -> Summary:
    counts: dict[str, Any] = {name: int(_column(parts, name).sum()) for name in ("numel", "zeros", "nans", "infs")}
    finite = [part for part in parts if part.numel > part.nans + part.infs]
    if not finite:
        return replace(parts[0], **counts)
    sketch = np.zeros(BINS, np.int64)
    for part in finite:
        sketch[part.bins] += part.counts
    bins = np.flatnonzero(sketch)
    of = {name: _column(finite, name) for name in ("min", "max", "mean", "std", "rms", "absmax", "absmin")}
    n = _column(finite, "numel") - _column(finite, "nans") - _column(finite, "infs")
    weights = n / n.sum()
    mean = float(weights @ of["mean"])
    away, second = of["mean"] - mean, of["std"] ** 2
    third = np.where(second > 0, _column(finite, "skewness") * second**1.5, 0.0)
    fourth = np.where(second > 0, _column(finite, "kurtosis") * second**2, 0.0)
    square = float(weights @ (second + away**2))
    cube = float(weights @ (third + 3 * away * second + away**3))
    fourth_power = float(weights @ (fourth + 4 * away * third + 6 * away**2 * second + away**4))
    nonzero = of["absmin"][_column(finite, "absmax") > 0]
    return replace(
        finite[0],
        **counts,
        bins=bins.astype(np.int16),
        counts=sketch[bins],
        min=float(of["min"].min()),
        max=float(of["max"].max()),
        absmax=float(of["absmax"].max()),
        absmin=float(nonzero.min()) if len(nonzero) else math.nan,
        mean=mean,
        rms=math.sqrt(weights @ of["rms"] ** 2),
        std=math.sqrt(square),
        skewness=cube / square**1.5 if square else math.nan,
        kurtosis=fourth_power / square**2 if square else math.nan,
    )


def _errors(parts: Sequence[TensorRow], errors: Sequence[Errors | None]) -> Errors | None:
    if None in errors:
        return None
    if len(parts) == 1:
        return errors[0]
    summaries = [part.summary for part in parts]
    of = {field.name: _column(errors, field.name) for field in fields(Errors)}
    numel, zeros = _column(summaries, "numel"), _column(summaries, "zeros")
    finite = numel - _column(summaries, "nans") - _column(summaries, "infs")
    signals = np.where(finite > 0, _column(summaries, "rms") ** 2 * finite, 0.0)
    noise, signal = float(_weighted(of["mse"], finite)), float(signals.sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        product = np.where(signals > 0, of["projection"] * signals, 0.0)  # <q, x>
        rounded = np.where(product == 0, 0.0, product**2 / (of["cosine"] ** 2 * signals))  # |q|^2
    with np.errstate(divide="ignore", invalid="ignore"):
        return Errors(
            sqnr_db=sqnr_db(signal, noise),
            mse=float(noise / finite.sum()),
            relative_error=float(np.sqrt(np.float64(noise) / signal)),
            cosine=float(product.sum() / np.sqrt(signal * rounded.sum())),
            projection=float(product.sum() / np.float64(signal)),
            max_abs_error=float(of["max_abs_error"][finite > 0].max(initial=0.0)),
            flush_to_zero=float(_weighted(of["flush_to_zero"], finite - zeros) / (finite - zeros).sum()),
            underflow_of_all=float(_weighted(of["underflow_of_all"], numel) / numel.sum()),
            saturated=float(_weighted(of["saturated"], numel) / numel.sum()),
            flushed_error_share=float(_weighted(of["flushed_error_share"], of["mse"] * finite) / np.float64(noise)),
            saturated_error_share=float(_weighted(of["saturated_error_share"], of["mse"] * finite) / np.float64(noise)),
        )


def _weighted(values: np.ndarray, weights: np.ndarray) -> np.float64:
    """The weighted sum; terms without weight do not count."""
    total: np.float64 = np.where(weights > 0, values * weights, 0.0).sum()
    return total
