"""Tests of stochastic rounding: its bias, the step of its random numbers, and their independence.

All tests together reject a right implementation with a probability of at most ALPHA (Bonferroni over all comparisons).
The bounds hold for every number of draws, without a normal approximation:

    counts      P(|k/n - p| beyond the bound) ≤ 2 exp(-n · KL(k/n ‖ p))              Chernoff
    products    of neighbors at one distance, P(|Σ| ≥ t) ≤ 2 exp(-t² / 2n)           Azuma–Hoeffding
    sums        of a GEMM, P(|Σ| ≥ t) ≤ 2 exp(-t² / 2(V + Mt/3))                     Bernstein

The number of draws is such that a bias of EFFECT of the distance between two codes is found with a probability of at
least POWER, by the normal approximation of the count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from binade.quant.conformance.report import CaseRow
from binade.quant.identification.pair import Pair
from binade.quant.specs import Spec

ALPHA, POWER, EFFECT = 1e-3, 0.95, 0.01
Z_POWER = 1.6449  # the normal quantile of POWER
DISTANCES = tuple(i / 16 for i in range(1, 16))
FINE = tuple(2.0**-k for k in range(5, 11))
CALLS = 4
LINE = 256
GEMM_COLUMNS = 16
NEIGHBORS, ROWS = 16, 16
"""Distances along a row, and numbers of rows, at which draws must be independent."""
COMPARISONS = len(DISTANCES) + len(FINE) + GEMM_COLUMNS + 6
"""How many comparisons share ALPHA; the lags of one correlation share its part."""
LEVEL = ALPHA / COMPARISONS
DRAWS = 1 << math.ceil(math.log2((math.sqrt(2 * math.log(2 / LEVEL)) + Z_POWER) ** 2 / 4 / EFFECT**2))
"""Draws for each distance: 2^17."""


def tests_note() -> str:
    return (
        f"{DRAWS:,} draws for each distance: a bias of {EFFECT:g} of the distance between two codes is found with a "
        f"probability of {POWER:.0%}. A right quantizer fails one of the statistical tests with a probability of at "
        f"most {ALPHA:g}."
    )


def can_be_tested(spec: Spec) -> bool:
    """Whether values can be placed between two codes of a known scale."""
    return not spec.transforms and not spec.scaling.per_element


@dataclass(frozen=True)
class Draws:
    """A quantizer, and matrices whose values have known distances from the codes below them.

    The first value of every 16 is the largest code times the scale, so that the scales are known; it is not drawn.
    """

    call: Callable[..., Tensor]
    spec: Spec
    device: str
    seed: int

    def matrix(self, distance: float | Tensor, lines: int) -> Tensor:
        """[lines, LINE] float32: between the codes 1 and its next, of scale 1 where the spec allows it."""
        element = self.spec.format.element
        low = element.max / 4
        grid = [value for value in element.finite_values if value >= low]
        values = torch.full((lines, LINE), grid[0], dtype=torch.float64) + (grid[1] - grid[0]) * distance
        values[:, ::16] = element.max
        return values.float().to(self.device)

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(lower, upper, share): the neighbors of x by the spec, and how often the upper one is due, float64."""
        pair = Pair.of(x, x, 1)
        lower, upper = (bound.double() for bound in pair.steps(self.spec, pair).bounds)
        return lower, upper, torch.where(upper > lower, (x.double() - lower) / (upper - lower), 0.0).clamp(0, 1)

    def ups(self, distance: float, lines: int, seed: int) -> tuple[Tensor, float]:
        """(bool [draws], share): whether values at a distance were rounded up, in order; how often they should be."""
        x = self.matrix(distance, lines)
        _, upper, share = self.ends(x)
        drawn = torch.ones(LINE, dtype=torch.bool, device=x.device)
        drawn[::16] = False
        y = self.call(x, seed=seed).double()
        return (y == upper)[:, drawn].reshape(-1), float(share[0, 1])

    @cached_property
    def coins(self) -> list[Tensor]:
        """Of CALLS calls with seeds in a row: whether values in the middle were rounded up, ±1 float64."""
        lines = DRAWS // LINE
        return [self.ups(0.5, lines, self.seed + call)[0].double() * 2 - 1 for call in range(CALLS)]


def statistical_rows(draws: Draws) -> dict[str, Callable[[], CaseRow]]:
    """The tests by name, not computed yet."""
    rows: dict[str, Callable[[], CaseRow]] = {
        f"unbiased at {int(16 * distance)}/16": lambda distance=distance: _unbiased(draws, distance)  # type: ignore[misc]
        for distance in DISTANCES
    }
    return rows | {
        "step of the random numbers": lambda: _step(draws),
        "independent of neighbors and rows": lambda: _near(draws),
        "calls and seeds are independent": lambda: _together(draws),
        "random numbers do not repeat": lambda: _repeats(draws),
        "a GEMM is unbiased": lambda: _gemm(draws),
    }


def divergence(share: float, p: float) -> float:
    """KL(share ‖ p) of two coins, in nats."""
    parts = ((share, p), (1 - share, 1 - p))
    return sum(a * math.log(a / b) if b else math.inf for a, b in parts if a)


def is_unlikely(count: int, total: int, p: float, level: float = LEVEL) -> bool:
    """Whether `count` of `total` draws of probability p is beyond the bound."""
    return 2 * math.exp(-total * divergence(count / total, p)) < level


