"""The filter in the sidebar and in the address bar: a copied address shows the same view."""

from __future__ import annotations

import streamlit as st

from data.catalog import Catalog
from data.filter import FIELDS, Filter

TITLES = {
    "run_id": "Run",
    "model": "Model",
    "size": "Size",
    "dataset": "Dataset",
    "recipe": "Recipe",
    "quant_type": "Quant type",
    "layer_type": "Layer type",
    "layer_index": "Layer",
    "module": "Module",
    "component": "Component",
    "operation": "Operation",
    "phase": "Phase",
    "tensor_name": "Tensor",
    "iteration": "Iteration",
    "micro_batch": "Micro-batch",
    "rank": "Rank",
    "expert": "Expert",
}
HELP = {
    "quant_type": "The format in force where the tensor was captured",
    "component": "FA: the attention core. linear: a linear layer",
    "phase": "pre: input of the operation. post: output of it",
    "recipe": "Which GEMMs of the run are quantized to what",
}
FIRST = ("quant_type", "layer_index", "module", "operation", "tensor_name")
SECOND = ("run_id", "recipe", "model", "size", "dataset", "layer_type", "component", "phase")
THIRD = ("iteration", "micro_batch", "rank", "expert")


def _key(name: str) -> str:
    return f"filter_{name}"


def sidebar(catalog: Catalog) -> Filter:
    """Draw the filter and return it; the address bar follows. Values in the address that do not occur are named."""
    everything = catalog.facets()
    if "filter_ready" not in st.session_state:
        _from_address(everything)
    chosen = Filter(**{name: st.session_state.get(_key(name), []) for name in FIELDS})
    possible = catalog.facets(chosen)
    with st.sidebar:
        left, right = st.columns([3, 2], vertical_alignment="center")
        left.subheader("Filter", anchor=False)
        right.button("Clear", on_click=_clear, disabled=not chosen.items(), width="stretch")
        for problem in st.session_state.get("filter_problems", []):
            st.warning(problem, icon=":material/link_off:")
        for name in FIRST:
            _widget(name, possible, everything)
        with st.expander("Run and place", expanded=any(getattr(chosen, name) for name in SECOND)):
            for name in SECOND:
                _widget(name, possible, everything)
        with st.expander("Iteration and rank", expanded=any(getattr(chosen, name) for name in THIRD)):
            for name in THIRD:
                _widget(name, possible, everything)
    return Filter(**{name: st.session_state.get(_key(name), []) for name in FIELDS})


def _widget(name: str, possible: dict[str, list], everything: dict[str, list]) -> None:
    if name not in everything:
        return
    chosen = st.session_state.get(_key(name), [])
    options = possible.get(name, [])
    options = options + [value for value in chosen if value not in options]
    st.multiselect(TITLES[name], options, key=_key(name), help=HELP.get(name), placeholder="all")


def _from_address(everything: dict[str, list]) -> None:
    query = {name: st.query_params.get_all(name) for name in FIELDS}
    wanted, problems = Filter.from_query(query)
    for name in FIELDS:
        values = getattr(wanted, name)
        known = [value for value in values if value in everything.get(name, [])]
        for value in values:
            if value not in known:
                problems.append(f"The address asks for {TITLES[name].lower()} {str(value)[:40]!r}, which is not here.")
        st.session_state[_key(name)] = known
    st.session_state["filter_problems"] = problems
    st.session_state["filter_ready"] = True


def _clear() -> None:
    for name in FIELDS:
        st.session_state[_key(name)] = []
    st.session_state["filter_problems"] = []


def to_address(where: Filter, **view: str | list[str] | None) -> None:
    """Make the address bar hold the view: the filter, and what else is given and not None."""
    wanted = where.to_query() | {name: value for name, value in view.items() if value}
    current = {name: st.query_params.get_all(name) for name in st.query_params}
    if current != {name: [value] if isinstance(value, str) else value for name, value in wanted.items()}:
        st.query_params.from_dict(wanted)
