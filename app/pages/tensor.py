"""One tensor: why it suffers, what would fix it, whether it is normal or has drifted, its blocks, heads and codes."""

from __future__ import annotations

from contextlib import nullcontext

import pandas as pd
import streamlit as st
from torch import Tensor

from app.address import Known, Many, One, Param, Whole, follow, link, one_line, plain, write
from app.analysis import boards
from app.analysis.labels import full_labels
from app.filters import sidebar
from app.pages.views import attention, blocks, card, codes, drift, law, whatif, why
from app.pages.views.look import Look, formats_first
from app.state import catalog, explain_empty, explain_refused, first_formats
from data.catalog import Catalog, CatalogError
from data.filter import Filter
from data.store import TensorFileError
from quant.formats import FORMATS

VIEWS = {
    "why": "Why",
    "whatif": "What if",
    "law": "Is it normal",
    "drift": "Rounding or drift",
    "blocks": "Blocks",
    "attention": "Attention",
    "codes": "Codes",
}
MAX_LISTED = 5000
LARGE = 1 << 24  # values that take more than a moment to read


def page() -> None:
    opened = catalog()
    st.title("Tensor", anchor=False)
    explain_refused(opened)
    if not opened.totals().tensors:
        explain_empty(opened)
        return
    params = _params(opened)
    follow(opened, "tensor", params)
    where = sidebar(opened)
    if not opened.totals(where).tensors:
        st.info(f"No tensor matches: {plain(where.sentence())}.", icon=":material/filter_alt_off:")
        write(where, params)
        return
    _keep_in(opened, where)
    listed = _listed(opened, where)
    labels = full_labels(listed)
    left, right = st.columns([3.4, 1])
    tensor_id = left.selectbox("Tensor", list(labels), key="tensor", format_func=lambda name: labels.get(name, name))
    fmt = right.selectbox("Held against", list(FORMATS), key="format", help="The format that it is rounded to here")
    view = st.segmented_control("View", VIEWS, key="view", required=True, format_func=lambda name: VIEWS[name])
    write(where, params)
    row = listed[listed["tensor_id"] == tensor_id].iloc[0]
    card.show_card(row)
    if (x := _load(opened, row)) is not None:
        look = Look(opened, where, row, x, FORMATS[fmt], labels[tensor_id])
        with st.spinner("Reading the values …", show_time=True) if x.numel() > LARGE else nullcontext():
            if view == "law":
                law.view(look, labels)
            else:
                draw = {"why": why, "whatif": whatif, "drift": drift, "blocks": blocks, "attention": attention}
                draw.get(view or "why", codes).view(look)
    write(where, params)


def _params(opened: Catalog) -> dict[str, Param]:
    formats = first_formats(opened)
    knobs = {name: One(values) for name, values in whatif.CHOICES.items()}
    return {
        "tensor": Known(lambda name: not opened.rows_of([name]).empty),
        "view": One(tuple(VIEWS)),
        "format": One(formats_first(formats[0] if formats else "mxfp4")),
        "law": One(law.AGAINST),
        "other": Known(lambda name: not opened.rows_of([name]).empty),
        "formats": Many(tuple(FORMATS), whatif.DEFAULT),
        "over": One(whatif.OVER),
        "against": Known(lambda name: name in set(opened.runs()["run_id"])),
        "block_metric": One(tuple(blocks.METRIC_TITLES)),
        "block": Whole(0, 10**9),
        "map": One(tuple(attention.NAMES)),
        "head": Whole(1, 10**6, 1),
        "sequence": Whole(1, 10**6, 1),
        **knobs,
    }


def _keep_in(opened: Catalog, where: Filter) -> None:
    """The tensor that is looked at is one of the filter's: else the filter's worst, or its first if none is scored."""
    state = st.session_state
    if state.get("tensor") and not opened.moments(where, "tensor_id", [state["tensor"]]).empty:
        return
    fmt = state.get("format")
    scored = opened.scored_formats(where)
    if scored:
        table = boards.ranking(opened, where, fmt if fmt in scored else scored[0], "sqnr_db")
        if not table.empty:
            state["tensor"] = table.iloc[0]["tensor_id"]
            return
    state["tensor"] = opened.tensors(where, limit=1).iloc[0]["tensor_id"]


def _listed(opened: Catalog, where: Filter) -> pd.DataFrame:
    """The filter's tensors, as many as can be listed, and the one that is looked at."""
    found = opened.tensors(where, limit=MAX_LISTED)
    if len(found) == MAX_LISTED:
        st.caption(f"{MAX_LISTED:,} tensors are listed: narrow the filter for others.")
        if st.session_state["tensor"] not in set(found["tensor_id"]):
            found = pd.concat([opened.rows_of([st.session_state["tensor"]]), found], ignore_index=True)
    return found


def _load(opened: Catalog, row: pd.Series) -> Tensor | None:
    """The tensor's values; None, and the page says why, where they are not to be had."""
    try:
        return opened.load(row["tensor_id"])
    except CatalogError:
        st.info(
            "The values of this tensor were not kept: its distribution, from the sketch, is on Explore.",
            icon=":material/info:",
        )
    except TensorFileError as error:
        st.error("The tensor file cannot be read.", icon=":material/broken_image:")
        with st.expander("Why"):
            st.text(one_line(str(error)))
    link("explore", "Look at it on Explore", Filter(), ":material/query_stats:", tensor=row["tensor_id"])
    return None
