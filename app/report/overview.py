"""What a report has that no page shows in this form: quick_analysis.png, statistics/ with the spread of the values of
each group, and comparisons/ of formats beside those of recipes."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Figure, source
from binade.app.questions.shared import distribution_charts
from binade.app.questions.shared.distributions import Distribution, boxes, distributions, log2_histogram, magnitudes
from binade.app.report.section import Section
from binade.app.view.params import TITLES
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from binade.data.words.text import counted

QUICK = "quick_analysis"  # a file beside the folders of the sections
SPREAD = "How far the magnitudes of each group reach."
COMPARED = "The same operands in each format that they were scored in, and what recipes cost."
PANELS = (None, "quant_type", "layer_type", "operation")
STATISTICS, COMPARISONS = "statistics", "comparisons"


def quick_analysis(opened: Catalog, where: Filter) -> Figure | None:
    """The values of all tensors, and those of the tensors of each quant type, layer type and operation, as one picture;
    None without finite nonzero values."""
    panels, tables = [], []
    for by in PANELS:
        found = _groups(opened, where, by)
        table = log2_histogram(found)
        if table.empty:
            return None
        title = "the values of all tensors" if by is None else f"the tensors by {TITLES[by].lower()}"
        chart = distribution_charts.magnitudes(table, TITLES[by] if by else "values", title)
        panels.append(chart.properties(width=520, height=240))
        tables.append(table.assign(by=by or "all"))
    heading = style.title("Quick analysis", where.sentence())
    caption = source(where, f"{counted(opened.totals(where).tensors, 'tensor')} (from sketches)")
    chart = plot.apart(heading, panels, 2)
    return Figure(QUICK, chart, pd.concat(tables, ignore_index=True), caption)


def statistics(opened: Catalog, where: Filter, fields: tuple[str, ...]) -> Section:
    """The spread of the magnitudes of each group of the fields."""
    figures = []
    for by in fields:
        table = boxes([magnitudes(d) for d in _groups(opened, where, by)])
        if table.empty:
            continue
        chart = distribution_charts.boxes(table, where.sentence(), TITLES[by], log2=True)
        caption = source(where, f"{counted(len(table), 'group')} (from sketches)")
        height = distribution_charts.boxes_height(table)
        figures.append(Figure(f"boxes_{by}", chart, table, caption, height=height))
    return Section(STATISTICS, "Statistics", figures, text=SPREAD)


def divided(question: str, section: Section) -> list[Section]:
    """A section of a question; of Explore, the figures of formats apart from it, beside the comparisons of recipes."""
    moved = [figure for figure in section.figures if question == "explore" and figure.name.startswith("formats")]
    if not moved:
        return [section]
    kept = [figure for figure in section.figures if all(figure is not other for other in moved)]
    return [replace(section, figures=kept), Section(COMPARISONS, "Comparisons", moved, text=COMPARED)]


def _groups(opened: Catalog, where: Filter, by: str | None) -> list[Distribution]:
    """The distributions of the groups of a field, named with their number of tensors; those with the most values if
    they are too many to draw."""
    counts = opened.moments(where, by).set_index("group")["tensors"] if by else None
    found = [d for d in distributions(opened, where, by) if d.total]
    found = sorted(found, key=lambda d: -d.total)[: style.MAX_GROUPS]
    known = {} if counts is None else {str(group): int(count) for group, count in counts.items()}
    return [
        replace(d, group=f"{d.group} ({counted(known[d.group], 'tensor')})") if d.group in known else d for d in found
    ]
