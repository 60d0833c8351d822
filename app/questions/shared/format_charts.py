"""Formats side by side: SQNR, flush and saturation."""

from __future__ import annotations

import math

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.questions.shared.board_charts import whiskers
from binade.quant.specs import known_specs

ERROR_PANELS = (
    ("sqnr_db", "SQNR", "dB, higher is better", 1.0),
    ("flush_to_zero", "Flushed to zero", "% of the nonzero values", 100.0),
    ("saturated", "Saturated", "% of the values", 100.0),
)


ENDS = (("low", "10th"), ("high", "90th"))


def format_panels(table: pd.DataFrame) -> list[alt.LayerChart]:
    """Chart of Catalog.compared: the medians of SQNR, flush and saturation, one bar per format, with the figure next to
    the bar and a line from the 10th to the 90th percentile."""
    order = known_specs(table["format"])
    return _panels(table.assign(row=table["format"]), order, order, "format")


def trial_panels(table: pd.DataFrame) -> list[alt.LayerChart]:
    """Chart of what_if.compute.try_formats: the same, one bar per trial, in its format's color."""
    order = table["label"].tolist()
    formats = known_specs(table["format"])
    return _panels(table.assign(row=table["label"]), order, formats, "trial")


def _panels(table: pd.DataFrame, order: list[str], formats: list[str], what: str) -> list[alt.LayerChart]:
    colors = alt.Scale(domain=formats, range=[style.color_of_spec(name) for name in formats])
    panels = []
    for column, name, unit, factor in ERROR_PANELS:
        measure = style.MEASURES[column]
        shown = table[["format", "row"]].assign(value=table[column] * factor)
        if "tensors" in table:
            shown["tensors"] = table["tensors"]
        shown["label"] = table[column].map(measure.text)
        shown["value"] = shown["value"].where(shown["value"].abs() < math.inf)
        several = f"{column}_low" in table and bool((table["tensors"] > 1).any())
        for end in ("low", "high") if several else ():
            drawn = table[f"{column}_{end}"] * factor
            shown[f"value_{end}"] = drawn.where((drawn.abs() < math.inf) & (table["tensors"] > 1))
        shown["end"] = (shown["value_high"].fillna(shown["value"]) if several else shown["value"]).fillna(0.0)
        ends = shown.filter(regex="^value").to_numpy(float).ravel()
        ends = ends[~np.isnan(ends)]
        lowest, largest = (min(float(ends.min()), 0.0), float(ends.max())) if len(ends) else (0.0, 0.0)
        tooltip = [
            alt.Tooltip("row:N", title=what),
            alt.Tooltip("value:Q", title=f"{name} ({unit})", format=".4~g"),
            *(
                [alt.Tooltip(f"value_{end}:Q", title=f"{nth} percentile", format=".4~g") for end, nth in ENDS]
                if several
                else []
            ),
        ]
        if "tensors" in table:
            tooltip.append(alt.Tooltip("tensors:Q", title="operands"))
        base = alt.Chart(shown).encode(y=style.names_axis("row", order, 260), tooltip=tooltip)
        x_axis = alt.X(
            "value:Q",
            title=unit,
            scale=alt.Scale(domain=[lowest * 1.1, largest * 1.35 if largest > 0 else 1.0], nice=False),
            axis=None,  # the values are next to the bars
        )
        bars = base.mark_bar(size=18, cornerRadiusEnd=3).encode(
            x=x_axis, color=alt.Color("format:N", scale=colors, legend=None)
        )
        text = base.mark_text(align="left", dx=5, color=style.GREY, fontSize=12).encode(x="end:Q", text="label:N")
        layers = [bars, text]
        if several:
            layers.insert(1, whiskers(shown, alt.Y("row:N", sort=order), "value"))
        panels.append(
            alt.LayerChart(layer=layers).properties(
                title=alt.TitleParams(name, subtitle=unit, anchor="start", fontSize=13, subtitleColor=style.GREY)
            )
        )
    return panels


def format_height(table: pd.DataFrame) -> int:
    """Pixels that a panel needs."""
    return 80 + 28 * len(table)
