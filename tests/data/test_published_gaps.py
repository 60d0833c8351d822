"""Published gaps: the file's schema, and figures that can be computed from losses in print."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from binade.data import evidence
from binade.data.evidence import GAP
from binade.data.published_gaps import FigureOrigin, parsed, published_for, published_gaps

# The 80 final validation losses of modded-nanogpt, records/track_1_short/2025-01-04_SoftCap/README.md, in 1e-4 nats
# above 3.27.
LOSSES = 3.27 + 1e-4 * np.array([
    98, 104, 137, 108, 82, 101, 130, 125, 77, 69, 134, 132, 53, 109, 78, 101, 99, 104, 65, 92, 86, 92, 101, 62, 103, 84,
    92, 91, 69, 90, 84, 75, 130, 85, 53, 105, 66, 66, 81, 119, 54, 127, 103, 84, 102, 94, 65, 80, 82, 80, 116, 90, 71,
    91, 68, 81, 94, 98, 85, 104, 77, 65, 96, 80, 103, 93, 93, 88, 97, 80, 99, 113, 103, 68, 103, 96, 100, 96, 83, 80,
])  # fmt: skip
ENTRY = """
[[gap]]
model = "a model"
format = "mxfp8"
recipe = "a recipe"
training = "1B tokens"
gap = 0.004
sd = 0.003
n = 77
of = "logged steps"
read = "computed"
how = "a mean"
source = "a log"
date = 2026-08-01
"""


def test_a_mean_has_students_interval_at_any_number_of_values():
    for n in range(2, 201):
        values = np.random.default_rng(n).normal(size=n)
        found, expected = evidence.mean(GAP, values), stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx(tuple(expected), rel=1e-12), n


def test_the_spread_of_80_runs():
    (entry,) = [entry for entry in published_gaps() if entry.is_spread]
    assert (entry.n, entry.sd) == (80, pytest.approx(np.std(LOSSES, ddof=1), abs=1e-5))
    found = evidence.mean(GAP, LOSSES)
    assert found.value == pytest.approx(3.279143, abs=1e-6)
    assert (found.low, found.high) == pytest.approx(tuple(stats.ttest_1samp(LOSSES, 0).confidence_interval(0.95)))
    assert found.high - found.value == pytest.approx(0.000425, abs=1e-6)


def test_the_files_entries_are_read():
    (entry,) = parsed(ENTRY)
    assert (entry.read, entry.gap, entry.date.year) == (FigureOrigin.COMPUTED, 0.004, 2026)
    assert str(entry) == (
        "Published for a recipe on a model: +0.0040 nats, sd 0.0030 over 77 logged steps (mxfp8; computed; a log)."
    )
    assert {entry.format for entry in published_gaps()} == {"bf16", "mxfp8", "nvfp4"}
    assert all(entry.read is not FigureOrigin.EXCERPT or entry.gap is None for entry in published_gaps())


def test_a_recipe_has_those_of_its_formats_and_the_spreads():
    assert published_for([]) == []
    assert {entry.format for entry in published_for([{"mxfp4"}])} == {"bf16"}
    assert {entry.format for entry in published_for([{"mxfp4"}, {"mxfp8_e5m2", "nvfp4"}])} == {"bf16", "nvfp4"}


def test_a_file_without_entries_is_refused():
    with pytest.raises(ValueError, match=r"\[\[gap\]\]"):
        parsed("")


WRONG: dict[str, Callable[[str], str]] = {
    "read": lambda text: text.replace('"computed"', '"guessed"'),
    "model": lambda text: text.replace('"a model"', '""'),
    "format": lambda text: text.replace('format = "mxfp8"\n', ""),
    "gap": lambda text: text.replace("gap = 0.004", "gap = nan"),
    "sd": lambda text: text.replace("sd = 0.003", 'sd = "0.003"'),
    "sd, n and of": lambda text: text.replace("n = 77\n", ""),
    "gap, percent or sd": lambda text: text.replace("gap = 0.004\nsd = 0.003\nn = 77\n", ""),
    "date": lambda text: text.replace("2026-08-01", '"2026-08-01"'),
    "gpa": lambda text: text.replace("gap = 0.004", "gpa = 0.004"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_entry_is_refused(field: str):
    with pytest.raises(ValueError, match=f"\\b{field}\\b"):
        parsed(WRONG[field](ENTRY))
