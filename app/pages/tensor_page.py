"""One tensor: why it loses precision, what would help, whether it has drifted, its blocks, heads and codes."""

from __future__ import annotations

from contextlib import nullcontext

import pandas as pd
import streamlit as st
from torch import Tensor

from binade.app.address import link, write
from binade.app.pages import tensor
from binade.app.pages.card_view import show_card
from binade.app.pages.tensor import VIEWS
from binade.app.params import One, Params
from binade.app.questions.shared.selection import SelectedTensor
from binade.app.questions.view import show_question
from binade.app.state import LARGE, view_page
from binade.data.catalog import Catalog, CatalogError
from binade.data.filter import Filter
from binade.data.store import TensorFileError
from binade.data.text import one_line
from binade.quant.specs import Spec, known_specs


@view_page("tensor", "Tensor", tensor.params)
def page(opened: Catalog, where: Filter, params: Params) -> None:
    state = st.session_state
    state["tensor"] = tensor.in_filter(opened, where, state.get("tensor"), state.get("format") or "")
    listed, labels = tensor.listed(opened, where, state["tensor"])
    if len(listed) >= tensor.MAX_LISTED:
        st.caption(f"{tensor.MAX_LISTED:,} tensors are listed: narrow the filter to see others.")
    left, right = st.columns([3.4, 1])
    tensor_id = left.selectbox("Tensor", list(labels), key="tensor", format_func=lambda name: labels.get(name, name))
    fmt = right.selectbox("Rounded to", _allowed(params), key="format", help="The format of this page’s charts")
    st.segmented_control("View", VIEWS, key="view", required=True, format_func=lambda name: VIEWS[name].title)
    write(where, params)
    row = listed[listed["tensor_id"] == tensor_id].iloc[0]
    show_card(row, str(opened.runs().set_index("run_id").at[row["run_id"], "config"]))
    if (x := _load(opened, row)) is not None:
        values = {name: state[name] for name in params}
        selected = SelectedTensor(opened, where, row=row, x=x, spec=Spec.of(fmt), labels=labels)
        with st.spinner("Reading the values …", show_time=True) if x.numel() > LARGE else nullcontext():
            show_question(VIEWS[values["view"]], selected, values)
    write(where, params)


def _allowed(params: Params) -> list[str]:
    """The specs to choose from, in the order of FORMATS."""
    param = params["format"]
    assert isinstance(param, One)
    return known_specs(param.allowed)


def _load(opened: Catalog, row: pd.Series) -> Tensor | None:
    """The tensor's values. None if they cannot be read; the page then shows the reason."""
    try:
        return opened.load(row["tensor_id"])
    except CatalogError:
        st.info(
            "The values of this tensor were not kept. Explore shows its distribution, drawn from its sketch.",
            icon=":material/info:",
        )
    except TensorFileError as error:
        st.error("The tensor file cannot be read.", icon=":material/broken_image:")
        with st.expander("Why"):
            st.text(one_line(str(error)))
    link("explore", "Show it on Explore", Filter(), ":material/query_stats:", tensor=row["tensor_id"])
    return None
