"""binade compare: the tables of Runs › Recipes, as text, CSV or Markdown.

data.comparison and data.ablation compute them, for the page as well. Text and Markdown have a section for each model,
size and dataset. CSV (RFC 4180) has one table in full precision, a row per recipe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from binade.collector.cli.output import TextTable, aligned, csv_text, markdown, wrapped
from binade.collector.recipes.ladder import ladders
from binade.collector.recipes.parse import gradients_note
from binade.data.compare import comparison
from binade.data.compare.ablation import JUDGED, RUNG_FIELDS, Ablation, ablation, iterations_of
from binade.data.compare.comparison import (
    MOST_RUNS,
    OPERAND_FIELDS,
    RECIPE_FIELDS,
    RUN_FIELDS,
    SIDES,
    Comparison,
    comparable_runs,
    gradient_pairs,
    left_out,
    measured_sentence,
    no_reference,
    operand_table,
    operands_left,
    with_effects,
)
from binade.data.compare.gradients import COMPARED, GRADIENTS, gradient_summary
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import OF_MODEL, losses_of, runs_with_references
from binade.data.run.notes import rounded_twice
from binade.data.words.fields import FIELDS, Field
from binade.data.words.text import markdown_text, number_text
from binade.terminal import one_line

GRADIENT_FIELDS = (
    Field("label", "Run", format=""),
    Field("tensors", "Pairs", format="d"),
    *(FIELDS[name] for name in COMPARED),
)
ALONE = "Recipes: rounding alone, and what training adds"
MEASURED = "Recipes: rounding alone, as binade measure found it"
HELD_OUT = "Recipes: gap to bf16 on held-out sequences"
RECIPE_TABLES = {
    "Recipes: gap to bf16": ("label", "outcome", "seeds", "gap", "gap_interval", "left"),
    ALONE: ("label", "alone", "alone_interval", "added", "added_interval"),
    MEASURED: ("label", "effect", "effect_interval", "effect_on"),
    HELD_OUT: ("label", "held_out", "held_out_interval", "held_out_slope", "held_out_slope_interval", "held_out_at"),
}
IF_KNOWN = {ALONE: "alone", MEASURED: "effect", HELD_OUT: "held_out"}  # the column without which a table is left out
LEGEND = (
    *(f"{field.title}: {field.definition}." for field in (*RECIPE_FIELDS, *OPERAND_FIELDS[:3]) if field.definition),
    f"Steps: {JUDGED} A step of an ablation is compared with the step before, or with the full recipe.",
)


@dataclass(frozen=True)
class CompareSection:
    """
    title      what the runs share: model, size and dataset
    model      OF_MODEL
    compared   None if no run can be compared
    recipes    of `with_effects`
    operands   of `operand_table`
    ablations  with the name of each ladder
    gradients  a row per run, of the first recorded iteration
    notes      sentences below the tables
    """

    title: str
    model: Mapping[str, Any]
    compared: Comparison | None
    recipes: pd.DataFrame = field(default_factory=pd.DataFrame)
    operands: pd.DataFrame = field(default_factory=pd.DataFrame)
    ablations: tuple[tuple[str, Ablation], ...] = ()
    gradients: pd.DataFrame | None = None
    at: int = 0
    notes: tuple[str, ...] = ()


def sections(opened: Catalog) -> list[CompareSection]:
    """The comparisons of a root, in the order of their first runs. Raises CatalogError, OSError."""
    runs = opened.runs()
    runs = runs[runs["recipe"].notna()]
    groups = runs.iloc[::-1].groupby(list(OF_MODEL), dropna=False, sort=False)
    return [_section(opened, group.iloc[::-1], dict(zip(OF_MODEL, key, strict=True))) for key, group in groups]


def _section(opened: Catalog, runs: pd.DataFrame, model: dict[str, Any]) -> CompareSection:
    model = {name: None if pd.isna(value) else str(value) for name, value in model.items()}
    named = " ".join(filter(None, (model["model"] or "unnamed model", model["size"])))
    title = one_line(f"{named}, {model['dataset'] or 'unnamed data'}")
    table = runs_with_references(runs, opened.parts())
    if problem := no_reference(table):
        return CompareSection(title, model, None, notes=tuple(dict.fromkeys((problem, *left_out(table)))))
    compared = comparison.compare(table, losses_of(opened, table["run_id"], lost=True))
    recorded = iterations_of(opened, GRADIENTS[0])
    at = recorded[0] if recorded else None
    gradients, unread = _gradients(opened, table, at) if at is not None else (None, [])
    name = GRADIENTS[0] if gradients is not None else ""
    made = [
        (ladder.name, study)
        for ladder in ladders(table["recipe"].dropna())
        if (study := ablation(opened, compared.table, compared.gaps, ladder, name, at))
    ]
    configs = runs.set_index("run_id")["config"].map(json.loads)
    notes = [
        *compared.sentences,
        measured_sentence(opened, compared),
        rounded_twice(configs[recipe.run_id] for recipe in compared.recipes),
        gradients_note(configs[recipe.run_id] for recipe in compared.recipes),
        compared.unknown,
        *left_out(table),
        operands_left(compared.recipes),
        *unread,
        *(sentence for _, study in made for sentence in (study.verdict, *study.problems)),
        *dict.fromkeys(note for _, study in made for note in study.notes),
    ]
    notes = [one_line(note) for note in notes if note]
    operands = operand_table(opened, compared.recipes)
    recipes = with_effects(opened, compared)
    return CompareSection(title, model, compared, recipes, operands, tuple(made), gradients, at or 0, tuple(notes))


def _gradients(opened: Catalog, table: pd.DataFrame, at: int) -> tuple[pd.DataFrame | None, list[str]]:
    """(the gradients of an iteration compared with bf16's, by run; what to say of them)."""
    runs = comparable_runs(table)
    notes = [f"Gradients of the {MOST_RUNS} newest of {len(runs)} runs."] * (len(runs) > MOST_RUNS)
    runs = runs.tail(MOST_RUNS)
    pairs, unread = gradient_pairs(opened, runs, "label", GRADIENTS[0], at)
    if unread:
        notes.append(f"{unread} pairs of gradients could not be read and are left out.")
    if pairs.empty:
        return None, notes
    summary = gradient_summary(pairs, ["group"]).rename(columns={"group": "label"})
    return summary, notes


# What is printed


def cells(frame: pd.DataFrame, fields: Iterable[Field], title: str) -> TextTable:
    """A table of the fields of a frame that have a value."""
    shown = [field for field in fields if field.name in frame and frame[field.name].notna().any()]
    rows = [tuple(_cell(row[field.name], field) for field in shown) for row in frame.to_dict("records")]
    return TextTable(title, tuple(field.title for field in shown), tuple(rows))


def _cell(value: Any, field: Field) -> str:
    if not field.format:
        return "–" if pd.isna(value) else one_line(value)
    return number_text(None if pd.isna(value) else float(value), field.format)


def tables(section: CompareSection) -> Iterator[TextTable]:
    """The tables of a section."""
    if section.compared is None:
        return
    for title, names in RECIPE_TABLES.items():
        if title in IF_KNOWN and section.recipes[IF_KNOWN[title]].isna().all():
            continue
        fields = [field for field in RECIPE_FIELDS if field.name in names]
        yield cells(section.recipes, fields, f"{title}, in nats per token")
    yield cells(section.compared.costs, RUN_FIELDS, "Runs: gap to bf16, in nats per token")
    if not section.operands.empty:
        yield cells(section.operands, OPERAND_FIELDS, "Operands: SQNR, dB / flushed to zero, % / saturated, %")
    for name, study in section.ablations:
        yield cells(study.table, RUNG_FIELDS, f"Ablation of {one_line(name)}: mean gap to bf16, in nats per token")
    if section.gradients is not None:
        yield cells(section.gradients, GRADIENT_FIELDS, f"Gradients compared with bf16, iteration {section.at}")


def render(sections: Iterable[CompareSection], kind: str) -> str:
    """Sections as "text", "csv" or "markdown", the last line ended."""
    if kind == "csv":
        return _csv(sections)
    text = kind == "text"
    heading: Callable[[str], str] = wrapped if text else lambda title: f"### {markdown_text(title)}"
    note: Callable[[str], str] = (lambda line: wrapped(line, "* ")) if text else lambda line: f"* {markdown_text(line)}"
    blocks = []
    for section in sections:
        blocks += [heading(section.title), *map(aligned if text else markdown, tables(section))]
        if section.notes:
            blocks.append("\n".join(map(note, section.notes)))
    legend = map(wrapped, LEGEND) if text else (f"* {markdown_text(line)}" for line in LEGEND)
    return "\n\n".join([*blocks, "\n".join(legend)]) + "\n"


def _csv(sections: Iterable[CompareSection]) -> str:
    """A row per recipe, empty where a figure is not known."""
    rows: list[dict[str, Any]] = []
    columns: dict[str, None] = dict.fromkeys(OF_MODEL)
    for section in sections:
        if section.compared is None:
            continue
        table = section.recipes
        if not section.operands.empty:
            numbers = section.operands.drop(columns=["label", *(side for side in SIDES if side in section.operands)])
            table = table.merge(numbers, on="run_id", how="left")
        columns |= dict.fromkeys(name for name in map(str, table) if not name.endswith("_interval"))
        for row in table.astype(object).where(table.notna(), None).to_dict("records"):
            rows.append(dict(section.model) | {name: row[name] for name in columns if name in row})
    return csv_text(rows, columns)
