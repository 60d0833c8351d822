"""Estimates with their uncertainty, and the sentences that may be made from them.

An Estimate says what was estimated, from how many of what, how, and how far to trust it. What was measured whole, such
as the tensors of all layers, is described: its value, its range and its ends, without a test. What was sampled is
compared: what samples cannot tell apart, a sentence calls not distinguishable.

| data | estimate | interval |
|---|---|---|
| one tensor | its value | none: exact |
| several tensors | median of their own values, each counted once | 10th to 90th percentile: a spread, without error |
| seeds | mean | Student's t, 95%; one seed has none |
| two runs that differ by chance | 0: their difference | 95% of such differences, Student's t |
| values of a sample | share | Wilson's, 95% |
| sequences, micro-batches, passes | mean or total | from the standard error over them, Student's t, 95% |
| iterations | Theil–Sen slope | none; its p-value is that of Kendall's τ among autocorrelated values |
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from binade.data.compare.student import noncentrality, quantile
from binade.data.words.fields import Field

Measure = Field
LEVEL = 0.05  # the share of sentences that may name a difference where there is none
FEWEST = 5  # points of a trend
NAMED = 4  # things that a sentence names
EQUAL = 0.01  # relative difference of two exact values that are called equal


GAP = Measure("gap", "Gap", "nats", "loss minus that of the reference run, in nats per token", "+.4f")
SHARE = Measure("share", "Share", "%")
NO_INTERVAL = ": no interval"


@dataclass(frozen=True)
class Estimate:
    """A value and what the data say about it.

    value, low, high  the value, and its interval; equal if it is exact, infinite if one value has no interval
    n, of             how many of what it is from: 3, "seeds"
    how               in words, as in the module's table
    error             standard error; 0 if exact, NaN if unknown
    p                 p-value of the hypothesis that it is 0; NaN if there is none
    degrees           degrees of freedom of the error, infinite for a normal distribution
    """

    measure: Measure
    value: float
    low: float
    high: float
    n: int = 1
    of: str = "tensors"
    how: str = "exact"
    error: float = 0.0
    p: float = math.nan
    degrees: float = math.inf

    @property
    def is_spread(self) -> bool:
        return self.how == "median"

    @property
    def is_whole(self) -> bool:
        """Whether all of it was measured, so that it is known without error."""
        return self.how == "exact" or self.is_spread

    @property
    def text(self) -> str:
        """The value with its unit."""
        return self.measure.quantity(self.value)

    @property
    def interval(self) -> str:
        """What follows the value in parentheses; "" if it is exact."""
        if self.how == "exact" or not self.n:
            return ""
        counted = f"{self.n:,} {self.of if self.n != 1 else _one(self.of)}"
        if not math.isfinite(self.high - self.low):
            return f"{counted}{NO_INTERVAL}"
        ends = f"{self.measure.text(self.low)} to {self.measure.text(self.high)}"
        if self.is_spread:
            return f"10th to 90th percentile {ends}, {counted}"
        return f"95% interval {ends}, {counted}"

    def __str__(self) -> str:
        return f"{self.text} ({self.interval})" if self.interval else self.text

    def detectable(self, comparisons: int = 1) -> float:
        """The smallest difference from 0 that a t-test at LEVEL over so many comparisons (Bonferroni) finds in four of
        five experiments, if the standard error is the true one."""
        return noncentrality(self.degrees, LEVEL / comparisons) * self.error

    def minus(self, other: Estimate) -> Estimate:
        """The difference of two independent estimates, with the degrees of freedom of Welch."""
        error = math.hypot(self.error, other.error)
        parts = [
            (estimate.error**4 / estimate.degrees) if estimate.error and math.isfinite(estimate.degrees) else 0.0
            for estimate in (self, other)
        ]
        degrees = error**4 / sum(parts) if sum(parts) and math.isfinite(error) else math.inf
        n = min(self.n, other.n)
        signed = self.measure.with_sign()
        return _estimate(signed, self.value - other.value, error, n, self.of, "difference", degrees)

    def is_larger(self, other: Estimate, comparisons: int = 1) -> bool:
        """Whether it is larger by more than the measure's resolution and, unless both were measured whole, by more than
        chance, at LEVEL over so many comparisons."""
        if not (math.isfinite(self.value) and math.isfinite(other.value)):
            return self.value > other.value
        change = self.minus(other)
        if self.is_whole and other.is_whole:
            return change.value > (self.measure.resolution or EQUAL * max(abs(self.value), abs(other.value)))
        if change.value <= self.measure.resolution or math.isnan(change.error):
            return False
        return change.error == 0 or change.p <= LEVEL / comparisons


def _one(of: str) -> str:
    one = {"micro-batches": "micro-batch", "passes": "pass", "pairs of passes": "pair of passes"}
    return one.get(of, of.removesuffix("s"))


def _estimate(
    measure: Measure, value: float, error: float, n: int, of: str, how: str, degrees: float = math.inf
) -> Estimate:
    """An estimate with the 95% interval of its standard error."""
    if math.isnan(error) or math.isnan(value):
        return Estimate(measure, value, -math.inf, math.inf, n, of, how, math.nan, math.nan, degrees)
    from scipy.stats import t

    margin = quantile(degrees) * error if error else 0.0
    p = float(2 * t.sf(abs(value) / error, degrees)) if error else float(value == 0)
    return Estimate(measure, value, value - margin, value + margin, n, of, how, error, p, degrees)


def exact(measure: Measure, value: float) -> Estimate:
    """A value that is known exactly: of one tensor, or a count's share."""
    return Estimate(measure, float(value), float(value), float(value), 1, "tensors")


