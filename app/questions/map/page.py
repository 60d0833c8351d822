"""The Map: the heat maps with the panel of the selected cell beside them and the iterations below, as one component."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import streamlit as st

from binade.app.draw import show as show_items
from binade.app.draw.components import inline
from binade.app.draw.figure import Figure, Table, Text
from binade.app.draw.formatting import plain
from binade.app.draw.style import MEASURES
from binade.app.frame import address
from binade.app.frame.callbacks import while_shown
from binade.app.measures.map_measure import ITERATION, LAYER
from binade.app.questions import layout
from binade.app.questions.map import charts
from binade.app.questions.map.compute import MapRow
from binade.app.questions.map.panel import panel
from binade.app.questions.map.question import (
    ACROSS,
    MAP,
    Map,
    against_normal,
    columns_of,
    extra_of,
    headline_of,
    map_of,
    places,
    score_of,
    scores_of,
    used_by,
    verdict,
)
from binade.app.questions.map.standing_out import FAR, cause_of, cell_name, exceptions
from binade.app.questions.shared.event_marks import marked_events
from binade.app.questions.shared.operands import GEMMS, OTHER
from binade.app.questions.shared.scope import Scope, scope_of
from binade.app.sessions import open_session
from binade.app.view.params import Interval
from binade.app.view.view import Reading, View, pool_of
from binade.data.index.cache import Done
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import losses_of
from binade.data.run.access import read_only
from binade.data.words.filter import Filter
from binade.data.words.names import operand_name, product_name
from binade.data.words.text import number_text

LISTED = 9  # exceptions
BEYOND = Interval(-1000.0, -FAR)
MOST_LOSSES = 200  # points of the line of losses


def show(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    """The map with its exceptions or the panel of a cell, and below it the questions that belong to it, folded."""
    above = layout.first_of(opened, view, reading)
    if layout.awaited(above, lambda done: _map(opened, above, done)) is None:
        return None
    scope = _show(opened, view, above)
    return layout.show_sections(opened, view, reading) or scope


def _key(opened: Catalog, reading: Reading) -> tuple[Any, ...]:
    """What the map depends on."""
    values = sorted(((name, reading.values[name]) for name in MAP.uses if name not in MAP.selects), key=str)
    return reading.within, repr(values), opened.versions(reading.within.run_id)


def _map(opened: Catalog, reading: Reading, step: Done | None = None) -> Map | str:
    values = {name: reading.values[name] for name in MAP.uses if name not in MAP.selects}
    pool = pool_of(opened, MAP, reading.within, values)
    request = "map", _key(opened, reading)
    return opened.kept(request, lambda: map_of(opened, reading.within, values), pool, step)


@st.fragment
def _show(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    """The map and its panel. A click on a cell draws only these again, any other change the whole page."""
    if st.session_state.pop("map_pinned", False):
        address.redraw()
    view = address.followed(view).changed(view=None)
    where, key, map_ = reading.within, _key(opened, reading), _map(opened, reading)
    if isinstance(map_, str):
        st.info(plain(map_))
        layout.explain_absence(opened, view, reading)
        return Scope(where).totalled(opened, reading.where)
    if map_.left_out:
        st.caption(map_.left_out)
    cell = map_.chosen(next(iter(view.params.get("cell", ())), ""))
    fmt = reading.values["format"] or ""
    shown = None
    if cell is not None:
        at = ("map panel", str(cell["tensor_id"]), str(cell["row"]), int(cell[map_.across]), fmt, key)
        pool = pool_of(opened, MAP, where, reading.values | {"tensor": str(cell["tensor_id"])})
        shown = opened.kept(at, lambda: panel(opened, map_, cell, fmt), pool)
    data = opened.kept(("map data", key, opened.progress), lambda: _data(opened, map_))
    data = data | {"selected": None if cell is None else _name(cell, map_.across), "panel": shown}
    data["pin"] = not read_only()

    def pin() -> None:
        open_session.pin_chart("map", map_.title)
        st.session_state["map_pinned"] = True  # the header says so

    result = inline("map", "questions/map/map")(
        key="map", data=data, height="content", on_selected_change=while_shown("map", _select),
        on_iteration_change=while_shown("map", _to_iteration), on_across_change=while_shown("map", _across),
        on_pin_change=pin,
        **{f"on_{name}_change": lambda: None for name in ("open", "compare", "explore", "advise")},
    )  # fmt: skip
    if result.open:
        address.go(view.at("tensor", **map_.operand_of(str(result.open))))
    if result.advise:
        address.go(view.at("runs", "cost"))
    if result.explore:
        address.go(view.at("explore", format=reading.values["format"], delta=BEYOND))
    if cell is not None and result.compare:
        place = {name: [cell[name]] for name in (LAYER,) if name in cell}
        names = {"module": opened.rows_of([cell["tensor_id"]])["module"].tolist(), "tensor_name": [cell["tensor"]]}
        address.go(view.at("explore", by="run_id").changed(**place, **names, run_id=None))
    if st.session_state.pop("pin_first", False):  # the key p
        pin()
        address.redraw()
    _show_extra(opened, view, map_, cell, key)
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        tables = st.toggle("As a chart and tables, to save them", key="map_tables")
        for control in MAP.controls_of(layout.selected_of(opened, reading), reading.values):
            if control is not ACROSS:  # the map has it
                layout.show_control(control, reading.values[control.name], label_visibility="collapsed", width=190)
    if tables:
        if chart := view.draw(opened).get("map"):
            show_items.draw(chart, pin=False)
        layout.open_tensor(show_items.table(places(map_)), view)
        show_items.table(Table("kinds", map_.kinds, columns_of(map_)))
    return used_by(map_).totalled(opened, reading.where)


def _show_extra(opened: Catalog, view: View, map_: Map, cell: pd.Series | None, key: tuple[Any, ...]) -> None:
    """What the measure draws below the map."""
    name = None if cell is None else _name(cell, map_.across)
    match opened.kept(("map extra", name, key), lambda: extra_of(map_, cell)):
        case Figure() as figure:
            layout.open_tensor(show_items.draw(figure, view=view), view)
        case Table() as table:
            layout.open_tensor(show_items.table(table), view)
        case Text() as text:
            layout.show_text(text)


def _across() -> None:
    address.change(across=st.session_state["map"].across, cell=None)


def _select() -> None:
    address.change(cell=st.session_state["map"].selected)


def _to_iteration() -> None:
    address.change(iteration=st.session_state["map"].iteration)


def _name(cell: pd.Series, across: str) -> str:
    return cell_name(str(cell["row"]), int(cell[across]))


def _data(opened: Catalog, map_: Map) -> dict[str, Any]:
    """What the component draws, as JSON: rows and their cells by GEMM, the kinds of operands, and the iterations."""
    table, measure = map_.table, map_.measure
    columns = sorted(table[map_.across].unique().tolist())
    at = {column: index for index, column in enumerate(columns)}
    by_row = dict(iter(table.groupby("row")))
    blocks = []
    for gemm in (*GEMMS, OTHER):
        operands = [row for row in map_.rows if row.gemm == gemm]
        if not operands:
            continue
        rows = []
        for row in operands:
            cells: list[Any] = [None] * len(columns)
            for cell in by_row[row.key].to_dict("records"):
                shade = None if math.isnan(cell["shade"]) else round(float(cell["shade"]), 3)
                between = _between(cell, map_)
                count = int(cell["tensors"])
                cells[at[cell[map_.across]]] = [shade, cell["label"], between, count, map_.color.summary(count)]
            rows.append({"id": row.key, "group": _group(row), "name": operand_name(row.tensor), "cells": cells})
        blocks.append({"title": charts.TITLES[gemm], "rows": rows})
    return {
        "metric": map_.title,
        "definition": f"{measure.label}: {measure.definition}",
        "word": "layer" if map_.across == LAYER else "iteration",
        "of": map_.of,
        "columns": columns,
        "blocks": blocks,
        "legend": charts.legend(map_.color, measure, table["value"], bool(map_.against)),
        "across": map_.across,
        **_exceptions(opened, map_),
        "iterations": _iterations(opened, map_),
        "scope": scope_of(opened, map_.where),
    }


def _group(row: MapRow) -> str:
    return f"{product_name(row.product)} {row.expert}".strip()


def _between(cell: dict[Any, Any], map_: Map) -> str:
    """The interval of a cell, in words; "" if it has none."""
    if pd.isna(cell["low"]) or (cell["tensors"] < 2 and not map_.color.interval):
        return ""
    return f"{map_.measure.text(cell['low'])} to {map_.measure.text(cell['high'])}, {map_.color.between}"


def _exceptions(opened: Catalog, map_: Map) -> dict[str, Any]:
    """The headline, in texts of which some are links to cells, and the cells worst first: of a map of SQNR those that
    stand out, of any other those with the worst values."""
    said = headline_of(opened, map_)
    if said is None:
        table = map_.worst_first.dropna(subset=["shade"])
        words, count = "worst first", len(table)
        rows = [
            {"id": _name(cell, map_.across), "name": cell["place"], "value": cell["label"], "delta": "", "cause": ""}
            for _, cell in table.head(LISTED).iterrows()
        ]
        return {"headline": [[str(verdict(opened, map_)), ""]], "exceptions": rows, "count": count, "words": words}
    bad = exceptions(against_normal(opened, map_))
    words = (
        f"exceptions · worst first ({len(bad):,} at {number_text(-FAR)} dB or below)" if len(bad) else "no exceptions"
    )
    listed = bad.head(LISTED)
    scores = scores_of(opened, listed)
    names = {row.key: charts.label(row) for row in map_.rows}
    word = "L" if map_.across == LAYER else "iteration "
    rows = []
    for _, cell in listed.iterrows():
        score = score_of(scores, cell, map_.fmt)
        rows.append({
            "id": _name(cell, map_.across),
            "name": f"{word}{int(cell[map_.across])} {names[cell['row']]}",
            "gemm": str(cell["gemm"]),
            "value": "" if score is None else MEASURES["sqnr_db"].quantity(float(score["sqnr_db"])),
            "delta": number_text(float(cell["value"]), ".1f"),
            "cause": "" if score is None else cause_of(score),
        })  # fmt: skip
    segments = [list(segment) for segment in said.segments]
    segments.append([str(verdict(opened, map_)).removeprefix(str(said.sentence)), ""])
    return {"headline": segments, "exceptions": rows, "count": len(bad), "words": words}


def _iterations(opened: Catalog, map_: Map) -> dict[str, Any]:
    """The recorded iterations of the run, with its losses and events."""
    run = next(iter(map_.where.run_id), "")
    recorded = opened.distinct((ITERATION,), Filter(run_id=(run,) if run else ()))[ITERATION].dropna().astype(int)
    losses = [(int(row["iteration"]), float(row["loss"])) for row in losses_of(opened, [run])[run]] if run else []
    step = -(-len(losses) // MOST_LOSSES) or 1
    events = marked_events(opened, {run: run}) if run else pd.DataFrame(columns=["iteration", "text"])
    known = events.dropna(subset=["iteration"])
    return {
        "values": sorted(recorded.tolist()),
        "current": map_.where.iteration[0] if len(map_.where.iteration) == 1 else None,
        "losses": [[at, round(loss, 5)] for at, loss in losses[::step] if math.isfinite(loss)],
        "events": [[int(at), str(text)] for at, text in zip(known["iteration"], known["text"], strict=True)],
    }
