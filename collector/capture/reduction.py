"""Reduces the watched statistics of several ranks to one row per logical tensor before they are written.

The writers' threads exchange rows in a group of their own, once per watched step, so that neither training nor its
collective operations wait. If a rank does not answer, each writes its own rows from then on.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from binade.collector.models.parallel import Group
from binade.collector.training.ranks import Ranks
from binade.data.segment import Score, Shard, TensorRow
from binade.data.text import describe
from binade.quant.metrics import Errors, sqnr_db
from binade.quant.summary import Summary

TIMEOUT = timedelta(seconds=60)  # for a rank to answer


class Reduction:
    """Reduces the rows of these ranks, in a separate process group."""

    def __init__(self, members: Sequence[int], group: dist.ProcessGroup) -> None:
        self._group, self._size = group, len(members)
        self._first, self._is_first = members[0], members[0] == dist.get_rank()
        self._works = True

    @classmethod
    def of(cls, ranks: Ranks, watches: bool) -> Reduction | None:
        """The reduction among the ranks that watch; None on other ranks, and if only one watches. Every rank of the run
        calls this at the same time. Raises PeerLostError."""
        if ranks.size == 1:
            return None
        found = Group(dist.group.WORLD).gather(torch.tensor([int(watches)], device=ranks.device))
        members = found.nonzero().flatten().tolist()
        if len(members) < 2:
            return None
        group = dist.new_group(members, backend="gloo", timeout=TIMEOUT)
        return cls(members, group) if watches else None

    def __call__(self, iteration: int, rows: list[TensorRow]) -> list[TensorRow]:
        """The rows of a watched step that this rank writes: the first rank writes those of all, the others none."""
        if not self._works:
            return rows
        gathered: list[tuple[int, list[TensorRow]]] | None = [(0, [])] * self._size if self._is_first else None
        try:
            dist.gather_object((iteration, rows), gathered, dst=self._first, group=self._group)
        except (RuntimeError, ValueError) as error:  # a ValueError if the process groups were destroyed
            self._works = False
            warnings.warn(f"watched steps are no longer reduced over ranks: {describe(error)}", stacklevel=2)
            return rows
        together = [row for _, each in gathered or () for row in each]
        return reduced(together) if len({number for number, _ in gathered or ()}) == 1 else together

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


def reduced(rows: Iterable[TensorRow]) -> list[TensorRow]:
    """One row per logical tensor: statistics as of the concatenated parts; the absmax and other extremes are the
    largest. Its id and rank are those of the worst part: the lowest SQNR, without a format the largest absmax."""
    groups: dict[object, dict[object, TensorRow]] = {}
    calls: Counter[object] = Counter()  # of a module that runs several times in a step
    for row in rows:
        shard = row.shard or Shard()
        # Ranks of one replica have the same whole tensors, all replicas the same weights.
        part = (
            0 if shard.kind == "whole" else shard.index,
            0 if row.identity.tensor_name == "weight" else shard.replica,
        )
        calls[row.identity, row.gemm] += 1
        whole = replace(row.identity, rank=None), row.gemm, calls[row.identity, row.gemm]
        groups.setdefault(whole, {}).setdefault(part, row)
    return [_merged([*parts.values()]) for parts in groups.values()]


def _merged(parts: Sequence[TensorRow]) -> TensorRow:
    if len(parts) == 1:
        return parts[0]
    worst = min(parts, key=_quality)
    errors = [part.error for part in parts if part.error]
    error = _errors(parts) if len(errors) == len(parts) else None
    scores = [Score(score.format, error, score.gemm, score.used) for score in worst.scores if score.used and error]
    return replace(
        worst,
        shape=_shape(parts),
        nbytes=sum(part.nbytes for part in parts),
        summary=_summary([part.summary for part in parts]),
        error=error,
        scores=scores,
        shard=Shard(),
        recomputed=any(part.recomputed for part in parts),
    )


def _quality(row: TensorRow) -> float:
    value = row.error.sqnr_db if row.error else -row.summary.absmax
    return math.inf if math.isnan(value) else value


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


def _errors(parts: Sequence[TensorRow]) -> Errors:
    summaries, errors = [part.summary for part in parts], [part.error for part in parts]
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
        )


def _weighted(values: np.ndarray, weights: np.ndarray) -> np.float64:
    """The weighted sum; terms without weight do not count."""
    total: np.float64 = np.where(weights > 0, values * weights, 0.0).sum()
    return total
