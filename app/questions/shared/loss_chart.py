"""The loss of runs by iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.shared.labels import thinned

MOST_POINTS = 300  # that are marked, in addition to the line through them


def loss_table(records: Mapping[str, Sequence[Mapping[str, Any]]], most: int) -> tuple[pd.DataFrame, int]:
    """(the table for `losses`, with columns group, iteration and loss, thinned to about `most` rows; n), from the
    records of each group's loss.jsonl. Every n-th iteration is in the table."""
    rows = [(group, record["iteration"], record["loss"]) for group, found in records.items() for record in found]
    return thinned(pd.DataFrame(rows, columns=["group", "iteration", "loss"]), most)


def losses(table: pd.DataFrame, colors: Mapping[str, str] | None = None) -> alt.LayerChart:
    """Columns group (a run), iteration, loss: one line per run; warm-up is to the left of the rule at 0. colors: those
    that users chose, by group."""
    last = table.sort_values("iteration").dropna(subset=["loss"]).groupby("group")["loss"].last()
    groups = sorted(style.groups_of(table), key=lambda group: -last.get(group, math.inf))  # as the lines end
    tooltip = [
        alt.Tooltip("group:N", title="run"),
        alt.Tooltip("iteration:Q", title="iteration"),
        alt.Tooltip("loss:Q", format=".4f", title="loss (nats per token)"),
    ]
    lines = (
        alt.Chart(table)
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=18) if len(table) <= MOST_POINTS else False)
        .encode(
            x=alt.X(
                "iteration:Q",
                title="iteration (below 0: warm-up in bf16)",
                axis=alt.Axis(tickMinStep=1),
                scale=alt.Scale(nice=False),
            ),
            y=alt.Y("loss:Q", title="loss (nats per token)", scale=alt.Scale(zero=False)),
            color=style.color(groups, "run", line=True, own=colors),
            strokeDash=style.dash(groups, "run"),
            tooltip=tooltip,
        )
    )
    start = alt.Chart(pd.DataFrame({"x": [0]})).mark_rule(strokeDash=[4, 4], color=style.GREY).encode(x="x:Q")
    result: alt.LayerChart = (start + style.labelled(lines, groups)).properties(
        title=style.title("Training loss", "cross entropy of each iteration")
    )
    return result
