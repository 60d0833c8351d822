"""The frontier of bits and predicted loss, and the bits that each operand gets."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.questions.shared import layer_chart
from binade.data.evidence import Measure
from binade.data.names import short_names

KINDS = {"advised": "advised under other budgets", "uniform": "one format for all", "published": "published recipes"}
BITS = Measure("bits", "Bits per value", "", "of the advised format", format=".2f")
PER_VALUE = Measure("bits", "Bits per forward value", format=".2f")
PER_STEP = Measure("ms", "Time per step", "ms")


def frontier(table: pd.DataFrame, across: Measure, at: float, change: float) -> alt.LayerChart | alt.FacetChart:
    """Draws Advice.frontier over PER_VALUE or PER_STEP, and the advice itself as a ring. The axis of losses is
    logarithmic if possible."""
    shown = table.assign(group=table["kind"].map(KINDS))
    negative = bool((shown["change"] < 0).any())
    floor = np.nan if negative else float(shown["change"].replace(0, np.nan).min())
    scale = alt.Scale(type="log") if floor > 0 else alt.Scale(type="linear")
    shown = shown[shown["change"] > 0] if floor > 0 else shown
    x = alt.X(f"{across.key}:Q", title=across.axis, scale=alt.Scale(zero=False, nice=False, padding=24))
    y = alt.Y(
        "change:Q",
        title="predicted loss change (nats)",
        scale=scale,
        axis=style.DECADES if floor > 0 else alt.Undefined,
    )
    groups = [name for name in KINDS.values() if name in set(shown["group"])]
    color = style.color(groups, "recipe")
    tooltip = [
        alt.Tooltip("name:N", title="recipe"),
        alt.Tooltip("bits:Q", title="bits per forward value", format=".2f"),
        alt.Tooltip("change:Q", title="predicted loss change", format="+.3g"),
    ]
    if across is PER_STEP:
        tooltip.append(alt.Tooltip("ms:Q", title="ms per step", format=".4g"))
        tooltip.append(alt.Tooltip("share:Q", title="of bf16's time", format=".1%"))
    base = alt.Chart(shown).encode(x=x, y=y)
    advised = alt.FieldEqualPredicate(field="kind", equal="advised")
    line = base.transform_filter(advised).mark_line(strokeWidth=1.5, color=style.colors(groups)[0])
    points = base.mark_point(filled=True, size=70, opacity=0.9).encode(
        color=color, shape=style.shape(groups, "recipe"), tooltip=tooltip
    )
    points_at = shown.assign(place=np.log(shown["change"]) if floor > 0 else shown["change"])
    others = points_at[points_at["kind"] != "advised"].sort_values([across.key, "change"])
    ends = [(float(points_at[name].min()), float(points_at[name].max())) for name in (across.key, "place")]
    names = alt.Chart(style.named_points(others, across.key, "place", *ends)).encode(x=x, y=y, text="name:N")
    labels = names.mark_text(**style.NAME)
    layers: list[Any] = [line, points, labels]
    if change > 0 or not floor > 0:
        chosen = pd.DataFrame({across.key: [at], "change": [change]})
        layers.append(alt.Chart(chosen).mark_point(size=260, strokeWidth=2.5, color=style.PALETTE[3]).encode(x=x, y=y))
    subtitle = f"ring: the advice, {across.quantity(at)}"
    return alt.layer(*layers).properties(title=style.title(f"{across.label} and predicted loss", subtitle))


def bits(table: pd.DataFrame, title: str, subtitle: str) -> alt.LayerChart:
    """The bits of each operand by layer; brighter means more bits."""
    row = short_names(table.drop(columns="layer_index"))
    cells = table.assign(value=table["bits"] / table["values"], row=row, operation=table["gemm"], tensors=1)
    return layer_chart.by_layer(cells, BITS, title, subtitle)
