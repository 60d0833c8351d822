"""What a report holds, whatever it is written to: what the questions of the registry add to its sections.

Contributions are made one after the other, so that drawing begins with the first. Everything comes from the index
except attention maps, codes and token maps of a few tensors, and gradients compared with bf16’s, which read values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import altair as alt

from binade.app.figure import Figure
from binade.app.pages.registry import PART
from binade.app.questions.question import Question
from binade.app.questions.registry import QUESTIONS
from binade.app.report import overview, runs
from binade.app.report.section import ReportSelection, Section, Table, slug
from binade.app.view import View
from binade.data.catalog import Catalog
from binade.data.filter import Filter

# The sections that several questions add to; every report of a filter has them.
SECTIONS = (
    Section(
        "overview",
        "Overview",
        text="Magnitudes of all selected values, and of each group.",
        if_empty="Nothing to draw: there are no finite nonzero values.",
    ),
    Section(
        "distributions",
        "Distributions",
        text="Histograms of magnitudes (eighths of a binade) and Q–Q plots against a normal distribution, for each "
        "group of the selection.",
    ),
    Section(
        "heatmaps",
        "Heatmaps",
        text="Every tensor by layer, bright where the error is large; the worst tensor of each format by channel.",
        if_empty="Nothing to draw: no selected tensor belongs to a layer.",
    ),
    Section(
        "comparisons",
        "Comparisons",
        text="What each format would do to the selected operands, as scored when they were captured, forward next to "
        "backward; and each recipe’s loss and gradients compared with those of the bf16 run on the same data.",
    ),
    Section(
        "statistics",
        "Statistics",
        text="Moments over the finite values, ranked places, and how they change in training.",
    ),
    Section(
        "hifp8",
        "HiFloat8",
        text="Without a scale, the precision of a HiFloat8 value depends on its magnitude alone. "
        "First for all values, from sketches; then the codes that the worst tensors use, from their values.",
    ),
    Section(
        "attention_maps",
        "Attention maps",
        text="Entropy, flushed probabilities and scores head by head, and the map of the most focused head.",
        if_empty="The selection contains no attention map with values.",
    ),
)


def contributions(opened: Catalog, where: Filter, command: str) -> Iterator[Section]:
    """The report of a filter's selection, which must not be empty. command: the command line that made the report."""
    yield from SECTIONS
    panels = overview.panels(opened, where)
    yield Section("overview", figures=[replace(f, name=f.name.removeprefix("panel_")) for f in panels])
    selection = ReportSelection(opened, where)
    for question in QUESTIONS:
        yield from question.report(selection) if question.report else [_as_on_its_page(selection, question)]
    yield runs.section(opened, runs.selected(opened, where))
    yield runs.definitions()
    yield runs.made_with(command)


def _as_on_its_page(selection: ReportSelection, question: Question) -> Section:
    """A question in a section of its own, as its page shows it with the default parameters."""
    view = View(question.page, {PART: [question.view]}).filtered(selection.where)
    drawn = view.draw(selection.opened)
    tables = [Table(slug(title), title, table) for title, table in drawn.tables.items()]
    text = f"{question.text} {question.help}."
    name = slug(question.title)
    return Section(name, question.title, drawn.figures, tables, text, drawn.verdict, drawn.problems)


def quick_analysis(panels: Section) -> Figure | None:
    """The overview's panels as one picture; None without panels."""
    if not panels.figures:
        return None
    charts = [figure.chart.properties(width=640, height=280) for figure in panels.figures]
    chart = alt.concat(*charts, columns=2, spacing=46).resolve_scale(color="independent", strokeDash="independent")
    return replace(panels.figures[0], name="quick_analysis", chart=chart)
