"""The address bar holds the view: every page's parameters, and the filter that all pages share.

A page declares its parameters (`One`, `Many`, `Whole`, `Known`). `follow` copies the address into the session state,
widgets then change the state under the parameter's own name, and `write` copies the state into the address, without the
parameters at their default. A page that is opened again shows its last state, with the current filter.
"""

from __future__ import annotations

import re
from typing import NoReturn

import streamlit as st

from binade.app.params import Params, read, read_filter, texts_of
from binade.data.catalog import Catalog
from binade.data.filter import FIELDS, Filter


def key(field: str) -> str:
    """The name of a field of the filter in the session state."""
    return f"filter_{field}"


def follow(catalog: Catalog, page: str, params: Params) -> None:
    """Copy the address into the state, unless this page wrote the address itself and only its widgets have changed
    since then. The sidebar lists the values of the address that do not exist."""
    state = st.session_state
    here = state.get("page") == page
    if here and key(FIELDS[0]) in state and state.get("address") == _address():
        for name in (*map(key, FIELDS), *params):
            if name in state:
                state[name] = state[name]  # otherwise Streamlit drops it if its widget is not drawn in this run
        for name, param in params.items():  # a value that another choice has ruled out is reset to the default
            value, bad = param.read(texts_of(state.get(name)))
            if bad or name not in state:
                state[name] = value
        return
    if not here and not st.query_params and "left" in state:
        st.query_params.from_dict(state["left"].get(page, {}) | state["filter"])
    query = _address()
    where, problems = read_filter(catalog.facets(), query)
    for name in FIELDS:
        state[key(name)] = list(getattr(where, name))
    values, bad = read(params, query)
    state.update(values)
    wanted = [] if "tensor" in params else query.get("tensor", [])
    known = set(catalog.rows_of(wanted)["tensor_id"]) if wanted else set()
    missing = [name for name in wanted if name not in known]
    state["page"] = page
    state["filter_problems"] = [
        *problems,
        *bad,
        *(f"The URL refers to tensor {name[:80]!r}, which is not in this root." for name in missing),
    ]
    state["visit"] = state.get("visit", 0) + 1


def chosen_filter() -> Filter:
    return Filter(**{name: st.session_state.get(key(name), []) for name in FIELDS})


def write(where: Filter, params: Params, **more: list[str]) -> None:
    """Write the filter, the page's parameters that are not at their default, and more parameters to the address."""
    state = st.session_state
    values = {name: texts_of(state.get(name)) for name in params}
    given = {name: texts for name, texts in (values | more).items() if texts}
    own = {name: texts for name, texts in given.items() if name in more or texts != texts_of(params[name].default)}
    wanted = where.to_query() | own
    if _address() != wanted:
        st.query_params.from_dict(wanted)
    state["address"], state["filter"], state["shown"] = wanted, where.to_query(), where.to_query() | given
    state.setdefault("left", {})[state["page"]] = own


def go(page: str, where: Filter, **params: str) -> NoReturn:
    """Open another page with the filter and these parameters."""
    st.switch_page(st.session_state["pages"][page], query_params=_query(where, params))


def link(page: str, label: str, where: Filter, icon: str | None = None, help: str | None = None, **params: str) -> None:
    """A link to another page with the filter and these parameters."""
    target = st.session_state["pages"][page]
    st.page_link(target, label=label, icon=icon, help=help, query_params=_query(where, params))


def _query(where: Filter, params: dict[str, str]) -> dict[str, str | list[str]]:
    return {**where.to_query(), **{name: text for name, text in params.items() if text}}


def clear_filter() -> None:
    for name in FIELDS:
        st.session_state[key(name)] = []
    st.session_state["filter_problems"] = []


def _address() -> dict[str, list[str]]:
    return {name: st.query_params.get_all(name) for name in st.query_params}


def plain(text: str) -> str:
    """Escape a text for Markdown, so that it is shown literally."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|~$:-])", r"\\\1", text)
