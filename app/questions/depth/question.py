"""Does it get worse with depth? Any metric by tensor and layer."""

from __future__ import annotations

import pandas as pd

from binade.app.figure import Drawn, Figure
from binade.app.questions.depth import charts, compute
from binade.app.questions.shared.board_charts import POOLED, caption, chart_title, definition, nothing_selected
from binade.app.style import Measure
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def depth(opened: Catalog, where: Filter, fmt: str, measure: Measure) -> Drawn:
    table = compute.depth(opened, where, fmt, measure.key)
    if table.empty:
        return nothing_selected(measure)
    figure = Figure(
        "depth",
        charts.depth(table, measure, chart_title(fmt, measure, " by layer and tensor"), POOLED),
        table,
        caption(where, fmt, measure, f"{len(table):,} cells of layer and tensor"),
        note=f"{definition(fmt, measure)} Bright is bad.",
        hint="Choose a cell to look into its worst tensor.",
        height=charts.depth_height(table),
        choose="tensor_id",
    )
    return Drawn((figure,), _depth_verdict(table, measure))


def _depth_verdict(table: pd.DataFrame, measure: Measure) -> str:
    layers = table["layer_index"].nunique()
    change = compute.slope(table)
    if layers > 1 and not change.empty:
        worse = change["change"] < 0 if measure.low_is_bad else change["change"] > 0
        first, last = int(table["layer_index"].min()), int(table["layer_index"].max())
        return f"{int(worse.sum())} of {len(change)} tensors are worse in layer {last} than in layer {first}."
    return "There is one layer in the filter: nothing to compare." if layers == 1 else ""
