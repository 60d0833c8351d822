"""A metric by iteration, one line per layer."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.shared.board_charts import layer_color, scale_type, with_labels, with_layer_names
from binade.data.evidence import Measure


def training(
    table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str]
) -> alt.Chart | alt.LayerChart:
    """Chart of compute.training: one line per layer, in the order of their colors."""
    shown = with_labels(table, measure).dropna(subset=["figure"])
    shown["layer"] = shown["layer_index"].astype(int)
    layers = sorted(shown["layer"].unique().tolist())
    choice = style.choice("tensor_id")
    kind = scale_type(shown, measure)
    y_scale = alt.Scale(type="log") if kind == "log" else alt.Scale(zero=False)
    x_axis = alt.Axis(tickMinStep=1, format="d")
    lines: alt.Chart = (
        alt.Chart(shown)
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=45, cursor="pointer"))
        .encode(
            x=alt.X("iteration:Q", title="iteration", axis=x_axis, scale=alt.Scale(nice=False, padding=16)),
            y=alt.Y("figure:Q", title=measure.axis, scale=y_scale),
            color=layer_color(layers),
            tooltip=[
                alt.Tooltip("layer:O", title="layer"),
                alt.Tooltip("iteration:Q", title="iteration"),
                alt.Tooltip("label:N", title=measure.axis),
                alt.Tooltip("tensors:Q", title="tensors", format=","),
            ],
        )
        .add_params(choice, style.only("layer_index"))
        .properties(title=style.title(title, subtitle))
    )
    return with_layer_names(lines, layers)
