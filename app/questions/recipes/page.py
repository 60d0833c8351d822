"""Recipes: which part costs the most loss, and what becomes of the gradients, against bf16 on the same data."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from binade.app import show
from binade.app.address import plain, write
from binade.app.params import Params
from binade.app.questions.recipes import question
from binade.app.questions.recipes.question import NAMES, VIEWS
from binade.app.questions.shared.runs import PARTS, runs_with_reference
from binade.app.state import view_page
from binade.app.style import MEASURES
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.tensor_kinds import label_of

NOTE = "Runs are compared with the bf16 run of the same model, data, seed and warm-up, iteration by iteration."


@view_page("recipes", "Recipes", question.params)
def page(opened: Catalog, where: Filter, params: Params) -> None:
    st.caption(NOTE)
    view = st.segmented_control("View", VIEWS, key="view", required=True, format_func=lambda name: VIEWS[name])
    table = runs_with_reference(question.runs_of(opened, where), opened.parts())
    if not question.has_reference(table):
        st.info(question.no_reference(table), icon=":material/balance:")
    elif view == "gradients":
        _gradients(opened, where, table)
    else:
        _cost(opened, where, table)
    write(where, params)


def _cost(opened: Catalog, where: Filter, table: pd.DataFrame) -> None:
    drawn = question.cost(opened, where, table)
    if not drawn.figures:
        st.info(drawn.problems[0], icon=":material/hourglass_empty:")
        return
    show.verdict(drawn.verdict)
    show.side_by_side(drawn.figures, gap="large")
    _table(table, drawn.tables["costs"])


def _table(table: pd.DataFrame, costs: pd.DataFrame) -> None:
    shown = costs.merge(table[["run_id", *PARTS]], on="run_id")
    used = [part for part in PARTS if (shown[part] != "bf16").any()]
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    titles = {"linear": "Linear layers", "QK": "QKᵀ", "PV": "PV", "router": "Router"}
    st.dataframe(
        shown,
        hide_index=True,
        placeholder="",
        column_order=("label", *used, "gap", "last", "iterations", "run_id"),
        column_config={
            "label": text("Run", width=160),
            **{part: text(titles[part], width=110) for part in used},
            "gap": number("Mean gap (nats)", format="%+.5f", help="Mean over the iterations of loss − bf16’s loss"),
            "last": number("Last gap (nats)", format="%+.5f"),
            "iterations": number("Iterations", width=90),
            "run_id": text("Directory", width=330),
        },
    )


@st.cache_data(max_entries=64, show_spinner=False)
def _compared(_opened: Catalog, root: str, run_id: str, reference: str, name: str, at: int) -> tuple[Any, int]:
    return question.compare(_opened, run_id, reference, name, at)


def _gradients(opened: Catalog, where: Filter, table: pd.DataFrame) -> None:
    left, right = st.columns([2, 1])
    name = left.segmented_control("Gradient", NAMES, key="gradient", required=True, format_func=label_of) or NAMES[0]
    iterations = question.iterations_of(opened, name)
    if not iterations:
        st.info(f"No {label_of(name)} was recorded.", icon=":material/block:")
        return
    if st.session_state.get("at") not in iterations:
        st.session_state["at"] = iterations[0]
    at = int(right.select_slider("Iteration", iterations, key="at") if len(iterations) > 1 else iterations[0])
    compared = partial(_compared, opened, str(opened.root))
    runs = question.runs_compared(table)
    asked = (name, at, *runs["run_id"])
    if show.stopped("Comparing gradients", asked):
        return
    with show.progress("Comparing gradients", asked) as done:
        drawn = question.gradients(where, table, name, at, iterations, compared, lambda count: done(count, len(runs)))
    if not drawn.figures:
        st.info(drawn.problems[0], icon=":material/block:")
        return
    show.verdict(drawn.verdict)
    show.side_by_side(drawn.figures, gap="large")
    st.caption(f"Gradient bias: {plain(MEASURES['gradient_bias'].definition)}.")
    for problem in drawn.problems:
        st.caption(problem)
