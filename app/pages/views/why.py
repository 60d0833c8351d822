"""Why does it suffer? Magnitudes over the codebook, channels, tokens, and how the values lie."""

from __future__ import annotations

import math

import streamlit as st

from app import show
from app.analysis import anatomy
from app.charts import tensor as draw
from app.pages.views.look import Look, about_format
from app.style import MEASURES, short
from quant.metrics import outlier_ratio

FACTS = ("absmax", "crest_factor", "dynamic_range", "kurtosis", "outlier_ratio", "zero_share")


def view(look: Look) -> None:
    found = look.subject()
    zones = anatomy.zones(found)
    share = zones.set_index("zone")["share"]
    sums = found.blocks.sums
    sqnr = MEASURES["sqnr_db"].text(_sqnr(sums.signal, sums.noise))
    unit = " dB" if sqnr[0].isdigit() or sqnr[0] == "-" else ""
    lost = f", lost to NaN or Inf {share['lost']:.2%}" if share["lost"] else ""
    flushed = sums.flushed / sums.nonzero if sums.nonzero else 0.0
    show.verdict(
        f"In {look.format.name}: SQNR {sqnr}{unit}, {flushed:.2%} of the nonzero values flushed to zero, "
        f"{share['saturated']:.2%} of all saturated{lost}."
    )
    _facts(look)
    table = anatomy.codebook_histogram(found)
    note = found.note or "all values"
    caption = (
        f"{look.source(found.note or 'exact')}\n{about_format(look.format)}. Flushed: nonzero values below half the "
        "smallest code. Saturated: above the largest. Shares are of all values."
    )
    if table.empty:
        st.info("No magnitudes to draw: no value is finite and nonzero.", icon=":material/block:")
    else:
        edges = anatomy.zone_edges(look.format.element, look.format.rounding)
        zero = f" Zeros, {share['zero']:.1%} of the values, have no magnitude." if share["zero"] else ""
        chart = draw.codebook(table, zones, look.format, edges, f"{look.label} · {note}")
        words = f"{about_format(look.format)}. Ticks beneath: its codes. Shares are of all values.{zero}"
        show.figure(chart, "codebook", table, caption, note=words, height=400)
    left, right = st.columns(2, gap="large")
    with left:
        _channels(look)
    with right:
        _tokens(look)


def _sqnr(signal: float, noise: float) -> float:
    if not signal > 0 or math.isnan(noise):
        return math.nan
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def _facts(look: Look) -> None:
    row = look.row
    values = {
        "absmax": row["absmax"],
        "crest_factor": row["absmax"] / row["rms"] if row["rms"] else math.nan,
        "dynamic_range": math.log2(row["absmax"] / row["absmin"]) if row["absmax"] > 0 else math.nan,
        "kurtosis": row["kurtosis"],
        "zero_share": row["zeros"] / row["numel"] if row["numel"] else math.nan,
    }
    if look.x.numel() <= 1 << 24:
        values["outlier_ratio"] = outlier_ratio(look.x)
    shown = [name for name in FACTS if name in values]
    cells = [cell for row in range(0, len(shown), 3) for cell in st.columns(3)[: len(shown) - row]]
    for cell, name in zip(cells, shown, strict=True):
        measure = MEASURES[name]
        text = short(values[name] * measure.factor)
        unit = f" {measure.unit}" if measure.unit and text != "–" else ""
        cell.metric(measure.label, f"{text}{unit}", help=measure.definition, border=True)


def _channels(look: Look) -> None:
    table = anatomy.channels(look.x)
    if table.empty or not look.x.dim():
        st.info("No channels to draw.", icon=":material/block:")
        return
    count = look.x.shape[-1]
    run = int(table["last"].iloc[0] - table["channel"].iloc[0]) + 1
    taken = f" · each bar the largest of {run} channels" if run > 1 else ""
    finite = table["absmax"].dropna()
    middle = float(finite.median()) if len(finite) else math.nan
    note = f"The largest channel is {short(finite.max() / middle)} times the median one." if middle > 0 else ""
    caption = f"{look.source()}\nabsmax: the largest magnitude over all tokens; the last axis is the channel."
    chart = draw.channels(table, f"{count:,} channels{taken}")
    show.figure(chart, "channels", table, caption, note=note, height=330)


def _tokens(look: Look) -> None:
    matrix = anatomy.rows_by_channels(look.x)
    if not matrix.numel():
        st.info("No tokens to draw.", icon=":material/block:")
        return
    values = anatomy.pooled(look.x)
    cell = tuple(-(-n // m) for n, m in zip(matrix.shape, values.shape, strict=True))
    taken = f"each cell the largest of {cell[0]} × {cell[1]} values" if max(cell) > 1 else "each cell a value"
    chart = draw.tokens_by_channels(values, tuple(matrix.shape), taken)
    caption = f"{look.source()}\nlog2 of the largest magnitude of each cell ({taken}); grey: zero or not finite."
    show.figure(chart, "tokens", show.grid(values), caption, note="Bright columns are outlier channels.", height=330)
