"""The overview of a report: the distribution of the selection's magnitudes."""

from __future__ import annotations

from binade.app import style
from binade.app.figure import Figure, source
from binade.app.formatting import big
from binade.app.questions.shared import distribution_charts, distributions
from binade.app.questions.shared.scope import scope_of, scoped
from binade.data.catalog import Catalog
from binade.data.filter import Filter

PANELS = (
    ("all", "All values"),
    ("quant_type", "By quant type"),
    ("layer_type", "By layer type"),
    ("operation", "By operation"),
)
MOST_GROUPS = 6
PANEL = 330  # pixels, without the legend


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
