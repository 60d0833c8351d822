"""Which tensors suffer most? A ranked board over layer, module, operation and tensor."""

from __future__ import annotations

from binade.app.figure import Drawn, Figure
from binade.app.questions.ranking import charts, compute
from binade.app.questions.shared import board_charts
from binade.app.questions.shared.board_charts import POOLED, caption, chart_title, definition, nothing_selected
from binade.app.style import Measure
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def board(opened: Catalog, where: Filter, fmt: str, measure: Measure) -> Drawn:
    table = compute.ranking(opened, where, fmt, measure.key)
    if table.empty:
        return nothing_selected(measure)
    worst = table.iloc[0]
    verdict = f"{worst['place']} suffers most: {measure.label} {measure.quantity(worst['value'])}."
    title = chart_title(fmt, measure, ", worst first")
    subtitle = f"{min(len(table), board_charts.BARS)} of {len(table):,} places · {POOLED}"
    figure = Figure(
        "ranking",
        charts.ranking(table, measure, title, subtitle),
        table,
        caption(where, fmt, measure, f"{len(table):,} places (layer, module, operation, tensor)"),
        note=definition(fmt, measure),
        hint="Choose a bar to look into its worst tensor.",
        height=charts.ranking_height(table),
        choose="tensor_id",
    )
    return Drawn((figure,), verdict)