def _unbiased(draws: Draws, distance: float) -> CaseRow:
    up, share = draws.ups(distance, -(-DRAWS // LINE), draws.seed)
    count = int(up.sum())
    detail = f"rounded up in {count / up.numel():.4f} of {up.numel():,} draws, expected {share:.4f}"
    return CaseRow(
        f"unbiased at {int(16 * distance)}/16", not is_unlikely(count, up.numel(), share), up.numel(), None, detail
    )


def _step(draws: Draws) -> CaseRow:
    """Small distances: random numbers of few bits round them up too rarely or too often."""
    failed, total = [], 0
    for distance in FINE:
        up, share = draws.ups(distance, -(-DRAWS // LINE), draws.seed + 1)
        total += up.numel()
        if is_unlikely(int(up.sum()), up.numel(), share):
            failed.append(f"at {distance:g} rounded up in {float(up.double().mean()):.5f}, expected {share:.5f}")
    detail = failed[0] if failed else f"right down to {FINE[-1]:g} of the distance between two codes"
    return CaseRow("step of the random numbers", not failed, total, None, detail)


def _correlations(a: Tensor, b: Tensor) -> Tensor:
    """Σ a[i] b[i+k] for each lag k from 0 to n-1, by FFT."""
    size = 2 * len(a)
    sums: Tensor = torch.fft.irfft(torch.fft.rfft(a, size).conj() * torch.fft.rfft(b, size), size)
    return sums[: len(a)]


def _bound(terms: Tensor | int, comparisons: int) -> Tensor:
    """The sum of so many products of independent ±1 that LEVEL, shared by so many comparisons, allows."""
    return (2 * torch.as_tensor(terms, dtype=torch.float64) * math.log(2 * comparisons / LEVEL)).sqrt()


def _near(draws: Draws) -> CaseRow:
    """Within a call: neighbors and rows."""
    name, coins = "independent of neighbors and rows", draws.coins[0]
    per_line = LINE - LINE // 16
    lags = {lag: f"{lag} apart" for lag in range(1, NEIGHBORS + 1)}
    lags |= {rows * per_line: f"{rows} rows apart" for rows in range(1, ROWS + 1)}
    for lag, words in lags.items():
        terms = len(coins) - lag
        total = (coins[:-lag] * coins[lag:]).sum()
        if total.abs() > _bound(terms, len(lags)):
            detail = f"draws that are {words} agree in {float(1 + total / terms) / 2:.3f}, expected 0.5"
            return CaseRow(name, False, len(coins), None, detail)
    return CaseRow(name, True, len(coins), None, f"up to {NEIGHBORS} apart, and up to {ROWS} rows")


def _together(draws: Draws) -> CaseRow:
    """Between calls at equal places."""
    name, coins = "calls and seeds are independent", draws.coins
    count = len(coins[0])
    pairs = [(i, j) for i in range(CALLS) for j in range(i)]
    for later, earlier in pairs:
        total = (coins[earlier] * coins[later]).sum()
        if total.abs() > _bound(count, len(pairs)):
            same = float(1 + total / count) / 2
            detail = f"calls {earlier + 1} and {later + 1} agree in {same:.3f}, expected 0.5"
            return CaseRow(name, False, count * CALLS, None, detail)
    return CaseRow(name, True, count * CALLS, None, f"{CALLS} calls")


def _repeats(draws: Draws) -> CaseRow:
    """Within a call and between calls, at every distance: random numbers that come again."""
    name, coins = "random numbers do not repeat", draws.coins
    count = len(coins[0])
    terms = count - torch.arange(count, dtype=torch.float64, device=coins[0].device)
    pairs = [(0, 0), *((i, j) for i in range(CALLS) for j in range(CALLS) if i != j)]
    limit = _bound(terms, len(pairs) * count)
    for first, second in pairs:
        lags = (_correlations(coins[first], coins[second]).abs() > limit).nonzero().reshape(-1)
        lags = lags[lags > 0]
        if len(lags):
            where = "itself" if first == second else f"call {second + 1}"
            detail = f"call {first + 1} repeats {where} {int(lags[0])} draws later"
            return CaseRow(name, False, count * CALLS, len(lags), detail)
    return CaseRow(name, True, count * CALLS, None, f"at {count:,} distances, within a call and between {CALLS}")


def _gemm(draws: Draws) -> CaseRow:
    """The error of y · w, for random places between codes and fixed w, summed over lines."""
    generator = torch.Generator().manual_seed(draws.seed)
    lines = 1024
    x = draws.matrix(torch.rand(lines, LINE, generator=generator, dtype=torch.float64), lines)
    lower, upper, share = draws.ends(x)
    w = torch.randn(LINE, GEMM_COLUMNS, generator=generator, dtype=torch.float64).to(x.device)
    y = draws.call(x, seed=draws.seed + CALLS).double()
    due = lower + (upper - lower) * share
    total = ((y - due) @ w).sum(0)  # [GEMM_COLUMNS]
    variance = ((upper - lower).square() * share * (1 - share)).sum(0) @ w.square()
    most = ((upper - lower).amax(0)[:, None] * w.abs()).amax(0)
    log = math.log(2 / LEVEL)
    bound = most * log / 3 + ((most * log / 3).square() + 2 * variance * log).sqrt()
    worst = int((total.abs() / bound).argmax())
    passed = bool((total.abs() <= bound).all())
    detail = f"error {float(total[worst]):.4g} of column {worst}, bound {float(bound[worst]):.4g}"
    return CaseRow("a GEMM is unbiased", passed, y.numel(), None, detail)
