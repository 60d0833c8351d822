"""Overview: the distribution of the selection's magnitudes, and the tensors that a format rounds worst."""

from __future__ import annotations

from typing import Any

from binade.app import style
from binade.app.figure import Drawn, Figure, source
from binade.app.formatting import big, first_formats
from binade.app.params import One, Param
from binade.app.questions.ranking import compute as ranking_compute
from binade.app.questions.ranking.charts import ranking, ranking_height
from binade.app.questions.shared import distribution_charts, distributions
from binade.app.questions.shared.scope import scope_of, scoped
from binade.app.questions.shared.selection import Selection
from binade.app.style import MEASURES
from binade.data.catalog import Catalog
from binade.data.filter import Filter

PANELS = (
    ("all", "All values"),
    ("quant_type", "By quant type"),
    ("layer_type", "By layer type"),
    ("operation", "By operation"),
)
MOST_GROUPS = 6
WORST = 8
PANEL = 330  # pixels, without the legend


def params(opened: Catalog) -> dict[str, Param]:
    return {"format": One(first_formats(opened))}


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    opened, where = selection.opened, selection.where
    found = panels(opened, where)
    low = worst(opened, where, values["format"]) if values["format"] else None
    problems = () if found else ("Nothing to draw: there are no finite nonzero values.",)
    return Drawn((*found, *((low,) if low else ())), problems=problems)


def panels(opened: Catalog, where: Filter) -> list[Figure]:
    """One of PANELS each, of one run and iteration; those with nothing to draw are left out."""
    where = scoped(opened, where)
    each = distributions.each_by(opened, where, tuple(by for by, _ in PANELS[1:]))
    figures = []
    for by, title in PANELS:
        found = each[by]
        found = sorted(found, key=lambda d: -d.total)[:MOST_GROUPS] if len(found) > MOST_GROUPS else found
        table = distributions.log2_histogram(found)
        if table.empty:
            continue
        subtitle = f"{title} · {big(sum(d.total for d in found))} values · {scope_of(opened, where)} · from sketches"
        figure = Figure(
            f"panel_{by}",
            distribution_charts.histogram(table, subtitle, title.removeprefix("By ")),
            table,
            source(where, f"{subtitle}; bins of 1/8 binade; zeros have no magnitude"),
            height=PANEL + style.legend_height([d.group for d in found]),
            group="panels",
            by=by,
        )
        figures.append(figure)
    return figures


def worst(opened: Catalog, where: Filter, fmt: str) -> Figure | None:
    """The places with the lowest SQNR in one run and iteration; None where no operand is scored."""
    measure, where = MEASURES["sqnr_db"], scoped(opened, where, scored=True)
    table = ranking_compute.ranking(opened, where, fmt, "sqnr_db").head(WORST)
    if table.empty:
        return None
    return Figure(
        "worst",
        ranking(table, measure, f"Lowest SQNR in {fmt}", scope_of(opened, where)),
        table,
        source(where, f"each place’s operands, rounded to {fmt}") + f"\nSQNR: {measure.definition}.",
        hint="Click a bar to open its worst tensor.",
        height=ranking_height(table),
        choose="tensor_id",
    )
