"""The address bar holds the view: every page's parameters, and the filter that all pages share.

A page says which parameters it has (`One`, `Many`, `Whole`); `follow` brings the session state to what the address
says, widgets then change the state under the parameter's own name, and `write` brings the address to the state. A
parameter at its default is left out. Who comes back to a page finds it as it was left, with the filter as it is now.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import streamlit as st

from binade.app.params import Param, read, read_filter, texts
from binade.data.catalog import Catalog
from binade.data.filter import FIELDS, Filter


def key(field: str) -> str:
    """Under which name the session state holds a field of the filter."""
    return f"filter_{field}"


def follow(catalog: Catalog, page: str, params: Mapping[str, Param]) -> None:
    """Bring the state to what the address says, unless this page wrote the address itself and the user has only moved
    its widgets since. What the address asks for and does not occur is kept for the sidebar to name."""
    state = st.session_state
    here = state.get("page") == page
    if here and key(FIELDS[0]) in state and state.get("address") == _address():
        for name in (*map(key, FIELDS), *params):
            if name in state:
                state[name] = state[name]  # or it would be lost where its widget is not drawn this time
        for name, param in params.items():
            _keep_possible(name, param)
        return
    if not here and not st.query_params and "left" in state:
        st.query_params.from_dict(state["left"].get(page, {}) | state["filter"])
    query = _address()
    where, problems = read_filter(catalog.facets(), query)
    for name in FIELDS:
        state[key(name)] = list(getattr(where, name))
    values, bad = read(params, query)
    state.update(values)
    problems += bad
    wanted = [] if "tensor" in params else st.query_params.get_all("tensor")
    known = set(catalog.rows_of(wanted)["tensor_id"]) if wanted else set()
    problems += [
        f"The address asks for tensor {name[:80]!r}, which is not here." for name in wanted if name not in known
    ]
    state["page"] = page
    state["filter_problems"] = problems
    state["visit"] = state.get("visit", 0) + 1


def _keep_possible(name: str, param: Param) -> None:
    """A value that another choice has made impossible goes back to the default."""
    value = st.session_state.get(name)
    if value is None and name in st.session_state:
        return
    asked = [str(each) for each in (value if isinstance(value, list) else [value])]
    read, bad = param.read(asked)
    if bad or name not in st.session_state:
        st.session_state[name] = read


def chosen_filter() -> Filter:
    return Filter(**{name: st.session_state.get(key(name), []) for name in FIELDS})


def write(where: Filter, params: Mapping[str, Param], **more: list[str]) -> None:
    """Make the address bar hold the filter, the page's parameters, and what else is given."""
    state = st.session_state
    own = {name: param.texts(state[name]) for name, param in params.items() if state.get(name) is not None} | more
    own = {name: texts for name, texts in own.items() if texts}
    wanted = where.to_query() | own
    if _address() != wanted:
        st.query_params.from_dict(wanted)
    state["address"], state["filter"] = wanted, where.to_query()
    state["shown"] = (
        wanted
        | texts(params, {name: state.get(name) for name in params})
        | {name: given for name, given in more.items() if given}
    )
    state.setdefault("left", {})[state["page"]] = own


def go(page: str, where: Filter, **params: str | list[str]) -> NoReturn:
    """Open another page with the filter and these parameters."""
    query = where.to_query() | {name: value for name, value in params.items() if value}
    st.switch_page(st.session_state["pages"][page], query_params=query)


def link(page: str, label: str, where: Filter, icon: str | None = None, help: str | None = None, **params: Any) -> None:
    """A link to another page with the filter and these parameters."""
    query = where.to_query() | {name: value for name, value in params.items() if value}
    st.page_link(st.session_state["pages"][page], label=label, icon=icon, help=help, query_params=query)


def clear_filter() -> None:
    for name in FIELDS:
        st.session_state[key(name)] = []
    st.session_state["filter_problems"] = []


def _address() -> dict[str, list[str]]:
    return {name: st.query_params.get_all(name) for name in st.query_params}


def plain(text: str) -> str:
    """A text that Markdown leaves as it is."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|~$:-])", r"\\\1", text)
