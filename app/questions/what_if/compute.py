"""Would another format fix it? The same values rounded into any formats with any options, side by side."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from binade.app.draw import style
from binade.app.questions.shared.distributions import Distribution, Pool, distribution_of
from binade.app.questions.shared.rounded import NOT_RECORDED, Recorded
from binade.collector.advice import scales
from binade.data.compare.evidence import spread_of
from binade.quant.blocks import energy, sample
from binade.quant.metrics import Errors, score, sqnr_db, streamed_score
from binade.quant.scaling import scale_nbytes
from binade.quant.specs import OPTIONS, Spec, SpecError
from binade.quant.transform import residual

ERRORS = ("sqnr_db", "flush_to_zero", "saturated")
MOST_DB = 200.0  # an SQNR without error counts as this
NEAR_DB = 0.5  # scales whose SQNR is this near to the best are named with it
LIMIT = 1 << 20  # values of a tensor that are tried; a larger one is sampled by whole lines
SECONDS = 2.0  # of a processor, for finding options with a higher SQNR


@dataclass(frozen=True)
class Trial:
    """One spec. ignored: the options that were chosen and do not apply to the format, which stay at their defaults."""

    spec: Spec
    ignored: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return str(self.spec)


def trial(fmt: str, **options: Any) -> Trial:
    """A trial with those of the options that are possible for the format; None leaves an option at its default."""
    spec, ignored = Spec.of(fmt), []
    for name in OPTIONS:
        try:
            spec = Spec.of(spec, **{name: options.get(name)})
        except SpecError:
            ignored.append(name)
    return Trial(spec, tuple(ignored))


def with_defaults(trials: list[Trial]) -> list[Trial]:
    """Each trial, preceded by the default of its format if that differs; without duplicates."""
    return [Trial(spec) for spec in dict.fromkeys(s for one in trials for s in (Spec.of(one.spec.format), one.spec))]


MOST_VALUES = 4  # of an option, since each costs other bits, and users ask for one by its value


@dataclass(frozen=True)
class Gain:
    """What options change. options: their values, by name; decibels: SQNR with these minus that without."""

    options: Mapping[str, str]
    spec: Spec
    decibels: float


@dataclass(frozen=True)
class Gains:
    """
    found    the options that gain, the largest gain first
    left     how many were not tried within the time
    sampled  whether those with a rotation were tried on a sample of the values
    """

    found: tuple[Gain, ...]
    left: int = 0
    sampled: bool = False


def gains(
    x: Tensor, dim: int, now: Spec, allowed: Mapping[str, Sequence[str]], least: float, seconds: float = SECONDS
) -> Gains:
    """The best values of each option, at most MOST_VALUES, for x [any shape] in a spec, and those of two or three
    options together that gain more than each alone: only gains of more than `least` dB, found in `seconds` of a
    processor. All values are rounded; of more than LIMIT values, a sample to specs that no kernel rounds."""
    part, every = sample(x, dim, LIMIT)
    whole = streamed_score(x, now, dim) if every > 1 else None
    base = score(part, now, dim if every == 1 else -1).sqnr_db
    end, left = time.thread_time() + seconds, 0

    def gain(options: Mapping[str, str]) -> Gain | None:
        nonlocal left
        try:
            spec = Spec.of(now, **options)
        except SpecError:
            return None
        if time.thread_time() > end:
            left += 1
            return None
        if whole and (measured := streamed_score(x, spec, dim)):
            return Gain(options, spec, measured.sqnr_db - whole.sqnr_db)
        return Gain(options, spec, score(part, spec, dim if every == 1 else -1).sqnr_db - base)

    found: list[Gain] = []
    best: dict[str, Gain] = {}
    for option, values in allowed.items():
        tried = [tested for value in values if (tested := gain({option: value})) and tested.decibels > least]
        tried.sort(key=lambda tested: -tested.decibels)
        found += tried[:MOST_VALUES]
        best |= {option: tried[0]} if tried else {}
    for count in (2, 3):
        for alone in itertools.combinations(best.values(), count):
            both = gain({name: value for one in alone for name, value in one.options.items()})
            if both and both.decibels > max(one.decibels for one in alone) + least:
                found.append(both)
    return Gains(tuple(sorted(found, key=lambda tested: -tested.decibels)), left, every > 1)


@dataclass
class _Sum:
    """The errors of each tensor of a selection, which may differ in scale, and sums of what can be added."""

    errors: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ERRORS})
    nbytes: float = 0.0
    codes: np.ndarray | None = None
    exponents: tuple[float, float] = (math.inf, -math.inf)

    def replace_errors(self, whole: Errors) -> None:
        """The errors of the last tensor, by those of all its values."""
        for name, values in self.errors.items():
            if values:
                values[-1] = getattr(whole, name)


@dataclass(frozen=True)
class TriedOperand:
    """What is tried: the values, the axis that their GEMM contracts, and how it rounded them."""

    x: Tensor
    dim: int
    recorded: Recorded = NOT_RECORDED


def try_formats(
    tensors: Iterable[TriedOperand],
    trials: list[Trial],
    *,
    together: bool = True,
    limit: int = LIMIT,
    done: Callable[[int], None] = lambda count: None,
) -> tuple[pd.DataFrame, list[Distribution]]:
    """Round every operand by every trial: (a row per trial, the distributions after rounding). In the format that it
    was recorded in, it is rounded as it was then.

    Columns: label, format, sqnr_db, flush_to_zero (of the nonzero values) and saturated (the medians of the tensors'
    own, with _low and _high, the 10th and 90th percentile), tensors, each (the SQNR of each tensor), codes_used,
    codes_total, code_entropy_bits, element_bits, scale_exponent_min and _max (of the block scales, NVFP4's
    with its tensor scale), nbytes (of all the values in this format), bits_per_value. With a rotation or a mean that is
    subtracted, flushed, saturated and codes refer to the values that are rounded, SQNR to those of the tensor.

    The distributions are of the values as captured and after each trial's round trip: of several tensors together, in
    bins of 1/128 binade; of one tensor, its own values. done is called with the number of finished roundings.
    """
    sums = [_Sum() for _ in trials]
    pools = [Pool(label) for label in ("as captured", *(one.label for one in trials))]
    alone: list[Distribution] = []
    step = 0
    for operand in tensors:
        x, recorded = operand.x, operand.recorded
        for index, pool in enumerate(pools):
            dim = recorded.along(trials[index - 1].spec, operand.dim) if index else operand.dim
            part, every = sample(x, dim, limit)
            share, became = x.numel() / max(part.numel(), 1), part
            if index:
                spec, total = trials[index - 1].spec, sums[index - 1]
                if every > 1 and spec.centered:
                    became = _centered(x, dim, spec, total, limit)
                elif every > 1:
                    source = recorded.source(x, spec)
                    source = None if source is None else sample(source, dim, limit)[0]
                    became = _add(part, -1, spec, total, recorded=replace(recorded, axis=None), source=source)
                else:
                    became = _add(part, dim, spec, total, recorded=recorded)
                if every > 1 and not together:
                    total.replace_errors(recorded.score(x, spec, dim))
                total.nbytes += x.numel() * spec.format.element.bits / 8 + scale_nbytes(spec, tuple(x.shape), dim)
            if together:
                pool.add(became, share)
            else:
                alone.append(distribution_of(pool.group, became))
            step += bool(index)
            done(step)
    table = pd.DataFrame([_row(one, total) for one, total in zip(trials, sums, strict=True)])
    return table, [pool.distribution() for pool in pools] if together else alone


def _centered(x: Tensor, dim: int, spec: Spec, total: _Sum, limit: int) -> Tensor:
    """As `_add` for a sample of x, whose mean over all tokens is subtracted."""
    (part, _), (coded, _) = sample(x, dim, limit), sample(residual(x), dim, limit)
    rounded = _add(coded, -1, Spec.of(spec, center="none"), total, energy(part))
    return (part.float() + (rounded - coded)).to(x.dtype)


def _add(
    x: Tensor,
    dim: int,
    spec: Spec,
    total: _Sum,
    signal: float | None = None,
    recorded: Recorded = NOT_RECORDED,
    source: Tensor | None = None,
) -> Tensor:
    """Add one tensor, or a sample of it; returns its values after the round trip. signal: Σx², if not that of x.
    source: as in `Recorded.look`."""
    blocks = recorded.look(x, spec, dim, source=source)
    sums = blocks.sums
    if not math.isnan(sums.noise):
        errors = (
            sqnr_db(sums.signal if signal is None else signal, sums.noise),
            sums.flushed / sums.nonzero if sums.nonzero else math.nan,
            sums.saturated / x.numel() if x.numel() else math.nan,
        )
        for name, value in zip(ERRORS, errors, strict=True):
            total.errors[name].append(value)
    bits = spec.format.element.bits
    counts = torch.bincount(blocks.codes[blocks.valid & ~blocks.scale.isnan()], minlength=1 << bits).numpy()
    total.codes = counts if total.codes is None else total.codes + counts
    exponents = blocks.scale_exponents[~blocks.scale_exponents.isnan()]
    if spec.run(1) is not None and len(exponents):
        low, high = total.exponents
        total.exponents = min(low, float(exponents.min())), max(high, float(exponents.max()))
    return blocks.result


def _row(one: Trial, total: _Sum) -> dict[str, object]:
    spec = one.spec
    codes = total.codes if total.codes is not None else np.zeros(1, np.int64)
    p = codes[codes > 0] / max(codes.sum(), 1)
    low, high = total.exponents
    return {
        "label": one.label,
        "format": spec.format.name,
        **_spreads(total.errors),
        "tensors": len(total.errors["sqnr_db"]),
        "each": total.errors["sqnr_db"],
        "codes_used": int((codes > 0).sum()),
        "codes_total": 1 << spec.format.element.bits,
        "code_entropy_bits": max(0.0, float(-(p * np.log2(p)).sum())),
        "element_bits": spec.format.element.bits,
        "scale_exponent_min": low if low < math.inf else math.nan,
        "scale_exponent_max": high if high > -math.inf else math.nan,
        "nbytes": total.nbytes,
        "bits_per_value": spec.bits_per_value,
    }


def _spreads(errors: dict[str, list[float]]) -> dict[str, float]:
    spreads: dict[str, float] = {}
    for name, values in errors.items():
        spread = spread_of(style.MEASURES[name], values)
        low, high = (spread.low, spread.high) if spread.n else (math.nan, math.nan)
        spreads |= {name: spread.value, f"{name}_low": low, f"{name}_high": high}
    return spreads


@dataclass(frozen=True, eq=False)
class ScaleSweep:
    """What `binade scales` computes of a tensor, for each tensor scale 2^k of a format.

    trials   k, ascending, sqnr_db (at most MOST_DB), flush_to_zero and saturated; k = 0 is among them
    present  log2 of the scales of the trials that scale the whole tensor, by their labels
    best     the k with the highest SQNR, and of equal ones the nearest to that of scale=pow2; low, high: the ends of
             the range around it that is within NEAR_DB
    gain     SQNR at the best k minus that at k = 0, dB
    """

    fmt: str
    trials: pd.DataFrame
    present: dict[str, float]
    best: int
    low: int
    high: int
    gain: float


def sweep_scales(cells: scales.Cells, absmax: float, fmt: str, trials: Iterable[Trial]) -> ScaleSweep:
    """Sweep the scales around the one that maps a tensor's absmax to the largest values of a format in SCALED. The
    tensor is finite and not 0."""
    table = scales.by_scale(cells, absmax, fmt)
    table["sqnr_db"] = table["sqnr_db"].clip(upper=MOST_DB)
    sqnr, best = table["sqnr_db"], scales.best_scale(table)
    near = set(sqnr.index[sqnr >= sqnr[best] - NEAR_DB])
    low = next(k for k in itertools.count(best, -1) if k - 1 not in near)
    high = next(k for k in itertools.count(best) if k + 1 not in near)
    largest = torch.tensor(absmax, dtype=torch.float32)
    present = {
        one.label: math.log2(float(one.spec.scaling.of_largest(largest, one.spec, largest)))
        for one in trials
        if one.spec.format.name == fmt and not (one.spec.has_blocks or one.spec.transforms or one.spec.history)
    }
    trials_of = table[["k", *ERRORS]].reset_index(drop=True)
    return ScaleSweep(fmt, trials_of, present, best, low, high, float(sqnr[best] - sqnr[0]))
