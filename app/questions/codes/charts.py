"""How often each code, and each precision, occurs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.questions.codes import compute
from binade.data.compare.evidence import SHARE
from binade.data.words.text import number_text
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


def codes(table: pd.DataFrame, spec: Spec, subtitle: str | list[str]) -> Chart:
    """Chart of compute.codes: the share of each code, in order of value, colored by the width of its mantissa."""
    finite = table[np.isfinite(table["value"])].reset_index(drop=True)
    shown = finite.assign(order=finite.index, end=finite.index + 1, text=finite["value"].map(number_text))
    shown["bits"] = [f"{code:0{spec.format.element.bits}b}" for code in shown["code"]]
    names = sorted(set(shown["tier"]), key=compute.tier_rank)
    legend = {"title": None, "orient": "top", "columns": 3}
    look: plot.Look = {
        "color": plot.named("tier", {name: tier_color(name) for name in names}, legend),
        "tips": plot.tips(
            text="value ÷ scale", bits="code", count=("values", ","), share=("share of values", ".3~p"),
            tier="precision",
        ),
    }  # fmt: skip
    y = plot.y("share", "share of values", {"format": "~%", "tickCount": 5})
    if len(shown) <= 32:
        shown["text"] = [
            text if text != "0" or code == 0 else "−0" for text, code in zip(shown["text"], shown["code"], strict=True)
        ]
        x = plot.x("text:O", "code’s value, before the scale", {"labelAngle": 0}).sort(None)
        bars = plot.mark("bar", shown, x=x, y=y, **look)
    else:
        title = "codes, from the most negative value to the largest"
        axis = dict.fromkeys(("labels", "ticks", "grid"), False)
        bars = plot.steps(shown, plot.x("order", title, axis, domain=[0, len(shown)], nice=False), "end", y, **look)
    return plot.layers(f"Codes of {spec.format.title} that are used", subtitle, bars)


def tiers(table: pd.DataFrame, subtitle: str | list[str]) -> Chart:
    """Chart of compute.tiers: the share of the values that have each precision."""
    rows = table.to_dict("records")
    shown = table.assign(
        label=[
            f"{row['tier']} · {row['used']} of {row['codes']}" if row["codes"] else str(row["tier"]) for row in rows
        ],
        text=[SHARE.quantity(row["share"]) for row in rows],
    )
    tips = plot.tips(
        tier="precision", share=("share of values", ".3~p"), used="codes used", codes="codes of the format"
    )
    axis = {"format": "~%", "tickCount": 4, "values": [0, 0.25, 0.5, 0.75, 1]}
    color = plot.named("tier", {name: tier_color(name) for name in table["tier"]}, None)
    x = plot.x("share", "share of values", axis, domain=[0, 1], nice=False)
    y = plot.names("label", shown["label"])
    bars = plot.bars(shown, y, x, text="text", end="share", color=color, tips=tips)
    return plot.layers("Values by precision", subtitle, *bars)
