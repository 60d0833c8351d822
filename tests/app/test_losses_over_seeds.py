"""The losses of a recipe over its seeds, compared with scipy's intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from binade.app.questions.runs.question import over_seeds, recipe_names


def test_mean_and_interval_are_those_of_scipy() -> None:
    draw = np.random.default_rng(0).normal(5, 0.1, (4, 7))
    records = {f"s{seed}": [{"iteration": i, "loss": x} for i, x in enumerate(row)] for seed, row in enumerate(draw)}
    records["alone"] = [{"iteration": 3, "loss": 4.0}]
    records["s3"] = records["s3"][:6]  # ended one iteration earlier
    means, intervals, seeds = over_seeds(records, dict.fromkeys(list(records)[:4], "mxfp4") | {"alone": "alone"})
    assert [each["loss"] for each in means["mxfp4"]] == pytest.approx(draw[:, :6].mean(axis=0))
    low, high = stats.t.interval(0.95, 3, draw[:, :6].mean(axis=0), stats.sem(draw[:, :6]))
    assert intervals["low"].tolist() == pytest.approx(low) and intervals["high"].tolist() == pytest.approx(high)
    assert means["alone"] == records["alone"] and set(intervals["group"]) == {"mxfp4"} == set(seeds["group"])
    assert len(seeds) == 4 * 7 - 1


def test_only_runs_that_differ_in_their_seed_are_grouped() -> None:
    columns = ["label", "name", "settings", "seed"]
    rows = [
        ("bf16 1", "bf16", "a", "1"), ("bf16 2", "bf16", "a", "2"),  # two seeds
        ("mxfp4", "mxfp4", "a", "1"),  # one seed
        ("mxfp8 1", "mxfp8", "a", "1"), ("mxfp8 2", "mxfp8", "b", "2"),  # other settings
        ("nvfp4 1", "nvfp4", "a", "1"), ("nvfp4 2", "nvfp4", "a", "1"), ("nvfp4 3", "nvfp4", "a", "2"),  # a repetition
    ]  # fmt: skip
    groups = recipe_names(pd.DataFrame(rows, columns=columns))
    assert groups == {label: label for label, *_ in rows} | {
        **{"bf16 1": "bf16", "bf16 2": "bf16"},
        **{"nvfp4 2": "nvfp4", "nvfp4 3": "nvfp4"},  # of a repeated seed, the newest
    }
