"""What the palette finds, and what keys do: each is a view to open. No Streamlit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pandas as pd

from binade.app.measures.registry import MAP_MEASURES, recorded_measures
from binade.app.pages.registry import PAGES
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.runs import every_run, given_names, run_titles
from binade.app.questions.shared.scope import scoped
from binade.app.questions.shared.selection import listed
from binade.app.view.params import too_long
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.run.access import read_only
from binade.data.words.filter import Filter
from binade.data.words.names import distinct_names
from binade.quant.formats import FORMATS
from binade.quant.specs import known_specs

MOST = 7  # of each kind
KEYS = {
    "Ctrl K": "search tensors, runs, formats, pages and questions",
    "Ctrl Z, Shift Ctrl Z": "undo and redo a choice",
    "j, k": "next and previous tensor",
    "[, ]": "the same operand in the previous and in the next layer",
    "f": "next format that operands were scored in",
    "p": "pin the first chart",
    "?": "this list",
    "← → ↑ ↓, Enter": "on the Map: move the selection, open the tensor",
}
FILTERED = ("module", "operation", "tensor_name", "phase", "quant_type", "layer_type")  # fields that words may name
LAYER = re.compile(r"^l(?:ayer)?0*(\d{1,4})$", re.IGNORECASE)
TWO_WORDS = re.compile(r"\blayer\s+(?=\d)")


@dataclass(frozen=True)
class PaletteEntry:
    """Something to open. kind: what it is, in a word."""

    kind: str
    title: str
    detail: str
    view: View


def find(opened: Catalog, view: View, text: str) -> list[PaletteEntry]:
    """What matches all words of a text: tensors of the view's run first if it names any, then everything else. A filter
    of values that the words name comes before, unless they name a tensor. For an empty text, the pages and the
    questions; for one that is too long, a sentence that says so."""
    if problem := too_long(text, "The search"):
        return [PaletteEntry("limit", problem, "", view)]
    words = TWO_WORDS.sub("layer", text.lower()).split()
    if not words:
        return list(_places(view))
    named = list(islice(_tensors(opened, view, words), MOST))
    filters = _filters(opened, view, words)
    others = (*_places(view), *_others(opened, view))
    entries = [entry for entry in others if all(word in _words_of(entry) for word in words)]
    kinds = dict.fromkeys(entry.kind for entry in entries)
    if filters and "tensor_name" not in filters[0].view.params:
        named, filters = [*filters, *named], []
    return [
        *named,
        *filters,
        *(entry for kind in kinds for entry in islice((e for e in entries if e.kind == kind), MOST)),
    ]


def _words_of(entry: PaletteEntry) -> str:
    return f"{entry.kind} {entry.title} {entry.detail}".lower()


def _places(view: View) -> Iterator[PaletteEntry]:
    for page in PAGES.values():
        for part in page.parts.values():
            if part.writes and read_only():
                continue
            title = page.title if part.name == page.first else f"{page.title} › {part.title}"
            if not part.question:
                yield PaletteEntry("page", title, "", view.at(page.name, part.name))
    for question in QUESTIONS:
        yield PaletteEntry("question", question.text, question.place, view.at(question.page, question.view))
    if not read_only():
        yield PaletteEntry(
            "action", "New collection", "train a model and record its tensors", view.at("runs", "collect")
        )


def _others(opened: Catalog, view: View) -> Iterator[PaletteEntry]:
    for spec in known_specs(dict.fromkeys((*opened.scored_formats(), *FORMATS))):
        yield PaletteEntry("format", spec, "on the Map", view.at("map", format=spec))
    for metric in recorded_measures(opened):
        label = MAP_MEASURES[metric].measure.label
        yield PaletteEntry("metric", label, "as color of the Map", view.at("map", metric=metric))
    runs = opened.runs()
    recorded = dict(zip(runs["run_id"], runs["tensors"], strict=True))
    for run_id, title in run_titles(every_run(opened)).items():
        shown = view.at("map" if recorded[run_id] else "runs", run_id=run_id)
        yield PaletteEntry("run", title, run_id, shown)


def _filters(opened: Catalog, view: View, words: list[str]) -> list[PaletteEntry]:
    """The filter of the values that the words name, if every word names one: "L2 backward"."""
    facets = opened.facets()
    values: dict[str, tuple[str, Any]] = {v.lower(): (f, v) for f in reversed(FILTERED) for v in facets.get(f, [])}
    values |= {f"l{layer}": ("layer_index", layer) for layer in facets.get("layer_index", [])}
    chosen: dict[str, Any] = {}
    for word in words:
        if (pair := values.get(LAYER.sub(r"l\1", word))) is None:
            return []
        chosen[pair[0]] = [*chosen.get(pair[0], []), pair[1]]
    where = Filter(**chosen)
    shows = view.page in ("map", "explore", "tensor", "compare")
    at = view if shows else view.at("map")
    return (
        [PaletteEntry("filter", where.sentence(), "" if shows else "on the Map", at.changed(**chosen))] if words else []
    )


def _tensors(opened: Catalog, view: View, words: list[str]) -> Iterator[PaletteEntry]:
    """The tensors of the view's run and iteration that match all words; "L18" is the layer."""
    where = scoped(opened, view.read(opened).where)
    condition, parameters = opened.condition(where)
    clauses = [condition]
    for word in words:
        if layer := LAYER.fullmatch(word):
            clauses.append("layer_index = ?")
            parameters = [*parameters, int(layer[1])]
        else:
            clauses.append("contains(lower(concat_ws(' ', module, tensor_name, operation, phase, layer_type)), ?)")
            parameters = [*parameters, word]
    rows = opened.ask(
        f"SELECT tensor_id FROM tensor WHERE {' AND '.join(clauses)}"
        " ORDER BY layer_index, module, tensor_name, micro_batch, tensor_id LIMIT ?",
        [*parameters, MOST],
    )
    if rows.empty:
        return
    table = opened.rows_of(rows["tensor_id"].tolist())
    labels = distinct_names(table, given_names(opened), long=True)
    for tensor_id in rows["tensor_id"]:
        yield PaletteEntry("tensor", labels[tensor_id], "", view.at("tensor", tensor=tensor_id))


