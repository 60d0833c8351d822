"""Bounds of predicted loss changes, against cross-entropies that torch computes and scipy's standard errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from binade.data.loss_bounds import Bounds

VOCABULARY = 50


@pytest.mark.parametrize("noise", [0.1, 1.0, 3.0])
def test_changes_of_a_cross_entropy_lie_within_the_bounds(noise: float):
    """The lower bound always holds. The upper one holds after the best temperature, which can only lower the loss."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(VOCABULARY, (64,), generator=random)
    logits = torch.randn(64, VOCABULARY, generator=random) + 4 * F.one_hot(labels, VOCABULARY)
    before = F.cross_entropy(logits.double(), labels).item()
    bounds = Bounds(before, VOCABULARY)
    rounded = (logits + noise * torch.randn(logits.shape, generator=random)).double()
    change = F.cross_entropy(rounded, labels).item() - before
    cooled = min(F.cross_entropy(rounded / t, labels).item() for t in (1, 2, 5, 20, 1e6)) - before
    assert bounds.low <= change and cooled <= bounds.high + 1e-9


def test_the_ends_are_reached():
    loss = F.cross_entropy(torch.tensor([[2.0, 0.0, 0.0]]).double(), torch.tensor([0])).item()
    bounds = Bounds(loss, 3)
    nothing = F.cross_entropy(torch.zeros(1, 3).double(), torch.tensor([0])).item()
    certain = F.cross_entropy(torch.tensor([[1e3, 0.0, 0.0]]).double(), torch.tensor([0])).item()
    assert bounds.high == pytest.approx(nothing - loss) and bounds.low == pytest.approx(certain - loss)


def test_one_sequence_of_many_cannot_decide_a_prediction():
    bounds, changes = Bounds(2.7, 49_152), np.array([0.3, 0.2, 0.4, 400.0])
    change, error = bounds.total(float(changes.mean()), changes)
    clipped = [0.3, 0.2, 0.4, math.log(49_152)]
    assert change == pytest.approx(np.mean(clipped)) and error == pytest.approx(stats.sem(clipped))
    assert change < 3 < changes.mean()


def test_a_model_that_knows_nothing_has_no_upper_bound():
    """As before training: what a prediction says of it stays, with its sign."""
    changes = np.array([0.003, -0.001, 0.002, 0.0])
    assert Bounds(10.9, 50_257).total(0.001, changes) == pytest.approx((0.001, stats.sem(changes)))


def test_small_changes_stay_as_they_are():
    bounds, changes = Bounds(2.7, 100), np.array([0.1, -0.2, 0.3])
    assert bounds.total(float(changes.mean()), changes) == pytest.approx((changes.mean(), stats.sem(changes)))
    assert bounds.total(0.5, changes)[0] == 0.5  # a change that is not their mean: without its first order
    change, error = bounds.total(-9.0, [])
    assert change == -2.7 and math.isnan(error)