def spread(measure: Measure, row: Mapping[Any, Any], of: str = "tensors") -> Estimate:
    """The tensors of a group: median, 10th and 90th percentile of their own values, from a row with `value`, `low`,
    `high` and `tensors` (or the column that `of` names)."""
    n = int(row.get(of, row.get("tensors", 1)))
    low, high = float(row["low"]), float(row["high"])
    if n == 1:
        return exact(measure, float(row["value"]))
    return Estimate(measure, float(row["value"]), low, high, n, of, "median")


def spread_of(measure: Measure, values: Iterable[float], of: str = "tensors") -> Estimate:
    """`spread` of the tensors' own values; without those that are NaN."""
    import numpy as np

    known = sorted(float(value) for value in values if not math.isnan(float(value)))
    if not known:
        return Estimate(measure, math.nan, -math.inf, math.inf, 0, of, "median", math.nan)
    low, high = (float(np.quantile(known, q, method="nearest")) for q in (0.1, 0.9))
    middle = known[len(known) // 2] if math.isinf(known[len(known) // 2]) else statistics.median(known)
    return spread(measure, {"value": middle, "low": low, "high": high, "tensors": len(known)}, of)


def mean(measure: Measure, values: Iterable[float], of: str = "seeds") -> Estimate:
    """The mean of independent values, with Student's interval; of one value, there is none."""
    given = [float(value) for value in values]
    n = len(given)
    if not n:
        return Estimate(measure, math.nan, -math.inf, math.inf, 0, of, "mean", math.nan)
    if not all(map(math.isfinite, given)):
        return Estimate(measure, math.nan, -math.inf, math.inf, n, of, "mean", math.nan)
    error = statistics.stdev(given) / math.sqrt(n) if n > 1 else math.nan
    return _estimate(measure, statistics.fmean(given), error, n, of, "mean", max(n - 1, 1))


def paired(measure: Measure, values: Mapping[Any, float], other: Mapping[Any, float], of: str = "seeds") -> Estimate:
    """The mean difference over the keys (seeds) that both have."""
    return mean(measure, (values[key] - other[key] for key in values if key in other), of)


def with_error(measure: Measure, value: float, error: float, n: int, of: str) -> Estimate:
    """A value with a known standard error over n of something; NaN error: unknown."""
    return _estimate(measure, float(value), float(error), n, of, "mean", max(n - 1, 1))


def between_two(measure: Measure, deviation: float, degrees: int, n: int, of: str) -> Estimate:
    """The difference of two further values that only chance sets apart: 0, with the interval that holds 95% of such
    differences. deviation: the standard deviation of n values, with these degrees of freedom; NaN if unknown."""
    return _estimate(measure, 0.0, math.sqrt(2) * deviation, n, of, "difference of two", degrees)


def between_alike(measure: Measure, groups: Iterable[Sequence[float]], of: str) -> Estimate | None:
    """`between_two` from the deviations within groups of values that only chance sets apart, pooled; None if no group
    has two values."""
    several = [group for group in groups if len(group) > 1]
    if not several:
        return None
    degrees = sum(len(group) - 1 for group in several)
    deviation = math.sqrt(sum(statistics.variance(group) * (len(group) - 1) for group in several) / degrees)
    return between_two(measure, deviation, degrees, degrees + len(several), of)


def trend(measure: Measure, at: Iterable[float], values: Iterable[float], of: str) -> Estimate:
    """The Theil–Sen slope of values over `at`. NaN for fewer than FEWEST finite points.

    Its p-value is that of data.compare.trends, which knows that successive values depend on each other."""
    from scipy.stats import theilslopes

    from binade.data.compare.trends import p_of_trend

    points = sorted(
        (float(x), float(y)) for x, y in zip(at, values, strict=True) if y is not None and math.isfinite(float(y))
    )
    per = replace(measure, unit=f"{measure.unit} per {_one(of)}".strip(), format="+.3g", resolution=0.0)
    if len(points) < FEWEST or len({x for x, _ in points}) < FEWEST:
        return Estimate(per, math.nan, -math.inf, math.inf, len(points), of, "slope", math.nan)
    x, y = zip(*points, strict=True)
    slope = float(theilslopes(y, x)[0])
    return Estimate(per, slope, -math.inf, math.inf, len(points), of, "slope", math.nan, p_of_trend(y))


def holm(estimates: Sequence[Estimate]) -> list[bool]:
    """Which estimates differ from 0 at LEVEL, all together (Holm 1979). One without a p-value does not."""
    order = sorted(range(len(estimates)), key=lambda index: (math.isnan(estimates[index].p), estimates[index].p))
    tests = sum(not math.isnan(estimate.p) for estimate in estimates)
    apart = [False] * len(estimates)
    for place, index in enumerate(order[:tests]):
        if estimates[index].p > LEVEL / (tests - place):
            break
        apart[index] = True
    return apart


class Sentence(str):
    """A text with the estimates that it is made from. headline: its first sentence; the others add to it."""

    evidence: tuple[Estimate, ...]
    headline: str

    def __new__(cls, text: str = "", evidence: Iterable[Estimate] = (), headline: str = "") -> Sentence:
        made = super().__new__(cls, text)
        made.evidence, made.headline = tuple(evidence), headline or text
        return made

    @property
    def rest(self) -> str:
        return self[len(self.headline) :].strip()


Part = Estimate | str | int


def say(template: str, /, **parts: Part) -> Sentence:
    """A sentence from a template such as "{place} has an SQNR of {sqnr}". A part is a name, a count, an Estimate, or
    a Sentence, whose evidence is kept; "{sqnr.text}" leaves an interval out.

    Raises TypeError for another number: it would have no evidence.
    """
    for name, part in parts.items():
        if not isinstance(part, (Estimate, str, int)):
            raise TypeError(f"{name}={part!r} is a bare number: a sentence takes an Estimate, a count or a name")
    shown = {name: f"{part:,}" if isinstance(part, int) else part for name, part in parts.items()}
    found: list[Estimate] = []
    for part in parts.values():
        found += [part] if isinstance(part, Estimate) else part.evidence if isinstance(part, Sentence) else ()
    return Sentence(template.format(**shown), found)


def together(*sentences: str) -> Sentence:
    """Sentences one after the other; empty ones are left out."""
    given = [sentence if isinstance(sentence, Sentence) else Sentence(sentence) for sentence in sentences if sentence]
    headline = given[0].headline if given else ""
    return Sentence(" ".join(given), (e for sentence in given for e in sentence.evidence), headline)


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """ "a, b and c"; "a, b, c and 14 more"."""
    shown = [*names[: most - 1], f"{len(names) - most + 1} more"] if len(names) > most else list(names)
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else ""


Named = tuple[str, Estimate]


def several(items: Sequence[Named], text: Callable[[Estimate], str] = str) -> str:
    """ "forward 30.1 dB; backward 14.0 dB". Of more than NAMED, those furthest from 0, and how many more."""
    shown = items if len(items) <= NAMED else sorted(items, key=lambda item: -abs(item[1].value))[:NAMED]
    more = f"; and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return "; ".join(f"{name} {text(estimate)}" for name, estimate in shown) + more


def each_of(items: Sequence[Named], what: str) -> Sentence:
    """ "SQNR in mxfp4: forward 30.1 dB; backward 14.0 dB." No comparison. If all are of as much data, from which no
    interval follows, it is said once: "mxfp4 +0.1 nats; mxfp8 +0.2 nats (1 seed each: no interval)"."""
    if not items:
        return Sentence()
    intervals = {estimate.interval for _, estimate in items}
    shown, interval = several(items), intervals.pop()
    if len(items) > 1 and not intervals and interval.endswith(NO_INTERVAL):
        count = interval.removesuffix(NO_INTERVAL)
        shown = f"{several(items, lambda estimate: estimate.text)} ({count} each{NO_INTERVAL})"
    return Sentence(f"{what}: {shown}.", (estimate for _, estimate in items))


def leaders(items: Sequence[Named], *, lowest: bool) -> list[Named]:
    """The item with the lowest or highest estimate, and those that cannot be told from it, in order. As the data choose
    the item, each comparison is corrected for all pairs (Bonferroni)."""
    known = [item for item in items if not math.isnan(item[1].value)]
    ordered = sorted(known, key=lambda item: item[1].value, reverse=not lowest)
    if not ordered:
        return []
    first, comparisons = ordered[0][1], max(len(ordered) * (len(ordered) - 1) // 2, 1)

    def apart(other: Estimate) -> bool:
        pair = (other, first) if lowest else (first, other)
        return pair[0].is_larger(pair[1], comparisons)

    return [item for item in ordered if not apart(item[1])]


def extreme(items: Sequence[Named], what: str, *, lowest: bool) -> Sentence:
    """ "Lowest SQNR in mxfp4: L1 fc1 input, 16.9 dB; highest: L2 fc2 input, 20.1 dB." What cannot be told from the
    extreme, or was measured whole and is equal to it, is named with it; if that is everything, or there is only one
    item, no extreme is named. The other end is named if all were measured whole. what: "SQNR in mxfp4"."""
    items = [item for item in items if not math.isnan(item[1].value)]
    first = leaders(items, lowest=lowest)
    if not first:
        return Sentence()
    title = f"{what[:1].upper()}{what[1:]}"
    if len(items) == 1:
        return each_of(items, title)
    whole = all(estimate.is_whole for _, estimate in items)
    names, ends = listed([name for name, _ in first]), _ends(first)
    if len(first) == len(items):
        return Sentence(f"{title}: {names}{'' if whole else ' cannot be told apart'}, {ends}.", ends.evidence)
    word, other = ("Lowest", "highest") if lowest else ("Highest", "lowest")
    alike = ", which cannot be told apart" if len(first) > 1 and not whole else ""
    text = f"{word} {what}: {names}{alike}, {ends}"
    if not whole:
        return Sentence(f"{text}.", ends.evidence)
    last = leaders(items, lowest=not lowest)
    text += f"; {other}: {listed([name for name, _ in last])}, {_ends(last)}."
    return Sentence(text, (*ends.evidence, *_ends(last).evidence))


def _ends(items: Sequence[Named]) -> Sentence:
    """The estimate of one item, or the ends of several."""
    if len(items) == 1:
        return Sentence(str(items[0][1]), (items[0][1],))
    low, high = (edge((estimate for _, estimate in items), key=lambda estimate: estimate.value) for edge in (min, max))
    return Sentence(low.text if low.text == high.text else f"{low.measure.text(low.value)} to {high.text}", (low, high))


def effects(items: Sequence[Named], than: str, words: tuple[str, str] = ("higher", "lower")) -> Sentence:
    """Which estimates of a difference to `than` are distinguishable from 0, all together at LEVEL (Holm), and which are
    not. words: for positive and negative ones, "higher" and "lower" loss."""
    if not items:
        return Sentence()
    apart = holm([estimate for _, estimate in items])
    sentences: list[str] = []
    for word, sign in zip(words, (1, -1), strict=True):
        selection = [
            (name, estimate)
            for (name, estimate), is_apart in zip(items, apart, strict=True)
            if is_apart and estimate.value * sign > 0
        ]
        selection.sort(key=lambda item: -abs(item[1].value))
        if selection:
            text = f"{word.capitalize()} than {than}: {several(selection)}."
            sentences.append(Sentence(text, (estimate for _, estimate in selection)))
    alike = [item for item, is_apart in zip(items, apart, strict=True) if not is_apart]
    if lost := [name for name, estimate in alike if math.isnan(estimate.value)]:
        sentences.append(say("Compared with {than}, a loss is NaN or Inf: {names}.", than=than, names=listed(lost)))
    single = [item for item in alike if math.isnan(item[1].error) and not math.isnan(item[1].value)]
    sampled = [item for item in alike if not math.isnan(item[1].error)]
    if single:
        shown = several(single, lambda estimate: estimate.text)
        text = f"One {_one(single[0][1].of)} cannot tell these from {than}: {shown}."
        sentences.append(Sentence(text, (estimate for _, estimate in single)))
    if sampled:
        least = max((estimate for _, estimate in sampled), key=lambda estimate: estimate.detectable(len(items)))
        shows = least.detectable(len(items))
        smallest = least.measure.with_sign(False).quantity(shows)
        names = listed([name for name, _ in sorted(sampled, key=lambda item: -abs(item[1].value))])
        sentences.append(
            Sentence(
                f"Not distinguishable from {than}: {names} ({least.n:,} {least.of}; a difference of {smallest} would "
                "probably have shown).",
                [replace(least, value=shows), *(estimate for _, estimate in sampled)],
            )
        )
    return together(*sentences)


def largest(items: Mapping[str, Mapping[Any, float]], measure: Measure, what: str, of: str = "seeds") -> Sentence:
    """Which of several has the largest mean, if its paired differences to all others can be told from 0 (Holm). items:
    the values of each by seed. what: "The largest gap"."""
    means = [(name, mean(measure, values.values(), of)) for name, values in items.items()]
    means.sort(key=lambda item: -item[1].value)
    (first, top), *rest = means
    apart = holm([paired(measure, items[first], items[name], of) for name, _ in rest])
    if all(apart):
        text = f"{what} is that of {first}, {top}; {several(rest, lambda estimate: estimate.text)}."
        return Sentence(text, (estimate for _, estimate in means))
    alike = [first, *(name for (name, _), is_apart in zip(rest, apart, strict=True) if not is_apart)]
    text = "{what} cannot be named: {n} {of} do not tell {names} apart."
    return say(text, what=what, n=top.n, of=of, names=listed(alike))


def trends(items: Sequence[Named], what: str, over: str, of: str = "tensors") -> Sentence:
    """Which slopes are distinguishable from 0, all together at LEVEL (Holm). what: "SQNR in mxfp4"; over: "with depth";
    of: what the items are."""
    known = [item for item in items if not math.isnan(item[1].value)]
    if not known:
        points = max((estimate for _, estimate in items), key=lambda estimate: estimate.n, default=None)
        if points is None:
            return Sentence()
        return say(
            "{n} {of} cannot show a trend {over}: at least {fewest} are needed.",
            n=points.n,
            of=points.of if points.n != 1 else _one(points.of),
            over=over,
            fewest=FEWEST,
        )
    apart = [item for item, is_apart in zip(known, holm([estimate for _, estimate in known]), strict=True) if is_apart]
    if not apart:
        text = "{what} has no trend {over} that can be told from chance, in any of {n} {of}."
        return say(text, what=what, over=over, n=len(known), of=of)
    sentences = []
    for word, sign in (("falls", -1), ("rises", 1)):
        if part := [item for item in apart if item[1].value * sign > 0]:
            name, steepest = max(part, key=lambda item: abs(item[1].value))
            text = "{what} {word} {over} in {count} of {n} {of}; steepest: {name}, {slope}."
            parts = {"what": what, "word": word, "over": over, "of": of, "name": name}
            sentences.append(say(text, count=len(part), n=len(known), slope=steepest, **parts))
    if rest := len(known) - len(apart):
        sentences.append(say("In the other {rest}, no trend can be told from chance.", rest=rest))
    return together(*sentences)
