"""The filter in the sidebar, the same on every page."""

from __future__ import annotations

from typing import Any

import streamlit as st

from binade.app.address import chosen_filter, clear_filter, key, plain
from binade.app.params import TITLES
from binade.data.catalog import Catalog
from binade.data.filter import Filter

HELP = {
    "quant_type": "The format in force where the tensor was captured",
    "component": "FA: the attention core. linear: a linear layer",
    "phase": "pre: input of the operation. post: output of it",
    "stage": "Of imported tensors: taken before or after quantization",
    "recipe": "Which GEMMs of the run are quantized to what",
}
FIRST = ("quant_type", "layer_index", "module", "operation", "tensor_name")
SECOND = ("run_id", "recipe", "model", "size", "dataset", "layer_type", "component", "phase", "stage")
THIRD = ("iteration", "micro_batch", "rank", "expert")


def sidebar(catalog: Catalog) -> Filter:
    """Draw the filter and return it. Values in the address that do not occur are named."""
    chosen = chosen_filter()
    everything = catalog.facets()
    possible = catalog.facets(chosen) if chosen.items() else everything
    with st.sidebar:
        left, right = st.columns([3, 2], vertical_alignment="center")
        left.subheader("Filter", anchor=False)
        right.button("Clear", on_click=clear_filter, disabled=not chosen.items(), width="stretch")
        if problems := st.session_state.get("filter_problems"):
            st.warning("\n\n".join(map(plain, problems)), icon=":material/link_off:")
        for name in FIRST:
            _widget(name, possible, everything)
        with st.expander("Run and place", expanded=any(getattr(chosen, name) for name in SECOND)):
            for name in SECOND:
                _widget(name, possible, everything)
        with st.expander("Iteration and rank", expanded=any(getattr(chosen, name) for name in THIRD)):
            for name in THIRD:
                _widget(name, possible, everything)
    return chosen_filter()


def _widget(name: str, possible: dict[str, list[Any]], everything: dict[str, list[Any]]) -> None:
    if name not in everything:
        return
    chosen = st.session_state.get(key(name), [])
    options = possible.get(name, [])
    options = options + [value for value in chosen if value not in options]
    st.multiselect(TITLES[name], options, key=key(name), help=HELP.get(name), placeholder="all")
