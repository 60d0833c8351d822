"""The Map: the heat maps with the panel of the selected cell beside them and the iterations below, as one component."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from binade.app import address
from binade.app import show as show_items
from binade.app.figure import Table
from binade.app.formatting import losses_of, plain
from binade.app.questions import layout
from binade.app.questions.map import charts, compute
from binade.app.questions.map.compute import ITERATION, LAYER, Row
from binade.app.questions.map.panel import panel
from binade.app.questions.map.question import MAP, Map, columns_of, map_of, places, verdict
from binade.app.questions.shared.event_marks import events_of
from binade.app.questions.shared.scope import scope_of
from binade.app.sessions import draft
from binade.app.view import Reading, View, pool_of
from binade.data.access import read_only
from binade.data.catalog import Catalog
from binade.data.evidence import Sentence
from binade.data.filter import Filter
from binade.data.text import number_text

KINDS = 14  # of operands, of which each value is a dot
MOST_LOSSES = 200  # points of the line of losses
HERE = Path(__file__)


@st.cache_resource
def _component() -> Callable[..., Any]:
    css, js = (HERE.with_name(f"map.{end}").read_text(encoding="utf-8") for end in ("css", "js"))
    return st.components.v2.component("binade_map", html='<div class="map"></div>', css=css, js=js)


@st.fragment
def show(opened: Catalog, view: View, reading: Reading) -> None:
    """The map and its panel. A click on a cell draws only these again, any other change the whole page."""
    now = address.shown() or view
    if now.changed(cell=None) != view.changed(cell=None):
        st.rerun()
    view = now
    values = {name: reading.values[name] for name in MAP.uses}
    key = (reading.where, repr(sorted(values.items(), key=str)), opened.versions(reading.where.run_id))
    pool = pool_of(opened, MAP, reading.where, values)
    found = opened.kept(("map", key), lambda: map_of(opened, reading.where, values), pool)
    if isinstance(found, str):
        st.info(plain(found), icon=":material/block:")
        layout.explain_absence(opened, view, reading)
        return
    answer: Sentence = opened.kept(("map verdict", key), lambda: verdict(opened, found))
    with st.container(horizontal=True, vertical_alignment="center", key="map_head"):
        show_items.verdict(answer)
        address.link(view.at("map", "advise"), "What should I use?", ":material/tune:", width="content")
        st.space("stretch")
        for control in MAP.controls_of(layout.selected_of(opened, reading), reading.values):
            width = 190 if control.widget == "list" else "content"
            layout.show_control(control, reading.values[control.name], label_visibility="collapsed", width=width)
    if found.left_out:
        st.caption(found.left_out)
    cell = _chosen(found, next(iter(view.params.get("cell", ())), ""))
    fmt = reading.values["format"] or ""
    shown = None
    if cell is not None:
        at = ("map panel", str(cell["tensor_id"]), str(cell["row"]), int(cell[found.across]), fmt, key)
        pool = pool_of(opened, MAP, reading.where, reading.values | {"tensor": str(cell["tensor_id"])})
        shown = opened.kept(at, lambda: panel(opened, found, cell, fmt), pool)
    data = opened.kept(("map data", key, opened.progress), lambda: _data(opened, found))
    data = data | {"selected": None if cell is None else _name(cell, found.across), "panel": shown}
    data["pin"] = not read_only()
    result = _component()(
        key="map", data=data, height="content", on_selected_change=_select, on_iteration_change=_to_iteration,
        **{f"on_{name}_change": lambda: None for name in ("open", "pin", "compare")},
    )  # fmt: skip
    if cell is not None and result.open:
        address.go(view.at("tensor", tensor=cell["tensor_id"]))
    if cell is not None and result.compare:
        where = {name: [cell[name]] for name in (LAYER,) if name in cell}
        names = {"module": opened.rows_of([cell["tensor_id"]])["module"].tolist(), "tensor_name": [cell["tensor"]]}
        address.go(view.at("explore", by="run_id").changed(**where, **names, run_id=None))
    if result.pin or st.session_state.pop("pin_first", False):
        draft.pin_chart("map", found.title)
        st.rerun()
    if st.toggle("As a chart and tables, to save them", key="map_tables"):
        if chart := view.draw(opened).get("map"):
            show_items.draw(chart, pin=False)
        layout.open_tensor(show_items.table(places(found)), view)
        show_items.table(Table("kinds", found.kinds, columns_of(found.measure)))


def _select() -> None:
    address.change(cell=st.session_state["map"].selected)


def _to_iteration() -> None:
    address.change(iteration=st.session_state["map"].iteration)


def _name(cell: pd.Series, across: str) -> str:
    return f"{cell['row']}/{int(cell[across])}"


def _chosen(found: Map, name: str) -> pd.Series | None:
    """The cell of this name, else the worst one."""
    table = found.table
    named = table[(table["row"] + "/" + table[found.across].astype(str)) == name]
    if named.empty:
        known = table.dropna(subset=["shade"])
        named = known.loc[[known["shade"].idxmax()]] if len(known) else table.head(1)
    return named.iloc[0] if len(named) else None


def _data(opened: Catalog, found: Map) -> dict[str, Any]:
    """What the component draws, as JSON: rows and their cells by GEMM, the kinds of operands, and the iterations."""
    table, measure = found.table, found.measure
    columns = sorted(table[found.across].unique().tolist())
    at = {column: index for index, column in enumerate(columns)}
    by_row = dict(iter(table.groupby("row")))
    blocks = []
    for gemm in (*compute.GEMMS, compute.OTHER):
        own = [row for row in found.rows if row.gemm == gemm]
        if not own:
            continue
        rows = []
        for row in own:
            cells: list[Any] = [None] * len(columns)
            for each in by_row[row.key].to_dict("records"):
                shade = None if math.isnan(each["shade"]) else round(float(each["shade"]), 3)
                between = _between(each, found)
                cells[at[each[found.across]]] = [shade, each["label"], between, int(each["tensors"])]
            rows.append({"id": row.key, "group": _group(row), "name": row.tensor.replace("_", " "), "cells": cells})
        blocks.append({"title": charts.TITLES[gemm], "rows": rows})
    return {
        "metric": found.title,
        "definition": f"{measure.label}: {measure.definition}",
        "word": "layer" if found.across == LAYER else "iteration",
        "columns": columns,
        "blocks": blocks,
        "legend": charts.legend(measure, table["value"], found.diverging),
        "dots": _dots(found),
        "iterations": _iterations(opened, found),
        "scope": scope_of(opened, found.where),
    }


def _group(row: Row) -> str:
    return f"{charts.product(row)} {row.expert}".strip()


def _between(cell: dict[Any, Any], found: Map) -> str:
    """The interval of a cell, in words; "" if it has none."""
    if pd.isna(cell["low"]) or (cell["tensors"] < 2 and found.measure.key not in compute.OVER_SEQUENCES):
        return ""
    word = compute.OVER_SEQUENCES.get(found.measure.key, "10th to 90th percentile")
    return f"{found.measure.text(cell['low'])} to {found.measure.text(cell['high'])}, {word}"


def _dots(found: Map) -> dict[str, Any]:
    """One dot per column and kind of operand, the worst kinds first; places from 0 to 1."""
    kinds = found.kinds["kind"].head(KINDS)
    table = found.table.assign(kind=found.table["product"] + " " + found.table["tensor"])
    table = table[table["kind"].isin(kinds)]
    number = table["value"].astype(float)
    known = number[number.abs() < math.inf]
    log = found.measure.log and bool((known > 0).all()) and len(known) > 0
    place = known.map(math.log10) if log else known * found.measure.factor
    low, high = (float(place.min()), float(place.max())) if len(place) else (0.0, 1.0)
    low, high = (min(low, 0.0), high) if not log and not found.against and low >= 0 else (low, high)
    span = (high - low) or 1.0
    rows = []
    by_kind = dict(iter(table.assign(place=(place - low) / span).dropna(subset=["place"]).groupby("kind")))
    for kind in kinds:
        finite = by_kind.get(kind, table.head(0).assign(place=math.nan))  # none of an operand that is exact everywhere
        dots = [
            [round(at, 4), int(x), text] for at, x, text in finite[["place", found.across, "label"]].to_numpy(object)
        ]
        rows.append({"name": str(kind).replace("_", " "), "dots": dots})
    ticks = charts.ticks(low, high) if high > low else []
    texts = [number_text(10**tick) if log else found.measure.with_unit(number_text(tick)) for tick in ticks]
    return {
        "rows": rows, "more": max(0, len(found.kinds) - KINDS),
        "ticks": [[(tick - low) / span, text] for tick, text in zip(ticks, texts, strict=True)],
    }  # fmt: skip


def _iterations(opened: Catalog, found: Map) -> dict[str, Any]:
    """The recorded iterations of the run, with its losses and events."""
    run = next(iter(found.where.run_id), "")
    recorded = opened.distinct((ITERATION,), Filter(run_id=(run,) if run else ()))[ITERATION].dropna().astype(int)
    losses = [(int(each["iteration"]), float(each["loss"])) for each in losses_of(opened, [run])[run]] if run else []
    step = -(-len(losses) // MOST_LOSSES) or 1
    events = events_of({run: opened.root / run}) if run else pd.DataFrame(columns=["iteration", "text"])
    known = events.dropna(subset=["iteration"])
    return {
        "values": sorted(recorded.tolist()),
        "current": found.where.iteration[0] if len(found.where.iteration) == 1 else None,
        "losses": [[at, round(loss, 5)] for at, loss in losses[::step] if math.isfinite(loss)],
        "events": [[int(at), str(text)] for at, text in zip(known["iteration"], known["text"], strict=True)],
    }
