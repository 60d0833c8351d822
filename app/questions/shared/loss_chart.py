"""Marks on the lines of losses by iteration."""

from __future__ import annotations

import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart

MOST_POINTS = 300  # that are marked, in addition to the line through them


def marked_points(marks: pd.DataFrame, x: plot.X, y: plot.Y) -> Chart:
    """A diamond at each row of a table with a column text, which the pointer shows."""
    look: plot.Look = {"shape": "diamond", "size": 130, "opacity": 1, "color": style.BAD}
    return plot.mark("point", marks, x=x, y=y, tips=plot.tips(text="mark"), **look)
