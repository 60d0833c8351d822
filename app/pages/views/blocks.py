"""Which blocks fail? SQNR and scales block by block, and down to a block's values."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import show
from app.analysis import anatomy
from app.charts import tensor as draw
from app.pages.views.look import Look, about_format
from app.style import MEASURES, short
from quant.metrics import METRICS

METRIC_TITLES = {
    "sqnr_db": "SQNR",
    "flush_to_zero": "Flushed",
    "saturated": "Saturated",
    "scale_exponent": "Scale exponent",
}


def view(look: Look) -> None:
    if not look.x.numel():
        st.info("The tensor is empty: it has no blocks.", icon=":material/block:")
        return
    metric = st.segmented_control(
        "Metric", METRIC_TITLES, key="block_metric", required=True, format_func=lambda name: METRIC_TITLES[name]
    )
    metric = metric or "sqnr_db"
    found = look.subject()
    table = anatomy.block_table(found)
    size = found.blocks.x.shape[1]
    dim = look.dim if found.every == 1 else -1
    shape = tuple(look.x.shape) if found.every == 1 else (0, look.x.shape[look.dim])
    per_line = anatomy.blocks_per_line(shape, dim, look.format.name)
    rank = "sqnr_db" if metric == "scale_exponent" else metric
    worst = anatomy.worst_blocks(table, rank)
    if worst.empty:
        st.info("No block has anything to lose: all values are zero or not finite.", icon=":material/block:")
        return
    _verdict(look, table, size)
    what = f"{len(table):,} blocks of {size}" + (f" · {found.note}" if found.note else "")
    definition = f"{METRICS[rank].label}: {METRICS[rank].definition}."
    caption = f"{look.source(found.note or 'exact')}\n{about_format(look.format)}. {definition}"
    left, right = st.columns(2, gap="large")
    with left:
        values = table[metric].to_numpy()
        grid = anatomy.block_grid(values, per_line, "min" if metric == "sqnr_db" else "max")
        chart = draw.block_map(grid, metric, len(table) // per_line, per_line, what)
        note = "Bright is bad; a cell of several blocks shows its worst. Grey: nothing to lose."
        show.figure(chart, "block_map", show.grid(grid), caption, note=note, height=380)
    with right:
        exponents = anatomy.scale_histogram(table)
        if look.format.block_size:
            spread = f"{len(exponents)} exponents · all-zero blocks left out"
            chart = draw.scale_exponents(exponents, look.format, spread)
            show.figure(chart, "scales", exponents, caption, height=380)
        else:
            st.info(
                f"{look.format.title} has no block scales: the blocks are runs of {size} values.",
                icon=":material/info:",
            )
    _drill(look, found, table, worst, caption, per_line)


def _verdict(look: Look, table: pd.DataFrame, size: int) -> None:
    finite = table["sqnr_db"].dropna()
    median = MEASURES["sqnr_db"].text(float(finite.median())) if len(finite) else "no value"
    low = int((finite < 10).sum())
    show.verdict(
        f"{low:,} of {len(table):,} blocks of {size} stay below 10 dB in {look.format.name}; "
        f"the median is {median} dB, the worst {MEASURES['sqnr_db'].text(float(finite.min()))} dB."
    )


def _drill(
    look: Look, found: anatomy.Subject, table: pd.DataFrame, worst: pd.DataFrame, caption: str, per_line: int
) -> None:
    left, right = st.columns([2, 3], gap="large")
    number = st.column_config.NumberColumn
    shown = worst.assign(flushed=worst["flush_to_zero"] * 100, clipped=worst["saturated"] * 100)

    def choose() -> None:
        rows = st.session_state["worst_blocks"]["selection"]["rows"]
        if rows:
            st.session_state["block"] = int(worst.iloc[rows[0]]["block"])

    with left:
        st.markdown(f"**The {len(worst)} worst blocks** · choose one")
        st.dataframe(
            shown,
            key="worst_blocks",
            hide_index=True,
            placeholder="",
            height=330,
            on_select=choose,
            selection_mode="single-row",
            column_order=("block", "sqnr_db", "flushed", "clipped", "scale_exponent", "absmax"),
            column_config={
                "block": number("Block", format="%d", width=80),
                "sqnr_db": number("SQNR (dB)", format="%.2f", width=90, help=METRICS["sqnr_db"].definition),
                "flushed": number("Flushed (%)", format="%.1f", width=95, help=METRICS["flush_to_zero"].definition),
                "clipped": number("Saturated (%)", format="%.1f", width=105, help=METRICS["saturated"].definition),
                "scale_exponent": number("log₂ scale", format="%d", width=85),
                "absmax": number("absmax", format="%.3g", width=85),
            },
        )
        if st.session_state.get("block") is not None and st.session_state["block"] >= len(table):
            st.session_state["block"] = None
        asked = st.number_input(
            "Block",
            0,
            len(table) - 1,
            key="block",
            value=None,
            step=1,
            placeholder=f"the worst: {worst.iloc[0]['block']:.0f}",
        )
    block = int(worst.iloc[0]["block"]) if asked is None else int(asked)
    values = anatomy.block_values(found, block)
    row = table.iloc[block]
    line, place = divmod(block, per_line)
    size = found.blocks.x.shape[1]
    where = f"line {line:,}, values {place * size:,} to {place * size + len(values) - 1:,} along the contracted axis"
    scale = "" if pd.isna(row["scale_exponent"]) else f" · scale 2^{row['scale_exponent']:.0f}"
    text = MEASURES["sqnr_db"].text(row["sqnr_db"])
    with right:
        chart = draw.block_values(values, look.format, f"Block {block:,}: {text} dB{scale}", where)
        words = f"{caption}\nBlock {block:,}: {where}{scale}."
        note = "Ring: the value. Dot: what it was rounded to. Red: the error."
        show.figure(chart, "block_values", values, words, note=note, height=330)
    with st.expander(f"The {len(values)} values of block {block:,}, with codes and errors", expanded=True):
        st.dataframe(
            values.assign(**{name: values[name].map(short) for name in ("value", "dequantized", "error")}),
            hide_index=True,
            height=320,
            column_order=("index", "value", "bits", "code_value", "dequantized", "error"),
            column_config={
                "index": number("Place", width=60),
                "value": st.column_config.TextColumn("Value", alignment="right"),
                "bits": st.column_config.TextColumn("Code", help="The code’s bits"),
                "code_value": number("Code’s value", format="%.6g", help="On the format’s grid, before the scale"),
                "dequantized": st.column_config.TextColumn("Rounded to", alignment="right"),
                "error": st.column_config.TextColumn("Error", alignment="right"),
            },
        )
