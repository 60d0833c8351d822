"""The worst cells of the Map as bars."""

from __future__ import annotations

import math

import pandas as pd

from binade.app.draw import plot
from binade.app.draw.figure import Chart
from binade.data.compare.evidence import Measure

BARS = 20  # of a ranking that are drawn
PLACE = ("layer_index", "module", "operation", "tensor_name")  # what identifies a place in a model


def _with_labels(table: pd.DataFrame, measure: Measure) -> pd.DataFrame:
    """The table with figure (as drawn: percent, finite), label (as text) and, where there are low and high, figure_low
    and figure_high (missing for a single tensor), and between (as text)."""
    drawn = {
        name: (table[column] * measure.factor).where(table[column].abs() < math.inf)
        for name, column in (("figure", "value"), ("figure_low", "low"), ("figure_high", "high"))
        if column in table
    }
    if "figure_low" in drawn:
        several = table["tensors"] > 1
        drawn |= {name: drawn[name].where(several) for name in ("figure_low", "figure_high")}
        ends = zip(table["low"], table["high"], several, strict=True)
        texts = [f"{measure.text(a)} to {measure.text(b)}" if s else "" for a, b, s in ends]
        drawn["between"] = pd.Series(texts, table.index, dtype=object)
    return table.assign(**drawn, label=table["value"].map(measure.text))


def _axis_domain(figures: pd.Series, measure: Measure) -> list[float]:
    """From 0, with room for the labels of the bars, but no share above 100%."""
    low, high = figures.min(), figures.max()
    low = min(float(low), 0.0) if pd.notna(low) else 0.0
    high = max(float(high), 0.0) if pd.notna(high) else 0.0
    end = high * 1.3 if high > low else low + 1.0
    return [low * 1.1, min(end, 100.0) if measure.unit == "%" else end]


def ranking(table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str], between: str) -> Chart:
    """The first BARS rows of a table of cells, worst first, as bars, colored by operation. A thin line is the interval
    of each. between: what that is, in words."""
    shown = _with_labels(table.head(BARS), measure)
    several = "figure_high" in shown
    end = shown["figure_high"].fillna(shown["figure"]) if several else shown["figure"]
    shown = shown.assign(end=end.fillna(0.0).clip(lower=0.0))
    tips = {"place": "tensor", "operation": "operation", "label": measure.axis}
    tips |= {"between": between} if several else {}
    bars = plot.bars(
        shown, plot.names("place", shown["place"]), size=15, text="label", end="end",
        x=plot.x("figure", measure.axis, {"tickCount": 5}, domain=_axis_domain(shown["figure"], measure), nice=False),
        color=plot.operations(shown["operation"]),
        between=("figure_low", "figure_high") if several and shown["figure_low"].notna().any() else None,
        tips=tips | {"tensors": ("tensors", ",")},
        choose="tensor_id", fade=(1.0, 0.35), only=[name for name in PLACE if name in shown],
    )  # fmt: skip
    return plot.layers(title, subtitle, *bars)


def height(table: pd.DataFrame) -> int:
    """Height of a ranking in pixels."""
    return 150 + 24 * min(len(table), BARS)
