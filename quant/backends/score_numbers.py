"""The numbers that a score consists of, in the order in which every backend returns them."""

from __future__ import annotations

from enum import IntEnum


class ScoreNumber(IntEnum):
    """Over the finite elements x of a tensor and what they become, q; e = q - x. All are float64."""

    SIGNAL = 0
    """Σx²"""
    ROUNDED = 1
    """Σq²"""
    PRODUCT = 2
    """Σxq"""
    NOISE = 3
    """Σe²"""
    LARGEST = 4
    """max |e|"""
    FINITE = 5
    """How many there are."""
    NONZERO = 6
    """How many are not 0."""
    FLUSHED = 7
    """How many of these become 0."""
    SATURATED = 8
    """How many are beyond the format's largest value times their scale."""
    FLUSHED_NOISE = 9
    """Σe² over the flushed ones."""
    SATURATED_NOISE = 10
    """Σe² over the saturated ones that do not become 0."""
