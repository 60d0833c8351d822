"""How often sentences that infer name something in cases where there is nothing, and how often they find what is
planted: the table of calibration in docs/comparing.md. Synthetic losses and series, no training; about four minutes.

    python -m tests.bench.bench_null [--cases 200]
"""

from __future__ import annotations

import argparse

from tests.data.null_cases import (
    leaves,
    misses_effect,
    names_gap,
    names_largest,
    names_slope,
    names_trend,
    power,
    share,
)

DEVIATIONS = (0.0, 0.004, 0.008, 0.015)
AUTOCORRELATIONS = (0.0, 0.5, 0.8, 0.9)
SEQUENCES = (4, 8, 16, 32)
OF_GAPS = (0.0, 0.5, 0.9, 1.0)  # of successive gaps; 1: a random walk


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=200)
    cases = parser.parse_args().cases
    rows: list[tuple[str, str, list[float]]] = []
    for seeds in (1, 3, 6):
        for what, names in (("gap", names_gap), ("slope per doubling", names_slope)):
            found = [share(cases, names, seeds, deviation) for deviation in DEVIATIONS]
            rows.append((f"held-out {what}, {seeds} seeds", f"deviation {DEVIATIONS}", found))
    for points in (8, 12, 40):
        found = [share(cases, names_trend, points, phi) for phi in AUTOCORRELATIONS]
        rows.append((f"trend of 6 layers, {points} iterations", f"autocorrelation {AUTOCORRELATIONS}", found))
        for fall in (4, 8, 16):
            found = [share(cases, names_trend, points, phi, fall, 1) for phi in AUTOCORRELATIONS]
            rows.append((f"found: a fall by {fall} deviations, {points} iterations", "the same", found))
    for seeds, pairs in ((1, 1), (3, 3), (5, 2), (5, 5)):
        what = f"{seeds} seeds of 5 recipes, {pairs} bf16 runs repeated"
        found = [share(cases, leaves, seeds, pairs, phi) for phi in OF_GAPS]
        rows.append((f"leaves bf16, {what}", f"autocorrelation {OF_GAPS}", found))
        for gap in (0.02, 0.05, 0.1):
            found = [share(cases, leaves, seeds, pairs, phi, gap) for phi in OF_GAPS]
            rows.append((f"found: a gap of {gap / 0.01:g} deviations, {what}", "the same", found))
    for skewed in (False, True):
        of = "skewed" if skewed else "normal"
        found = [share(cases, misses_effect, sequences, skewed) for sequences in SEQUENCES]
        rows.append((f"the interval of an effect misses it, {of} noise", f"sequences {SEQUENCES}", found))
        for groups in (2, 8):
            found = [share(cases, names_largest, groups, sequences, 0.0, skewed) for sequences in SEQUENCES]
            rows.append((f"largest effect of {groups} alike, {of} noise", f"sequences {SEQUENCES}", found))
    for groups in (2, 8):
        for gap in (1.0, 2.0):
            found = [share(cases, names_largest, groups, sequences, gap) for sequences in SEQUENCES]
            rows.append((f"found: the largest of {groups} by {gap:g} deviations", f"sequences {SEQUENCES}", found))
            expected = [round(power(groups, sequences, gap), 1) for sequences in SEQUENCES]
            rows.append(("the power of these tests, by scipy", "the same", expected))
    for sentence, over, found in rows:
        print(f"{sentence:<72} {over:<42} {', '.join(f'{value:g}' for value in found)}")


if __name__ == "__main__":
    main()
