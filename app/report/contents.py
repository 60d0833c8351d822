"""What the report of a filter holds: views, each drawn as on its page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from binade.app.draw.formatting import first_formats
from binade.app.measures.registry import recorded_measures
from binade.app.measures.values import ERRORS
from binade.app.pages.registry import PART
from binade.app.questions.attention.compute import NAMES
from binade.app.questions.explore.compute import RAW
from binade.app.questions.explore.question import REPORTED_BY
from binade.app.questions.question import Question
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.runs import matching
from binade.app.questions.shared.selection import Of, worst
from binade.app.report import overview, runs
from binade.app.report.section import ReportTable, Section, slug
from binade.app.view.view import View
from binade.data.index.catalog import STATISTICS, USED, Catalog
from binade.data.words.filter import Filter

FOLDERS = {"map": "heatmaps", "explore": "distributions", "recipes": "comparisons", "attention": "attention_maps"}
# Measures of maps, besides those that only some runs have: of each format, and of the values.
OF_FORMAT = ("sqnr_vs_normal", "sqnr_db", "flushed_error_share", "saturated_error_share")
OF_VALUES = ("absmax", "dynamic_range", "crest_factor", "zero_share")
MOST_ROWS = 200  # of a table
CHOSEN = ("normality", "pair")  # compare a tensor with one that must be chosen


def contributions(opened: Catalog, where: Filter, command: str) -> Iterator[Section]:
    """The report of a filter's selection, or of the losses of a root without tensors. command: the command line that
    made the report."""
    recorded = opened.totals(where).tensors > 0
    for question in QUESTIONS:
        before: dict[str, pd.DataFrame] = {}
        for view in views(opened, where, question) if recorded else losses_views(where, question):
            section = _section(opened, question, view, before)
            yield from overview.divided(question.name, section)
    if recorded:
        yield overview.statistics(opened, where, divided_by(opened, where))
    yield runs.section(opened, matching(opened, where, opened.runs()))
    yield runs.definitions()
    yield runs.made_with(command)


def folder(question: Question) -> str:
    """The name of the question's section and of its folder."""
    return FOLDERS.get(question.name, question.name)


def losses_views(where: Filter, question: Question) -> list[View]:
    """The views of a question in a root that has losses alone."""
    return [View(question.page, {PART: [question.view]}).filtered(where)] if question.empty else []


def divided_by(opened: Catalog, where: Filter) -> tuple[str, ...]:
    """The fields of REPORTED_BY that divide the selection, and quant_type."""
    facets = opened.facets(where)
    return tuple(by for by in REPORTED_BY if by == "quant_type" or len(_chosen(facets, where, by)) > 1)


def views(opened: Catalog, where: Filter, question: Question) -> list[View]:
    """The views of a question: as used if the runs round anything, and in each format, if it depends on one; of the
    tensor that loses most in it."""
    part = View(question.page, {PART: [question.view]}).filtered(where)
    if question.name == "explore":
        return [part.changed(values=RAW, by=by) for by in divided_by(opened, where)]
    formats = first_formats(opened, where)
    shown = (*[USED] * bool(opened.formats_used(where)), *formats)
    if question.name == "map":
        of_formats = [part.changed(metric=metric, format=fmt) for fmt in shown for metric in OF_FORMAT]
        others = [name for name in recorded_measures(opened) if name not in (*ERRORS, *STATISTICS)]
        return [*of_formats, *(part.changed(metric=metric) for metric in (*OF_VALUES, *others))]
    if question.of is not Of.TENSOR:
        return [part.changed(format=fmt) for fmt in formats] if "format" in question.scope and formats else [part]
    if question.slow or question.name in CHOSEN:
        return []
    within = where
    if question.name == "attention":
        names = [name for name in NAMES if not where.tensor_name or name in where.tensor_name]
        within = replace(where, tensor_name=tuple(names))
        if not names or not opened.totals(within).tensors:
            return []
    operands = [(fmt, *worst(opened, within, fmt)) for fmt in shown or ("",)]
    return [part.changed(format=fmt, tensor=tensor, gemm=gemm) for fmt, tensor, gemm in operands]


def _chosen(facets: dict[str, list[object]], where: Filter, field: str) -> list[object]:
    """The values of a field in the selection: `facets` leaves each field's own restriction out."""
    wanted = getattr(where, field)
    return [value for value in facets.get(field, []) if not wanted or value in wanted]


def _section(opened: Catalog, question: Question, view: View, before: dict[str, pd.DataFrame]) -> Section:
    """What a view adds to the section of its question, besides figures and tables that are as in a view `before`.
    Their names tell them from those of others."""
    drawn = view.draw(opened)
    of_format = [text for name in ("metric", "by", "format") for text in view.params.get(name, [])]
    ending = "".join(f"_{slug(text)}" for text in of_format)
    figures, tables = [], []
    for figure in drawn.figures:
        if _is_new(before, f"{question.name} {figure.name}", figure.table):
            figures.append(replace(figure, name=f"{figure.name}{ending}"))
    if figures and of_format and drawn.verdict:
        figures[0] = replace(figures[0], note=f"{drawn.verdict} {figures[0].note}".strip())
    for name, frame in drawn.tables.items():
        if _is_new(before, f"{question.name} table {name}", frame):
            note = f"The first {MOST_ROWS:,} of {len(frame):,} rows." if len(frame) > MOST_ROWS else ""
            note = " ".join(filter(None, (f"Of {drawn.scope.sentence}." if drawn.scope else "", note)))
            title = ": ".join(filter(None, (name[:1].upper() + name[1:], ", ".join(of_format))))
            tables.append(ReportTable(f"{folder(question)}{ending}_{slug(name)}", title, frame.head(MOST_ROWS), note))
    text = f"{question.text} {question.help}."
    return Section(folder(question), question.title, figures, tables, text, drawn.verdict, drawn.problems)


def _is_new(before: dict[str, pd.DataFrame], name: str, frame: pd.DataFrame) -> bool:
    known, before[name] = before.get(name), frame
    return known is None or not known.equals(frame)
