"""Overview: what was recorded, the questions that the app answers, and a first look."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import streamlit as st

from binade.app import show
from binade.app.address import go, link, plain, write
from binade.app.figure import Drawn, Figure
from binade.app.formatting import big, bytes_text, first_formats
from binade.app.pages import overview
from binade.app.params import Params
from binade.app.questions.registry import QUESTIONS
from binade.app.state import shared, view_page
from binade.data.cache import Done
from binade.data.catalog import Catalog, Totals
from binade.data.filter import Filter

TOUR_RUNS = 8  # what `make run` collects: with more runs, the tour is not offered
TOUR: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (
        "worst",
        "1. Rank the tensors",
        "Choose a format. The tensor at the top loses the most precision in it.",
        {},
    ),
    (
        "tensor",
        "2. See why",
        "Its values on the format’s grid, and which of them underflow or saturate.",
        {"view": "why"},
    ),
    ("tensor", "3. Try other formats", "The same tensor in other formats, scales and block sizes.", {"view": "whatif"}),
    ("recipes", "4. Compare the runs", "What each format did to the loss and the gradients.", {}),
)


@view_page("overview", "Overview", overview.params)
def page(opened: Catalog, where: Filter, params: Params) -> None:
    write(where, params)
    formats = first_formats(opened)
    totals = opened.totals(where)
    if totals.runs <= TOUR_RUNS:
        _tour(where)
    _totals(opened, totals, where)
    _questions(where)
    _panels(opened, where)
    if formats:
        _worst(opened, where, formats)


def _tour(where: Filter) -> None:
    """Four steps through the app, until they are hidden in this tab."""
    if st.session_state.get("tour_hidden"):
        return
    with st.container(border=True, key="tour"):
        head, hide = st.columns([10, 1], vertical_alignment="center")
        head.markdown("**New to Binade?** Four steps lead from these runs to a finding.")
        if hide.button("Hide", key="tour_hide", type="tertiary", help="Hide these steps in this tab"):
            st.session_state["tour_hidden"] = True
            st.rerun()
        for cell, (name, title, text, address) in zip(st.columns(4, gap="medium"), TOUR, strict=True):
            with cell:
                link(name, title, where, **address)
                st.caption(text)


def _totals(opened: Catalog, totals: Totals, where: Filter) -> None:
    runs = opened.runs()
    st.caption(f"Shown: {plain(where.sentence())}.")
    cells = st.columns(5)
    cells[0].metric("Runs", f"{totals.runs:,}", border=True)
    cells[1].metric("Tensors", f"{totals.tensors:,}", border=True)
    cells[2].metric("Values", big(totals.elements), border=True)
    help = "Tensors whose values are on disk; for the others, only statistics and sketches are kept"
    cells[3].metric("With values", f"{totals.with_values:,}", border=True, help=help)
    cells[4].metric("Size", bytes_text(totals.nbytes), border=True)
    st.caption(_what_is_missing(runs, totals))


def _what_is_missing(runs: pd.DataFrame, totals: Totals) -> str:
    """What was dropped or sampled when the runs were recorded."""
    dropped = totals.tensors - totals.with_values
    parts = ["Every tensor has its values on disk."]
    if dropped:
        parts = [
            f"{dropped:,} tensors have no values on disk (over the byte budget, or not requested). Their statistics, "
            "sketches and scores are complete."
        ]
    configs = [json.loads(text) for text in runs["config"]]
    if some := [c for c in configs if _less(c, "collect_micro_batches", "micro_batches")]:
        parts.append(f"{len(some)} of {len(runs)} runs recorded only some of their micro-batches.")
    if some := [c for c in configs if (c.get("capture_every") or 1) > 1]:
        parts.append(f"{len(some)} of {len(runs)} runs recorded only some of their iterations.")
    unfinished = int((~runs["state"].isin(["done", "running"])).sum())
    if unfinished:
        parts.append(f"{unfinished} of {len(runs)} runs did not end normally: see Runs.")
    return " ".join(parts)


def _less(config: dict[str, Any], name: str, than: str) -> bool:
    a, b = config.get(name), config.get(than)
    return isinstance(a, int) and isinstance(b, int) and a < b


def _questions(where: Filter) -> None:
    st.markdown("**What do you want to know?**")
    columns = st.columns(3, gap="xsmall")
    listed = [question for question in QUESTIONS if question.on_overview]
    for index, question in enumerate(listed):
        with columns[index * 3 // len(listed)]:
            link(question.page, question.text, where, question.icon, question.help, **question.address)


def _panels(opened: Catalog, where: Filter) -> None:
    cells = [*st.columns(2, gap="large"), *st.columns(2, gap="large")]
    request = ("overview panels", where)
    drawn = shared(opened, request, lambda done: Drawn(tuple(overview.panels(opened, where))).prepared())
    found = {figure.name: figure for figure in drawn.figures}
    placed = [found.get(f"panel_{by}") for by, _ in overview.PANELS]
    for index, (cell, figure) in enumerate(zip(cells, placed, strict=True)):
        with cell:
            if figure:
                left = placed[index - 1] if index % 2 else None
                show.draw(figure, left=left, below=[*placed[2:], None, None][index])
            else:
                st.info("Nothing to draw: there are no finite nonzero values.", icon=":material/block:")


def _worst(opened: Catalog, where: Filter, formats: tuple[str, ...]) -> None:
    fmt = st.segmented_control("Worst tensors if rounded to", formats, key="format", required=True)

    def compute(done: Done) -> Figure | None:
        figure = overview.worst(opened, where, fmt or formats[0])
        return Drawn((figure,)).prepared().figures[0] if figure else None

    figure = shared(opened, ("overview worst", where, fmt), compute)
    if figure is None:
        st.caption("Only the operands of a GEMM are scored, and the filter selects none.")
    elif chosen := show.draw(figure):
        go("tensor", where, tensor=chosen, format=fmt or formats[0])
