"""The page of runs: which runs it lists, and when one diverged."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from binade.app.questions.runs.page import diverged_at
from binade.data.catalog import Catalog


@pytest.mark.parametrize(
    ("losses", "at"),
    [
        ([3.0, 2.0, 1.0], None),
        ([3.0, 7.0, 2.0], None),  # it came back
        ([3.0, 2.0, 7.0, 9.0], 2),
        ([3.0, 2.0, None], 2),  # not finite
        ([3.0, None, 6.5, None], 1),
        ([3.0, 6.0], None),  # twice the first is not above it
        ([None, None], 0),
        ([], None),
    ],
)
def test_diverged_is_lost_up_to_the_last_iteration(losses: list[float | None], at: int | None):
    assert diverged_at([{"iteration": step, "loss": loss} for step, loss in enumerate(losses)]) == at


def test_the_filter_chooses_runs_and_keeps_their_baseline(
    visit: Callable[..., AppTest], collected: Path, catalog: Catalog
):
    runs = catalog.runs().set_index("recipe")["run_id"]
    whole = visit(collected, "runs").dataframe[0].value.set_index("run_id")
    some = visit(collected, "runs", recipe="mxfp4").dataframe[0].value.set_index("run_id")
    assert list(some.index) == [runs["mxfp4"]] and set(whole.index) == set(runs)
    gap = some.loc[runs["mxfp4"], "gap"]
    assert math.isfinite(gap) and gap == whole.loc[runs["mxfp4"], "gap"]
    assert some["diverged"].isna().all()
