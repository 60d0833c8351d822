"""Which gradients flush to zero? Forward and backward, side by side."""

from __future__ import annotations

from binade.app.figure import Drawn, Figure
from binade.app.questions.directions import charts, compute
from binade.app.questions.ranking import charts as ranking_charts
from binade.app.questions.shared import board_charts
from binade.app.questions.shared.board_charts import POOLED, caption, nothing_selected
from binade.app.style import Measure
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def directions(opened: Catalog, where: Filter, fmt: str, measure: Measure) -> Drawn:
    table = compute.directions(opened, where, fmt, measure.key)
    if table.empty:
        return nothing_selected(measure)
    totals = compute.direction_totals(opened, where, fmt, measure.key).set_index("operation")["value"]
    parts = [f"{name} {measure.quantity(totals[name])}" for name in ("forward", "backward") if name in totals]
    worst = table[table["operation"] == "backward"].head(1)
    words = f"{measure.label}: {', '.join(parts)}."
    if not worst.empty:
        words += f" Worst going backward: {worst['row'].iloc[0]} ({measure.quantity(worst['value'].iloc[0])})."
    figures = []
    for operation in ("forward", "backward"):
        part = table[table["operation"] == operation]
        if part.empty:
            continue
        figure = Figure(
            f"direction_{operation}",
            charts.direction(table, measure, operation, f"{len(part)} tensors · {POOLED}", table),
            part,
            caption(where, fmt, measure, f"{operation}, all layers together"),
            height=ranking_charts.ranking_height(
                table.groupby("operation").head(board_charts.BARS).query("operation == 'forward'")
            ),
            choose="tensor_id",
            group="directions",
        )
        figures.append(figure)
    return Drawn(tuple(figures), words)
