"""Worst: any metric over the selection, ranked, by depth, in training, forward against backward."""

from __future__ import annotations

import streamlit as st

from binade.app import show
from binade.app.address import plain, write
from binade.app.figure import Drawn
from binade.app.pages import worst
from binade.app.pages.worst import VIEWS
from binade.app.params import One, Params
from binade.app.questions.shared import boards
from binade.app.questions.shared.selection import Selection
from binade.app.questions.view import show_question
from binade.app.state import view_page
from binade.app.style import MEASURES
from binade.data.catalog import Catalog
from binade.data.filter import Filter


@view_page("worst", "Worst tensors", worst.params)
def page(opened: Catalog, where: Filter, params: Params) -> None:
    formats = params["format"]
    assert isinstance(formats, One)
    _controls(formats)
    write(where, params)
    st.caption(f"Shown: {plain(where.sentence())}.")
    values = {name: st.session_state[name] for name in params}
    board = worst.board(Selection(opened, where), values)
    if isinstance(board, Drawn):
        show.problems(board)
    else:
        show_question(VIEWS[values["view"]], board, values)


def _controls(formats: One) -> None:
    st.segmented_control("View", VIEWS, key="view", required=True, format_func=lambda name: VIEWS[name].title)
    ignored = VIEWS[st.session_state["view"]].ignores
    metric, place = st.session_state["metric"], st.container()
    if "metric" not in ignored:
        left, place = st.columns([1, 2])
        metric = left.selectbox(
            "Metric",
            boards.METRICS,
            key="metric",
            format_func=lambda name: MEASURES[name].axis,
            help="\n\n".join(f"**{MEASURES[m].label}**: {plain(MEASURES[m].definition)}" for m in boards.METRICS),
        )
    if formats.allowed and "format" not in ignored:
        place.segmented_control(
            "If rounded to",
            formats.allowed,
            key="format",
            required=True,
            disabled=not boards.of_format(metric) and "metric" not in ignored,
            help="The error that this format would make in each operand, measured when it was recorded",
        )
