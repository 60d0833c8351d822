"""What happens inside attention? Probability maps, entropy, the scores' range, and how much of P flushes."""

from __future__ import annotations

from typing import Any

import streamlit as st

from binade.app import show
from binade.app.questions.attention import question
from binade.app.questions.attention.question import NOTHING, Maps
from binade.app.questions.shared.selection import SelectedTensor
from binade.data.tensor_kinds import label_of


def show_view(selected: SelectedTensor, values: dict[str, Any]) -> None:
    maps = question.maps_of(selected)
    if maps is None:
        st.info(NOTHING, icon=":material/block:")
        return
    drawn = question.heads(selected, maps)
    if drawn.verdict:
        show.verdict(drawn.verdict)
    for cell, name in zip(st.columns(2, gap="large"), ("entropy", "flushed"), strict=True):
        if figure := drawn.get(name):
            with cell:
                show.draw(figure, _choose)
    left, right = st.columns(2, gap="large")
    with left:
        if figure := drawn.get("scores"):
            show.draw(figure)
    with right:
        _map(maps, values)


def _choose(head: int) -> None:
    st.session_state["head"] = int(head)


def _map(maps: Maps, values: dict[str, Any]) -> None:
    shape = maps.shape
    for problem in question.beyond(shape, values):
        st.info(problem, icon=":material/block:")
    for name, count in (("head", shape[1]), ("sequence", shape[0])):
        st.session_state[name] = question.within(st.session_state.get(name), count)
    cells = st.columns([1.7, 1, 1])
    name = cells[0].selectbox("Map of", list(maps.heads), key="map", format_func=label_of)
    head = cells[1].number_input("Head", 1, shape[1], key="head")
    sequence = cells[2].number_input("Sequence", 1, shape[0], key="sequence") if shape[0] > 1 else 1
    show.draw(question.head_map(maps, name, int(head), int(sequence)))
