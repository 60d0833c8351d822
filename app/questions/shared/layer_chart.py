"""A metric by tensor and layer, as a heatmap with values in its cells."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.questions.shared.board_charts import PLACE, color_scale, with_labels
from binade.data.compare.evidence import Measure

INKS = "#10131a", "#ffffff"


def by_layer(table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str]) -> Chart:
    """Tensor by layer, brighter is worse; cells show their figure if it fits."""
    shown = with_labels(table, measure)
    shown["layer"] = shown["layer_index"].astype(int)
    order = sorted(set(shown["row"]), key=lambda row: (row.split()[-1].startswith("grad"), row))
    scale = color_scale(shown, measure)
    legend = {"title": measure.axis, "orient": "right", "gradientLength": min(180, _cells(table) - 30)}
    places: plot.Look = {"x": plot.ordinal("layer", orient="top"), "y": plot.names("row", order)}
    cells = plot.cells(
        shown, "row", "layer", stroke=style.GREY, color=plot.ramp("figure", legend, **scale),
        tips=plot.tips(
            row="tensor", layer="layer", operation="operation", label=measure.axis, tensors=("tensors", ",")
        ),
        choose="tensor_id", fade=(1.0, 0.35), only=PLACE, **places,
    )  # fmt: skip
    inked = shown.assign(ink=_ink(shown["figure"], measure, scale["type"] == "log"))
    ink = plot.named("ink", dict(zip(INKS, INKS, strict=True)), None)
    figures = plot.mark("text", inked, text="label", color=ink, align="center", fontSize=11, **places)
    marks = [cells, *[figures] * (shown["layer"].nunique() <= 12)]
    return plot.layers(title, subtitle, *marks, independent="color")


def _ink(figure: pd.Series, measure: Measure, log: bool) -> pd.Series:
    """Black on the ramp's bright end, white on the rest."""
    value = np.log(figure) if log else figure
    low, high = value.min(), value.max()
    place = (value - low) / (high - low) if high > low else value * 0 + 0.5
    bright = 1 - place if measure.low_is_bad else place
    return bright.fillna(1.0).map(lambda b: INKS[0] if b > 0.55 else INKS[1])


def height(table: pd.DataFrame) -> int:
    """Pixels that the chart needs."""
    return 150 + _cells(table)


def _cells(table: pd.DataFrame) -> int:
    """Pixels of all rows together: at least as many as the legend beside them needs."""
    return max(22 * table["row"].nunique(), 110)
