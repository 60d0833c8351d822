"""Triggers: what is parsed, when they fire, against limits computed by NumPy, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from binade.collector.capture.triggers import Trigger, Triggers
from binade.collector.errors import ConfigError

GENERATOR = np.random.default_rng(0)
VALUES = [*GENERATOR.lognormal(size=60), 40.0, *GENERATOR.lognormal(size=30)]


def fired(text: str, values: list[float], cooldown: int = 0) -> list[int]:
    """The steps in which it fires, of the values of one tensor."""
    trigger = Trigger.parse(text)
    triggers = Triggers((trigger,), cooldown)
    return [step for step, value in enumerate(values) if triggers.see(step, {"x": {trigger.quantity: value}})]


@pytest.mark.parametrize("times", ["×", "x", "*"])
def test_a_factor_of_a_median(times):
    expected = [n for n in range(20, len(VALUES)) if VALUES[n] > 8 * np.median(VALUES[n - 20 : n])]
    assert fired(f"absmax > 8 {times} median(20)", VALUES) == expected
    assert 60 in expected


def test_standard_deviations_above_the_mean():
    expected = [
        n for n in range(20, len(VALUES)) if VALUES[n] > np.mean(VALUES[n - 20 : n]) + 4 * np.std(VALUES[n - 20 : n])
    ]
    assert fired("loss > mean + 4 sd", VALUES) == expected
    below = [
        n for n in range(5, len(VALUES)) if VALUES[n] < 0.9 * np.mean(VALUES[n - 5 : n]) - np.std(VALUES[n - 5 : n])
    ]
    assert fired("loss<0.9*mean(5)-1sd", VALUES) == below


def test_steps_in_a_row_shares_and_cooldown():
    assert fired("sqnr_db < 12 for 3", [11, 11, 13, 11, 11, 11, 11, 11, 11]) == [5, 8]
    assert fired("sqnr_db < 12 for 2", [11, float("nan"), 11, 11]) == [3]
    assert fired("saturated > 1%", [0.01, 0.011]) == [1]
    assert fired("absmax > 1", [2] * 8, cooldown=3) == [0, 4]
    assert fired("nan", [0, 3]) == [1]


def test_each_tensor_has_its_own_history_and_a_trigger_fires_once_a_step():
    triggers = Triggers((Trigger.parse("absmax > 1 for 2"),))
    assert not triggers.see(0, {"a": {"absmax": 2}, "b": {"absmax": 0}})
    assert not triggers.see(1, {"a": {"absmax": 0}, "b": {"absmax": 2}})
    (found,) = triggers.see(2, {"a": {"absmax": 2}, "b": {"absmax": 2}, "c": {"loss": 1}})
    assert found.place == "b"


@pytest.mark.parametrize(
    "text",
    ["", "absmax", "absmax >> 3", "absmx > 3", "absmax > 3 for 0", "loss > __import__('os')", "loss > median(1)",
     "loss > 4 sd", "nan for 3", "absmax > 1e9999", "absmax > median(99999)", "loss > 1, nan"],
)  # fmt: skip
def test_what_is_not_allowed_is_explained(text):
    with pytest.raises(ConfigError, match="LIMIT is a number, or mean, median, min, max"):
        Trigger.parse(text)
