"""The map as a chart: a heat map of each GEMM, and the values of each kind of operand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.measures.map_measure import MapMeasure
from binade.app.questions.map.compute import MapRow
from binade.app.questions.shared.operands import GEMMS, OTHER
from binade.data.compare.evidence import Measure
from binade.data.words.names import name_of

# From no loss to total loss.
HEAT = ["#eceae8", "#f9cdbb", "#f7906f", "#ee4f35", "#b3131f", "#67000d"]
TITLES = {gemm: f"{gemm} GEMM" for gemm in GEMMS} | {OTHER: "other tensors"}
CELL, ROW, DOTS = 15, 15, 300  # pixels: width and height of a cell, and the width of the dots


def domain(values: pd.Series, color: MapMeasure, difference: bool) -> tuple[float, float]:
    """The values of no and of full color: the same for all iterations and formats where the measure has natural ends.
    Of a difference, and of a measure with a neutral value, they are as far from it on both sides."""
    finite = values[np.isfinite(values.astype(float))].astype(float)
    if color.ends and (not difference or color.neutral is not None):
        return color.ends
    neutral = 0.0 if difference else color.neutral
    if neutral is not None and color.measure.log and not difference:
        known = finite[finite > 0]
        most = max((abs(math.log(value / neutral)) for value in known), default=0.0)
        return neutral * math.exp(-(most or 1.0)), neutral * math.exp(most or 1.0)
    if neutral is not None:
        most = float((finite - neutral).abs().max()) if len(finite) else 0.0
        return neutral - (most or 1.0), neutral + (most or 1.0)
    if finite.empty:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def shade(values: pd.Series, color: MapMeasure, difference: bool) -> pd.Series:
    """How bad each value is, from 0 to 1, as colors show it; of a difference, and of a measure with a neutral value,
    from -1 (better) to 1 (worse)."""
    measure, (low, high) = color.measure, domain(values, color, difference)
    number = values.astype(float).replace([np.inf], high).replace([-np.inf], low)
    both_ways = difference or color.neutral is not None
    if measure.log and not difference and low > 0:
        place = (number.clip(lower=low) / low).map(math.log) / math.log(high / low)
    elif measure.factor == 100 and not both_ways:  # most shares are small
        place = ((number - low).clip(lower=0) / (high - low)).pow(0.5)
    else:
        place = (number - low) / (high - low)
    place = 1 - place if measure.low_is_bad else place
    place = 2 * place - 1 if both_ways else place
    clipped: pd.Series = place.clip(-1 if both_ways else 0, 1)
    return clipped


def atlas(
    table: pd.DataFrame, rows: list[MapRow], across: str, color: MapMeasure, measure: Measure, difference: bool,
    title: style.Title,
) -> Chart:  # fmt: skip
    """Chart of compute.cells with shade and label: one heat map per GEMM, two side by side."""
    columns = sorted(table[across].unique().tolist())
    by_gemm = ([row for row in rows if row.gemm == gemm] for gemm in (*GEMMS, OTHER))
    parts = [_heat(table, operands, columns, across, color, measure, difference) for operands in by_gemm if operands]
    return plot.grid(title, parts, 2)


def _heat(
    table: pd.DataFrame, rows: list[MapRow], columns: list[int], across: str, color: MapMeasure, measure: Measure,
    difference: bool,
) -> Chart:  # fmt: skip
    names, values = [label(row) for row in rows], table["value"]
    table = table[table["gemm"] == rows[0].gemm]
    shown = table.assign(operand=table["row"].map(dict(zip((row.key for row in rows), names, strict=True))))
    key = legend(color, measure, values, difference)
    ends = [-1 if key["difference"] else 0, 1]
    colors = style.DIVERGING if key["difference"] else HEAT
    shown = shown.assign(place=sum(ends) - shown["shade"] if measure.low_is_bad else shown["shade"])  # lowest first
    colors = colors[::-1] if measure.low_is_bad else colors
    text = f"datum.value > {ends[0]} ? {json.dumps(key['high'])} : {json.dumps(key['low'])}"
    look = {"title": measure.axis, "values": ends, "labelExpr": text, "gradientLength": 150}
    word = "layer" if across == "layer_index" else "iteration"
    cells = plot.mark(
        "rect", shown, stroke="#ffffff", strokeWidth=0.6, x=plot.ordinal(across, word, ticks=False),
        y=plot.names("operand", names, 200, {"labelOverlap": False, "labelFontSize": 11}),
        color=plot.ramp("place", look, domain=ends, range=colors),
        tips={"operand": color.of, across: word, "label": measure.axis, "tensors": ("tensors", ",")},
    )  # fmt: skip
    size: plot.Look = {"width": max(260, min(520, CELL * len(columns))), "height": ROW * len(names)}
    return plot.layers(style.small_title(TITLES[rows[0].gemm]), "", cells, **size)


def label(row: MapRow) -> str:
    """The name of a row: "fc1 grad output"."""
    return name_of(None, row.product, row.tensor, row.expert)


def height(rows: list[MapRow]) -> int:
    """Pixels that the chart needs."""
    counts = [sum(row.gemm == gemm for row in rows) for gemm in (*GEMMS, OTHER)]
    counts = [count for count in counts if count]
    pairs: list[int] = [max(counts[index : index + 2]) for index in range(0, len(counts), 2)]
    return 90 + sum(100 + ROW * count for count in pairs)


def ticks(low: float, high: float) -> list[float]:
    """At most six round numbers between two."""
    step = 10.0 ** np.floor(np.log10((high - low) / 4)) if high > low else 1.0
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    return [float(tick) + 0.0 for tick in np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step]  # no -0


def legend(color: MapMeasure, measure: Measure, values: pd.Series, difference: bool) -> dict[str, Any]:
    """The values at the ends of the colors, and at which of them the bad ones are."""
    low, high = (measure.quantity(end) for end in domain(values, color, difference))
    both_ways = difference or color.neutral is not None
    return {"low": low, "high": high, "bad_is_low": measure.low_is_bad, "difference": both_ways}
