"""What is the format really using? Its codes, their precision, and their entropy."""

from __future__ import annotations

import streamlit as st

from app import show
from app.analysis import anatomy
from app.charts import tensor as draw
from app.pages.views.look import Look, about_format
from quant.blocks import DENORMAL, ZERO
from quant.metrics import METRICS


def view(look: Look) -> None:
    found = look.subject()
    table = anatomy.codes(found)
    if not table["count"].sum():
        st.info("No value is coded: none is finite, or the tensor is empty.", icon=":material/block:")
        return
    element = look.format.element
    used, entropy = int((table["count"] > 0).sum()), anatomy.entropy_bits(table)
    share = table.groupby("tier")["share"].sum()
    show.verdict(
        f"{used:,} of {1 << element.bits:,} codes are used; their entropy is {entropy:.2f} of {element.bits} bits. "
        f"Zero: {share.get(ZERO, 0):.1%}, denormal: {share.get(DENORMAL, 0):.1%} of the values."
    )
    caption = (
        f"{look.source(found.note or 'exact')}\n{about_format(look.format)}. "
        f"{METRICS['code_entropy_bits'].label}: {METRICS['code_entropy_bits'].definition}."
    )
    values = f"{int(table['count'].sum()):,} values" + (f" · {found.note}" if found.note else "")
    left, right = st.columns([3, 2], gap="large")
    with left:
        chart = draw.codes(table, look.format, values)
        note = f"{about_format(look.format)}. Codes that never occur have no bar."
        show.figure(chart, "codes", table, caption, note=note, height=400)
    with right:
        tiers = anatomy.tiers(table)
        chart = draw.tiers(tiers, values)
        show.figure(chart, "tiers", tiers, caption, height=120 + 40 * len(tiers))
