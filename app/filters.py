"""The filter in the sidebar and in the address bar: a copied address shows the same view."""

from __future__ import annotations

import re

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


def follow_address(catalog: Catalog, choices: dict[str, tuple[str, ...]]) -> None:
    """Bring the widgets' state to what the address says, where the address was not written by `to_address`: at the
    first visit and when the user goes back. Who returns from another page finds the view as it was left.

    choices: the values of further parameters, each kept in the session state under its own name, the first by default.
    What the address asks for and does not occur is kept for `sidebar` to name.
    """
    state = st.session_state
    alive = _key(FIELDS[0]) in state
    if not alive and "address" in state and not st.query_params:
        st.query_params.from_dict(state["address"])
    if alive and state.get("address") == _address():
        for name in (*map(_key, FIELDS), *choices):
            if name in state:
                state[name] = state[name]  # or it would be lost where its widget is not drawn this time
        return
    problems = _read_filter(catalog.facets())
    for name, allowed in choices.items():
        asked = st.query_params.get(name, allowed[0])
        state[name] = asked if asked in allowed else allowed[0]
        if asked not in allowed:
            problems.append(f"The address asks for {name} {asked[:40]!r}, which is not known.")
    wanted = st.query_params.get_all("tensor")
    known = set(catalog.moments(None, "tensor_id", wanted)["group"]) if wanted else set()
    problems += [
        f"The address asks for tensor {name[:80]!r}, which is not here." for name in wanted if name not in known
    ]
    state["filter_problems"] = problems
    state["visit"] = state.get("visit", 0) + 1


def sidebar(catalog: Catalog) -> Filter:
    """Draw the filter and return it. Values in the address that do not occur are named."""
    everything = catalog.facets()
    chosen = Filter(**{name: st.session_state.get(_key(name), []) for name in FIELDS})
    possible = catalog.facets(chosen)
    with st.sidebar:
        left, right = st.columns([3, 2], vertical_alignment="center")
        left.subheader("Filter", anchor=False)
        right.button("Clear", on_click=_clear, disabled=not chosen.items(), width="stretch")
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
    return Filter(**{name: st.session_state.get(_key(name), []) for name in FIELDS})


def _widget(name: str, possible: dict[str, list], everything: dict[str, list]) -> None:
    if name not in everything:
        return
    chosen = st.session_state.get(_key(name), [])
    options = possible.get(name, [])
    options = options + [value for value in chosen if value not in options]
    st.multiselect(TITLES[name], options, key=_key(name), help=HELP.get(name), placeholder="all")


def _read_filter(everything: dict[str, list]) -> list[str]:
    """Fill the filter's widgets from the address; returns what made no sense there."""
    query = {name: st.query_params.get_all(name) for name in FIELDS}
    wanted, problems = Filter.from_query(query)
    for name in FIELDS:
        values = getattr(wanted, name)
        known = [value for value in values if value in everything.get(name, [])]
        for value in values:
            if value not in known:
                problems.append(f"The address asks for {TITLES[name].lower()} {str(value)[:40]!r}, which is not here.")
        st.session_state[_key(name)] = known
    return problems


def _clear() -> None:
    for name in FIELDS:
        st.session_state[_key(name)] = []
    st.session_state["filter_problems"] = []


def to_address(where: Filter, **view: str | list[str] | None) -> None:
    """Make the address bar hold the view: the filter, and what else is given and not None."""
    wanted = where.to_query() | {name: [v] if isinstance(v, str) else v for name, v in view.items() if v}
    if _address() != wanted:
        st.query_params.from_dict(wanted)
    st.session_state["address"] = wanted


def _address() -> dict[str, list[str]]:
    return {name: st.query_params.get_all(name) for name in st.query_params}


def plain(text: str) -> str:
    """A text that Markdown leaves as it is."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|~$:-])", r"\\\1", text)
