"""Predicted against measured loss changes."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from binade.app import style

GAPS = {"gap": "mean gap to bf16 over the iterations", "first": "gap to bf16 at the first iteration"}


def against(table: pd.DataFrame, column: str, subtitle: str) -> alt.LayerChart | alt.FacetChart:
    """Chart of compute.measured: one point per recipe; on the line, prediction and measurement agree."""
    low = float(min(table["predicted"].min(), table[column].min(), 0))
    high = float(max(table["predicted"].max(), table[column].max()))
    line = pd.DataFrame({"x": [low, high], "y": [low, high]})
    diagonal = alt.Chart(line).mark_line(color=style.GREY, strokeDash=[4, 3], strokeWidth=1).encode(x="x:Q", y="y:Q")
    x = alt.X("predicted:Q", title="predicted loss change (nats)", scale=alt.Scale(nice=False, padding=20))
    title = f"{'mean' if column == 'gap' else 'first'} gap (nats)"
    y = alt.Y(f"{column}:Q", title=title)
    layers: list[Any] = [diagonal]
    if column == "gap":
        bars = alt.Chart(table.dropna(subset=["low"])).mark_rule(opacity=0.5, color=style.PALETTE[0])
        layers.append(bars.encode(x=x, y=alt.Y("low:Q", title=title), y2="high:Q"))
    base = alt.Chart(table).encode(x=x, y=y)
    tooltip = [
        alt.Tooltip("name:N", title="recipe"),
        alt.Tooltip("bits:Q", title="bits per forward value", format=".2f"),
        alt.Tooltip("predicted:Q", title="predicted loss change (nats)", format="+.4f"),
        alt.Tooltip("first:Q", title="gap, first iteration (nats)", format="+.4f"),
        alt.Tooltip("gap:Q", title="mean gap (nats)", format="+.4f"),
        alt.Tooltip("seeds:Q", title="seeds"),
    ]
    points = base.mark_point(filled=True, size=80, color=style.PALETTE[0]).encode(tooltip=tooltip)
    layers.append(points.add_params(style.only("recipe")))
    largest = table.dropna(subset=[column]).sort_values(column, key=abs, ascending=False)
    names = alt.Chart(style.named_points(largest, "predicted", column, (low, high), (low, high))).encode(
        x=x, y=y, text="name:N"
    )
    layers.append(names.mark_text(**style.NAME))
    return alt.layer(*layers).properties(
        title=style.title(f"Predicted change and {title.partition(' (')[0]}", subtitle)
    )
