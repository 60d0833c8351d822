"""The relative difference of each tensor, in the order of execution."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.figure import Chart
from binade.data.text import number_text


def differences(table: pd.DataFrame, limit: float | None, first: int | None, subtitle: str) -> Chart:
    """first: the order of the first tensor that differs. A logarithmic axis has no 0 and no Inf: they are drawn at its
    ends."""
    finite = table["difference"][np.isfinite(table["difference"]) & (table["difference"] > 0)]
    ends = [*([finite.min(), finite.max()] if len(finite) else []), *([limit] if limit else [])] or [1e-3]
    low, high = 10.0 ** np.floor(np.log10(min(ends) / 2)), 10.0 ** np.ceil(np.log10(max(ends) * 2))
    shown = table.drop(columns=["shape", "shape_b", "at"]).assign(
        drawn=table["difference"].clip(low, high), label=table["difference"].map(number_text)
    )
    scale = style.operation_scale(shown["operation"])
    color = alt.Color("operation:N", scale=scale, legend=style.legend(scale.domain, "operation"))
    marks = (
        alt.Chart(shown)
        .mark_circle(size=45, cursor="pointer", opacity=0.9)
        .encode(
            x=alt.X("order:Q", title="tensor, in the order of execution", scale=alt.Scale(nice=False, padding=16)),
            y=alt.Y(
                "drawn:Q",
                title="relative difference",
                scale=alt.Scale(type="log", domain=[low, high]),
                axis=style.DECADES,
            ),
            color=color,
            tooltip=[
                alt.Tooltip("place:N", title="tensor"),
                alt.Tooltip("label:N", title="relative difference"),
                alt.Tooltip("by:N", title="compared by"),
            ],
        )
        .add_params(style.choice("tensor_id"))
    )
    layers = [marks]
    if limit:
        rule = alt.Chart(pd.DataFrame({"y": [limit]})).mark_rule(strokeDash=[4, 4], color=style.GREY)
        layers.insert(0, rule.encode(y="y:Q"))
    if first is not None:
        rule = alt.Chart(pd.DataFrame({"x": [first]})).mark_rule(color=style.BAD)
        layers.insert(0, rule.encode(x="x:Q"))
    return alt.layer(*layers).properties(title=style.title("Difference between the two runs", subtitle))