def pressed(opened: Catalog, view: View, key: str) -> View | None:
    """The view that a key opens; None if it means nothing here."""
    reading = view.read(opened)
    if key == "f":
        scored = opened.scored_formats(reading.where)
        if not scored:
            return None
        at = scored.index(reading.values["format"]) + 1 if reading.values["format"] in scored else 0
        return view.changed(format=scored[at % len(scored)])
    if view.page != "tensor":
        return None
    tensor_id = reading.values.get("tensor")
    if tensor_id is None:
        return None
    if key in "jk":
        ids = list(listed(opened, reading.where, tensor_id))
        at = ids.index(tensor_id) + (1 if key == "j" else -1)
        return view.changed(tensor=ids[at], gemm=None) if 0 <= at < len(ids) else None
    return _other_layer(opened, view, tensor_id, -1 if key == "[" else 1)


def _other_layer(opened: Catalog, view: View, tensor_id: str, step: int) -> View | None:
    """The view of the same tensor in the next layer that has it."""
    row = opened.rows_of([tensor_id]).iloc[0]
    names = ("run_id", "iteration", "module", "operation", "phase", "tensor_name", "micro_batch", "rank", "expert")
    same = Filter(**{name: (row[name],) for name in names if pd.notna(row[name])})
    rows = opened.tensors(same).sort_values("layer_index")
    layers = rows["layer_index"].astype(float)
    beyond = rows[layers > float(row["layer_index"])] if step > 0 else rows[layers < float(row["layer_index"])]
    if beyond.empty:
        return None
    return view.changed(tensor=str(beyond.iloc[0 if step > 0 else -1]["tensor_id"]))
