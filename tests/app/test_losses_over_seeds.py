"""The losses of a recipe over its seeds, compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest

from binade.app.questions.runs.groups import over_seeds


def test_mean_and_ends_are_those_of_numpy() -> None:
    draw = np.random.default_rng(0).normal(5, 0.1, (4, 7))
    records = [[{"iteration": i, "loss": x} for i, x in enumerate(row)] for row in draw]
    found = over_seeds([*records[:3], records[3][:6]])  # the last one ended one iteration earlier
    assert found["iteration"].tolist() == list(range(6))
    for column, expected in (("loss", draw.mean(0)), ("low", draw.min(0)), ("high", draw.max(0))):
        assert found[column].tolist() == pytest.approx(expected[:6].tolist())
    assert over_seeds(records[:1])["loss"].tolist() == pytest.approx(draw[0].tolist())


def test_losses_of_other_windows_and_lost_ones_are_no_mean() -> None:
    first = [{"iteration": 0, "loss": 1.0}, {"iteration": 1, "loss": None}, {"iteration": 2, "loss": 2.0}]
    other = [{"iteration": 0, "loss": 3.0}, {"iteration": 1, "loss": 1.0}, {"iteration": 2, "loss": 2.0, "window": 5}]
    found = over_seeds([first, other])
    assert found["iteration"].tolist() == [0, 1] and found["loss"].iloc[0] == 2.0 and np.isnan(found["loss"].iloc[1])
