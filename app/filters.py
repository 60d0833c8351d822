"""The filter in the sidebar, the same on every page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

import streamlit as st

from binade.app.address import chosen_filter, clear_filter, key, plain
from binade.app.glossary import TERMS
from binade.app.params import TITLES
from binade.app.questions.shared.labels import group_name
from binade.app.questions.shared.runs import given_names
from binade.data.catalog import Catalog
from binade.data.filter import Filter

GROUPS = {
    "": ("quant_type", "layer_index", "module", "operation", "tensor_name"),
    "Run and place": ("run_id", "recipe", "model", "size", "dataset", "layer_type", "component", "phase", "stage"),
    "Iteration and rank": ("iteration", "micro_batch", "rank", "expert"),
}

MOST_CHIPS = 20


def sidebar(catalog: Catalog) -> Filter:
    """Draw the filter and return it. Values in the address that do not occur are named."""
    chosen = chosen_filter()
    everything = catalog.facets()
    possible = catalog.facets(chosen) if chosen.items() else everything
    shown = partial(group_name, names=given_names(catalog))
    with st.sidebar:
        left, right = st.columns([3, 2], vertical_alignment="center")
        left.subheader("Filter", anchor=False)
        right.button("Clear", on_click=clear_filter, disabled=not chosen.items(), width="stretch")
        if problems := st.session_state.get("filter_problems"):
            st.warning("\n\n".join(map(plain, problems)), icon=":material/link_off:")
        for title, fields in GROUPS.items():
            with st.expander(title, expanded=any(getattr(chosen, name) for name in fields)) if title else nullcontext():
                for name in [name for name in fields if name in everything]:
                    options = list(dict.fromkeys([*possible.get(name, []), *getattr(chosen, name)]))
                    help = TERMS.get(TITLES[name].lower())
                    st.multiselect(
                        TITLES[name], options, key=key(name), help=help, placeholder="all", format_func=shown
                    )
    chosen = chosen_filter()
    _chips(chosen, shown)
    return chosen


def _chips(chosen: Filter, shown: Callable[[object], str]) -> None:
    """Show the filter's values above the page; a click removes one."""
    chips = {f"{TITLES[name]}: {shown(value)} ✕": (name, value) for name, values in chosen.items() for value in values}
    if chips:
        st.pills(
            "Filter: click a value to remove it",
            list(chips)[:MOST_CHIPS],
            key="chips",
            format_func=plain,
            on_change=_remove,
            args=(chips,),
            label_visibility="collapsed",
        )
    if len(chips) > MOST_CHIPS:
        st.caption(f"and {len(chips) - MOST_CHIPS} more")


def _remove(chips: Mapping[str, tuple[str, str | int]]) -> None:
    name, value = chips[st.session_state["chips"]]
    st.session_state[key(name)] = [other for other in st.session_state[key(name)] if other != value]
    st.session_state["chips"] = None
