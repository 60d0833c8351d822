"""Q–Q plots: quantiles of the nonzero values against those of a law, in units in which the quartiles of both agree, or
against the same tensors in another run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy import stats

from binade.app.questions.shared.distributions import Distribution, quantiles
from binade.app.questions.shared.laws import Fit, fit, nonzero
from binade.data.evidence import SHARE

POINTS = 201
BODY = (0.05, 0.95)  # quantiles between which a Q–Q plot shows the body of a distribution
WITHIN = 99.9  # percent of the points of a Q–Q plot that its axis shows
ROOM = 8  # times what the group with the lightest tails needs, which otherwise could not be told from a line


@dataclass(frozen=True)
class QQ:
    """points: columns group, theoretical, sample; limit: the largest magnitude of `sample` that the axis shows;
    beyond: of each group, (values above limit, values below −limit); sentences: on body and tails."""

    points: pd.DataFrame
    limit: float = 0.0
    beyond: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sentences: tuple[str, ...] = ()


def standardized(d: Distribution, quartiles: np.ndarray) -> tuple[float, float] | None:
    """(location, scale) for which the quartiles of the values agree with these; None if the values' are equal."""
    first, third = quantiles(d, np.array([0.25, 0.75]))
    if not third > first:
        return None
    scale = (third - first) / (quartiles[1] - quartiles[0])
    return float(first - scale * quartiles[0]), float(scale)


def standard_quantiles(fitted: Fit, share: np.ndarray) -> np.ndarray:
    """The quantiles of a law at location 0 and scale 1."""
    lower = np.minimum(share, 1 - share)
    return np.asarray(np.where(share < 0.5, -1.0, 1.0) * fitted.tail(lower))


def against_law(distributions: list[Distribution], law: str) -> QQ:
    """Quantiles of the nonzero values against those of a law, in units in which the quartiles of both agree, so that a
    distribution of this law lies on the line y = x however heavy its tails are."""
    tables, sentences, standard = [], [], []
    for every in distributions:
        d = nonzero(every)
        zeros = 1 - d.total / every.total if every.total else 0.0
        fitted = fit(d, law) if d.total and d.std > 0 else None
        if fitted is None:
            sentences.append(f"{d.group}: all values are equal.")
            continue
        end = 0.5 / d.total
        share = _shares(end, law)
        theoretical = standard_quantiles(fitted, share)
        place = standardized(d, standard_quantiles(fitted, np.array([0.25, 0.75])))
        if place is None:
            sentences.append(f"{d.group}: half of the values are equal, so there is no line through the quartiles.")
            continue
        sample = (quantiles(d, share) - place[0]) / place[1]
        tables.append(pd.DataFrame({"group": d.group, "theoretical": theoretical, "sample": sample, "share": share}))
        standard.append((d, place))
        sentences.append(_body_and_tails(d, theoretical, sample, share, zeros, fitted))
    return _limited(tables, standard, sentences)


def against_other(distributions: list[Distribution], others: Mapping[str, Distribution], name: str) -> QQ:
    """Quantiles of the nonzero values against those of the same tensors in another run, in the units of the values."""
    tables, sentences, standard = [], [], []
    for d in distributions:
        values = nonzero(d)
        other = nonzero(others[d.group]) if d.group in others else None
        if other is None or not values.inner.any() or not other.inner.any():  # all zeros, or nothing
            sentences.append(f"{d.group}: {name} has no such tensor.")
            continue
        share = _shares(0.5 / min(values.total, other.total), "normal")
        table = {"group": d.group, "theoretical": quantiles(other, share), "sample": quantiles(values, share)}
        tables.append(pd.DataFrame({**table, "share": share}))
        standard.append((values, (0.0, 1.0)))
    return _limited(tables, standard, sentences)


def _shares(end: float, law: str) -> np.ndarray:
    end = min(end, 0.4)
    if law == "uniform":
        return np.linspace(end, 1 - end, POINTS)
    return np.asarray(stats.norm.cdf(np.linspace(-stats.norm.isf(end), stats.norm.isf(end), POINTS)))


def _limited(
    tables: list[pd.DataFrame], standard: list[tuple[Distribution, tuple[float, float]]], sentences: list[str]
) -> QQ:
    if not tables:
        return QQ(pd.DataFrame(columns=["group", "theoretical", "sample", "share"]), 0.0, {}, tuple(sentences))
    points = pd.concat(tables, ignore_index=True)
    least = float(points["theoretical"].abs().max())
    ends = []
    for d, (location, scale) in standard:
        tails = quantiles(d, np.array([(1 - WITHIN / 100) / 2, (1 + WITHIN / 100) / 2]))
        ends.append(float(np.abs((tails - location) / scale).max()))
    limit = max(least, min(max(ends), ROOM * min(ends)))
    beyond = {}
    for d, (location, scale) in standard:
        middle = ((d.low + d.high) / 2 - location) / scale
        above, below = (round(float(d.count[outside].sum())) for outside in (middle > limit, middle < -limit))
        beyond[d.group] = above, below
    return QQ(points, limit, beyond, tuple(sentences))


def _body_and_tails(
    d: Distribution, theoretical: np.ndarray, sample: np.ndarray, share: np.ndarray, zeros: float, fitted: Fit
) -> str:
    """Where the points lie: those between the 5th and the 95th percentile, and the outermost ones. These are compared
    with the largest magnitude among as many independent values of the law: P(all of n within r) = (1 - s)^n ≈ exp(-ns)
    for a share s outside, so that 99% of such maxima lie where s is from -ln(0.995) / n to -ln(0.005) / n."""
    body = (share >= BODY[0]) & (share <= BODY[1])
    off = float(np.abs(sample - theoretical)[body].max())
    reach = float(np.abs(sample).max())
    outside = np.array([-math.log(0.005), -math.log(0.995)]) / d.total / 2  # on each side
    low, high = fitted.tail(np.minimum(outside, 0.4))
    tails = "heavier" if reach > high else "lighter" if reach < low else "as long"
    left = (
        f" {SHARE.quantity(zeros)} zeros are left out." if zeros >= 0.0005 else " Zeros are left out." if zeros else ""
    )
    freedom = f" ({fitted.text.split(',')[0]})" if fitted.freedom is not None else ""
    return (
        f"{d.group}{freedom}: 5th to 95th percentile within {off:.2g} of the line; tails {tails}: the largest value is "
        f"at {reach:.3g}, of as many values of the law at {low:.3g} to {high:.3g}.{left}"
    )
