"""Explore: the tensors at the left, worst first; at the right their distribution, a Q–Q plot, and the same operands in
each format. Rows, marks and ranges that are chosen are parameters of the view, so each shows what the others choose."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import pandas as pd
import streamlit as st
from pandas.io.formats.style import Styler

from binade.app import address
from binade.app.figure import Drawn, Table
from binade.app.formatting import plain
from binade.app.params import format_title, in_format
from binade.app.questions import layout
from binade.app.questions.explore.question import EXPLORE, MAX_SELECTED
from binade.app.questions.map.standing_out import FAR
from binade.app.questions.shared.operands import MOST_LISTED, operand
from binade.app.show import fitting_width
from binade.app.style import BAD
from binade.app.view import Reading, View
from binade.data.catalog import Catalog

TABLE = 655  # pixels
WIDTHS = {"by": 245, "law": 205, "rows": 190, "columns": 215}  # pixels of a list with its label
PLACE = ("layer_index", "module", "operation", "phase", "tensor_name")  # what a tensor shares with that of another run


def show(opened: Catalog, view: View, reading: Reading) -> None:
    drawn = layout.drawn_of(opened, view, EXPLORE.slow)
    if drawn is None:
        return
    tensors = next((item for item in drawn.items if isinstance(item, Table) and item.name == "tensors"), None)
    left, right = st.columns([1.28, 2.62], gap="small")
    with left, st.container(key="explore_tensors", gap="xsmall"):
        if tensors is not None:
            _table(opened, tensors, view, reading)
    with right:
        with st.container(key="explore_controls", horizontal=True, vertical_alignment="center", gap="small"):
            for control in EXPLORE.controls_of(layout.selected_of(opened, reading), reading.values):
                width = WIDTHS.get(control.name, 200) if control.widget == "list" else "content"
                layout.show_control(control, reading.values[control.name], width=width)
        rest = tuple(item for item in drawn.items if item is not tensors)
        layout.show_answer(opened, Drawn(rest, drawn.verdict, drawn.problems), view, reading)


def _table(opened: Catalog, table: Table, view: View, reading: Reading) -> None:
    """The tensors; those that the view names are ticked."""
    frame = table.frame
    ids = frame["tensor_id"].tolist()
    ticked = view.params.get("tensor", [])
    fmt = reading.values["format"]
    with st.container(key="explore_actions", horizontal=True, vertical_alignment="center", gap="small"):
        st.caption(f"Worst first, {in_format(fmt)}" if fmt else "By name", width="content")
        within = reading.values["delta"]
        if within:
            st.button(
                plain(f"{within.low:+.3g} to {within.high:+.3g} dB ✕"), key="clear_delta", type="tertiary",
                on_click=address.change, kwargs={"delta": None}, help="Show the operands outside this range too",
            )  # fmt: skip
        if ticked:
            st.button(
                f"Clear {len(ticked)} ✕", key="clear_ticks", type="tertiary", on_click=address.change,
                kwargs={"tensor": None},
            )  # fmt: skip
            st.button(
                "In all runs", key="in_all_runs", type="tertiary", on_click=_in_all_runs, args=(opened, ticked),
                help="The same tensors of all runs, one color per run",
            )  # fmt: skip
            if len(ticked) == 1:
                address.link(view.at("tensor", **_operand(frame, ticked[0])), "Open", width="content")
    default = [index for index, name in enumerate(ids) if name in ticked]
    state = st.session_state
    # If the rows change, or the view was changed elsewhere, the view determines which rows are ticked.
    known = (hash(tuple(ids)), tuple(ticked))
    if state.get("tensors_known") != known:
        state["tensors_visit"] = state.get("tensors_visit", 0) + 1
        state["tensors_known"] = known
    key = f"tensors_{state['tensors_visit']}"

    def choose() -> None:
        chosen = [ids[index] for index in state[key]["selection"]["rows"] if index < len(ids)]
        if len(chosen) > MAX_SELECTED:
            st.toast(f"{len(chosen)} tensors are ticked; the first {MAX_SELECTED} are drawn.", icon=":material/info:")
        chosen = chosen[:MAX_SELECTED]
        state["tensors_known"] = (known[0], tuple(chosen))
        address.change(tensor=chosen)

    shown, config = opened.kept(("explore table", known[0], reading.values["format"]), lambda: _shown(frame, reading))
    st.dataframe(
        shown, key=key, hide_index=True, height=TABLE, row_height=28, placeholder="–", on_select=choose,
        selection_mode="multi-row", selection_default={"selection": {"rows": default}} if default else None,
        column_config=config,
    )  # fmt: skip
    if table.note:
        _pages(table)


def _pages(table: Table) -> None:
    """Which tensors are listed, and buttons for those before and after them."""
    after = int(table.frame["rank_of"].iloc[0]) - 1
    with st.container(key="explore_pages", horizontal=True, vertical_alignment="center", gap="small"):
        st.caption(plain(table.note), width="content")
        for label, to, exists in (
            ("Previous", max(after - MOST_LISTED, 0), after > 0),
            ("Next", after + MOST_LISTED, len(table.frame) == MOST_LISTED),
        ):
            st.button(
                label, key=f"tensors_{label}", type="tertiary", disabled=not exists, on_click=address.change,
                kwargs={"after": to or None},
            )  # fmt: skip


def _operand(frame: pd.DataFrame, tensor_id: str) -> dict[str, Any]:
    """The operand of a row: the tensor in the GEMM in which it loses most."""
    gemms = frame.loc[frame["tensor_id"] == tensor_id, "gemm"].tolist()
    return operand(tensor_id, next(iter(gemms), None))


def _shown(frame: pd.DataFrame, reading: Reading) -> tuple[Styler, dict[str, Any]]:
    fmt = reading.values["format"]
    columns = st.column_config
    sqnr = frame["sqnr_db"].where(frame["delta"].ne(-math.inf), math.nan)
    delta = frame["delta"].where(frame["delta"].ne(-math.inf), math.nan)
    parts = frame["name"].str.split(" · ", n=1)
    names, of = parts.str[0], parts.str[1].fillna("")
    shown = pd.DataFrame({"name": names, "gemm": frame["gemm"], "sqnr": sqnr, "delta": delta, "of": of})
    config = {
        "name": columns.TextColumn("Tensor", width=fitting_width("Tensor", names, columns.TextColumn)),
        "gemm": columns.TextColumn("GEMM", width=74, help="In which the format loses most of the tensor"),
        "sqnr": columns.NumberColumn("SQNR", width=48, help=f"dB, {format_title(fmt)}" if fmt else None),
        "delta": columns.NumberColumn(
            "Δ", width=52,
            help="SQNR minus that of normally distributed values in the same format, dB",
        ),
        "of": columns.TextColumn(
            "Of", width=fitting_width("Of", of, columns.TextColumn), help="In what tensors of this name differ"
        ),
    }  # fmt: skip
    if not of.any():
        del shown["of"]
    texts: dict[Any, Any] = {"sqnr": _decibels, "delta": partial(_decibels, sign="+")}
    return shown.style.format(texts, na_rep="–").map(_red, subset=["delta"]), config


def _decibels(value: float, sign: Literal["", "+"] = "") -> str:
    return f"{value:{sign}.1f}".replace("-", "−")


def _red(value: Any) -> str:
    return f"color: {BAD}" if value <= -FAR else ""


def _in_all_runs(opened: Catalog, ticked: list[str]) -> None:
    rows = opened.rows_of(ticked)
    kept = {name: [*dict.fromkeys(rows[name].dropna().tolist())] or None for name in PLACE}
    address.change(**kept, run_id=None, tensor=None, delta=None, by="run_id")
