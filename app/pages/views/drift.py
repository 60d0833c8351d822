"""Is it the format's rounding, or has the run drifted? Three tensors, matched by identity."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import charts, show, style
from app.analysis import recipes
from app.analysis.distribution import log2_histogram
from app.pages.views.look import Look
from data.catalog import CatalogError
from data.store import TensorFileError
from quant.metrics import METRICS

WORDS = {
    "rounding": "bf16’s tensor, rounded: the format alone",
    "drift": "the quantized run’s tensor: the drift alone",
    "both": "the quantized run’s tensor, rounded: both",
}


def view(look: Look) -> None:
    table = recipes.overview(look.opened.runs(), look.opened.parts())
    of = table.set_index("run_id")
    twins = look.opened.twins(look.row["tensor_id"])
    own = of.loc[look.row["run_id"]]
    reference_run = own["reference"]
    quantized = twins[
        twins["run_id"].isin(table.loc[table["quantized"] & (table["reference"] == reference_run), "run_id"])
    ]
    if reference_run is None or quantized.empty:
        st.info(
            "There is nothing to compare: this takes a bf16 run and a quantized run of the same data, both with this "
            "tensor. Collect them with the same options.",
            icon=":material/balance:",
        )
        return
    runs = quantized["run_id"].tolist()
    if st.session_state.get("against") not in runs:
        st.session_state["against"] = look.row["run_id"] if look.row["run_id"] in runs else runs[0]
    run = st.selectbox("Quantized run", runs, key="against", format_func=lambda name: of.loc[name, "label"])
    base = twins[twins["run_id"] == reference_run]
    if base.empty:
        st.info("The bf16 run has not recorded this tensor.", icon=":material/block:")
        return
    ids = base.iloc[0]["tensor_id"], quantized[quantized["run_id"] == run].iloc[0]["tensor_id"]
    try:
        reference, drifted = (look.opened.load(tensor_id) for tensor_id in ids)
    except (CatalogError, TensorFileError) as error:
        st.info(f"The values of one of the two are not to be had: {error}.", icon=":material/block:")
        return
    if reference.shape != drifted.shape or not reference.numel():
        st.info("The two tensors are not of one shape: nothing to compare.", icon=":material/block:")
        return
    rounded_to = quantized[quantized["run_id"] == run].iloc[0]["format"]
    fmt = look.format.name if pd.isna(rounded_to) else rounded_to
    with st.spinner("Comparing …"):
        found = recipes.three_way(reference, drifted, fmt, look.dim)
    show.verdict(found.verdict)
    label = of.loc[run, "label"]
    caption = (
        f"{look.source()}\nThe same tensor (by identity) of {of.loc[reference_run, 'label']} and of {label}; rounded "
        f"to {fmt}. Errors are against bf16’s tensor. Relative error: {METRICS['relative_error'].definition}."
    )
    histogram = log2_histogram([d for d in found.distributions if d.total])
    if not histogram.empty:
        groups = [d.group for d in found.distributions]
        chart = charts.log2_histogram(histogram, f"{look.label} · {label} against bf16", "values")
        height = 360 + style.legend_height(groups)
        show.figure(chart, "three_way", histogram, caption, height=height)
    _table(found.table)
    st.caption(
        "The quantized run’s tensor is as captured, before its own rounding. What differs from bf16’s then comes from "
        "products rounded before it, in this iteration and in those before."
    )


def _table(table: pd.DataFrame) -> None:
    number = st.column_config.NumberColumn
    st.dataframe(
        table.assign(what=table["what"].map(WORDS)),
        hide_index=True,
        placeholder="",
        column_config={
            "what": st.column_config.TextColumn("Against bf16’s tensor", width=330),
            "sqnr_db": number("SQNR (dB)", format="%.2f", help=METRICS["sqnr_db"].definition),
            "relative_error": number("Relative error", format="%.4f", help=METRICS["relative_error"].definition),
            "cosine": number("Cosine", format="%.5f", help=METRICS["cosine"].definition),
            "gradient_bias": number("‖error‖² / ‖x‖²", format="%.5f", help=METRICS["gradient_bias"].definition),
            "ks": number("KS distance", format="%.4f", help=METRICS["ks"].definition + ", on bins of 1/8 binade"),
        },
    )
