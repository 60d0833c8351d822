"""How often each code, and each precision, occurs."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.questions.codes import compute
from binade.data.text import number_text
from binade.quant.blocks import DENORMAL, SPECIAL, ZERO
from binade.quant.specs import Spec

# By the bits of the mantissa; the last for more.
MANTISSA_COLORS = ("#0d9488", "#0d9488", "#0284c7", "#4f46e5", "#4338ca", "#3b34b6", "#3730a3")
OTHER_COLORS = {DENORMAL: "#b4633a", compute.FLUSHED: style.BAD, ZERO: style.GREY, SPECIAL: "#db2777"}


def tier_color(tier: str) -> str:
    """The color of a tier of precision, as `blocks.code_tiers` names it."""
    if tier in OTHER_COLORS:
        return OTHER_COLORS[tier]
    return MANTISSA_COLORS[min(int(tier.split()[0]), len(MANTISSA_COLORS) - 1)]


def codes(table: pd.DataFrame, spec: Spec, subtitle: str | list[str]) -> alt.Chart:
    """Chart of compute.codes: the share of each code, in order of value, colored by the width of its mantissa."""
    finite = table[np.isfinite(table["value"])].reset_index(drop=True)
    shown = finite.assign(order=finite.index, end=finite.index + 1, floor=0.0, text=finite["value"].map(number_text))
    names = sorted(set(shown["tier"]), key=compute.tier_rank)
    color = alt.Color(
        "tier:N",
        scale=alt.Scale(domain=names, range=[tier_color(name) for name in names]),
        legend=alt.Legend(title=None, orient="top", columns=3),
    )
    width = spec.format.element.bits
    shown["bits"] = [f"{code:0{width}b}" for code in shown["code"]]
    tooltip = [
        alt.Tooltip("text:N", title="value ÷ scale"),
        alt.Tooltip("bits:N", title="code"),
        alt.Tooltip("count:Q", title="values", format=","),
        alt.Tooltip("share:Q", title="share of values", format=".3~p"),
        alt.Tooltip("tier:N", title="precision"),
    ]
    y = alt.Y("share:Q", title="share of values", axis=alt.Axis(format="~%", tickCount=5))
    if len(shown) <= 32:
        x = alt.X("text:O", title="code’s value, before the scale", sort=None, axis=alt.Axis(labelAngle=0))
        shown["text"] = [
            text if text != "0" or code == 0 else "−0" for text, code in zip(shown["text"], shown["code"], strict=True)
        ]
        bars = alt.Chart(shown).mark_bar().encode(x=x, y=y)
    else:
        x = alt.X(
            "order:Q",
            title="codes, from the most negative value to the largest",
            scale=alt.Scale(domain=[0, len(shown)], nice=False),
            axis=alt.Axis(labels=False, ticks=False, grid=False),
        )
        bars = alt.Chart(shown).mark_rect(strokeWidth=0).encode(x=x, x2="end:Q", y=y, y2="floor:Q")
    title = style.title(f"Codes of {spec.format.title} that are used", subtitle)
    result: alt.Chart = bars.encode(color=color, tooltip=tooltip).properties(title=title)
    return result


def tiers(table: pd.DataFrame, subtitle: str | list[str]) -> alt.LayerChart:
    """Chart of compute.tiers: the share of the values that have each precision."""
    rows = table.to_dict("records")
    shown = table.assign(
        label=[
            f"{row['tier']} · {row['used']} of {row['codes']}" if row["codes"] else str(row["tier"]) for row in rows
        ],
        text=[f"{row['share']:.1%}" for row in rows],
    )
    base = alt.Chart(shown).encode(
        y=style.names_axis("label", shown["label"]),
        tooltip=[
            alt.Tooltip("tier:N", title="precision"),
            alt.Tooltip("share:Q", title="share of values", format=".3~p"),
            alt.Tooltip("used:Q", title="codes used"),
            alt.Tooltip("codes:Q", title="codes of the format"),
        ],
    )
    ticks = alt.Axis(format="~%", tickCount=4, values=[0, 0.25, 0.5, 0.75, 1])
    x = alt.X("share:Q", title="share of values", axis=ticks, scale=alt.Scale(domain=[0, 1], nice=False))
    names = table["tier"].tolist()
    scale = alt.Scale(domain=names, range=[tier_color(name) for name in names])
    bars = base.mark_bar(size=18, cornerRadiusEnd=3).encode(x=x, color=alt.Color("tier:N", scale=scale, legend=None))
    text = base.mark_text(align="left", dx=5, color=style.GREY, fontSize=12).encode(x="share:Q", text="text:N")
    result: alt.LayerChart = (bars + text).properties(title=style.title("Values by precision", subtitle))
    return result
