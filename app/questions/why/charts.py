"""A tensor over a format's codebook, by column and by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from binade.app import plot, style
from binade.app.figure import Chart
from binade.app.params import Interval
from binade.app.questions.shared.axes import Axes
from binade.app.questions.shared.distribution_charts import explained
from binade.app.questions.shared.heatmap import heatmap
from binade.app.questions.why import compute
from binade.data.evidence import SHARE
from binade.quant.error_causes import CAUSES
from binade.quant.specs import Spec

TAIL = 1e-4  # the share of the smallest values that may lie left of the axis
ZONES = {"flushed": style.BAD, "saturated": style.CLIPPED}


def codebook(
    table: pd.DataFrame,
    words_of: dict[str, str],
    spec: Spec,
    edges: tuple[float, float],
    subtitle: str | list[str],
    only: str = "",
    behind: pd.DataFrame | None = None,
    marked: Interval | None = None,
) -> Chart:
    """A histogram of the magnitudes over their scale, with the format's codes as ticks below. The ranges that are
    flushed and saturated are shaded and labelled with words_of. table: compute.codebook_histogram. only: what part of
    the tensor it is of; behind: the histogram of all, drawn in grey; marked: a range."""
    whole = table if behind is None else behind
    flush, clip = edges
    tail = whole["low"][((whole["high"] - whole["low"]) * whole["share"]).cumsum() >= TAIL]
    low = min(float(tail.min()) if len(tail) else flush - 2, flush - 2)
    high = max(float(whole["high"].max()), clip + 1.5)
    top = float(pd.concat([table["share"], whole["share"]]).max()) * 1.22
    bands = pd.DataFrame({
        "zone": [*ZONES], "from": [low, clip], "to": [flush, high], "text": [words_of[zone] for zone in ZONES],
        "at": [low, high], "top": top, "floor": 0.0,
    })  # fmt: skip
    magnitude = _magnitude(spec)
    x = plot.x("from", axis=style.binades(magnitude, 12), domain=[low, high], nice=False, zero=False)
    y = plot.y(
        "share", "share of values per binade", {"format": "~%", "tickCount": 5}, domain=[-top * 0.045, top], nice=False
    )
    color = plot.named("zone", ZONES, None)
    tips = plot.tips(low=("log₂ from", ".3~f"), high=("log₂ to", ".3~f"), share=("share of values per binade", ".3~p"))
    bars: plot.Look = {"x": plot.x("low"), "high": "high", "y": y, "clip": True, "tips": tips}
    codes = pd.DataFrame({"log2": compute.code_magnitudes(spec.format.element), "y": -top * 0.022})
    marks = [plot.mark("rect", bands, opacity=0.16, x=x, x2="to", y="floor", y2="top", color=color)]
    if behind is not None:
        marks.append(plot.steps(behind, color=style.GREY, **bars))
    marks += [
        plot.steps(table, color=style.FORMAT_COLORS[spec.format.name], **bars),
        plot.mark(
            "tick", codes, x="log2", y="y", tips=plot.tips(log2=("a code at log₂", ".3~f")), thickness=1, size=9,
            orient="vertical", color=style.GREY, clip=True,
        ),
    ]  # fmt: skip
    for zone, align, dx, dy in (("flushed", "left", 6, 8), ("saturated", "right", -6, 24)):
        look: plot.Look = {"align": align, "dx": dx, "dy": dy, "baseline": "top", "fontWeight": 600}
        marks.append(plot.mark("text", bands[bands["zone"] == zone], x="at", y="top", text="text", color=color, **look))
    if marked:
        band = pd.DataFrame({"from": [marked.low], "to": [marked.high]})
        look = {"color": style.GREY, "opacity": style.BAND, "clip": True, "params": [style.clear("from")]}
        marks.insert(0, plot.mark("rect", band, x=x, x2="to", **look))
    name = f"Magnitudes over the codebook of {spec.format.title}{f': {only}' if only else ''}"
    return plot.layers(name, explained(subtitle, table), *marks)


def _magnitude(spec: Spec) -> str:
    return "|value / scale|" if spec.block else "|value|"


def shares_of_error(shares: Sequence[float]) -> dict[str, str]:
    """The labels of the zones of a whole tensor: their shares of its squared error, in the order of CAUSES."""
    named = zip(CAUSES, shares, strict=True)
    return {
        cause: cause if math.isnan(share) else f"{cause}: {SHARE.quantity(share)} of the error"
        for cause, share in named
    }


def shares_of_values(zones: pd.DataFrame) -> dict[str, str]:
    """The labels of the zones of a part of a tensor, from compute.zones."""
    share, of_nonzero = (zones.set_index("zone")[name] for name in ("share", "of_nonzero"))
    flushed, saturated = of_nonzero["flushed"], share["saturated"]
    return {
        "flushed": f"flushed: {SHARE.quantity(flushed)} of its nonzero",
        "saturated": f"saturated: {SHARE.quantity(saturated)} of its values",
    }


def error_by_binade(table: pd.DataFrame, spec: Spec, edges: tuple[float, float], subtitle: str | list[str]) -> Chart:
    """Stacked bars of compute.error_by_binade, with rules at the edges of the zones of `codebook`."""
    names = {"flushed": "flushed", "saturated": "saturated", "grid": "within the grid"}
    colors = {names[cause]: (ZONES | {"grid": style.FINE})[cause] for cause in CAUSES if cause in set(table["cause"])}
    by_size = table.sort_values("share").groupby(["low"])["share"].sum()
    shown = by_size[by_size >= TAIL].index
    low, high = min(float(shown.min()), edges[0] - 1), max(float(shown.max()) + 1, edges[1] + 1)
    x = plot.x("low", axis=style.binades(_magnitude(spec), 12), domain=[low, high], nice=False, zero=False)
    bars = plot.mark(
        "rect", table.assign(name=table["cause"].map(names)), clip=True, x=x, x2="high",
        y=plot.y("from", "share of the error", {"format": "~%", "tickCount": 4}), y2="to",
        color=plot.named("name", colors, style.legend([*colors], "cause")),
        tips=plot.tips(
            low="log₂ from", high="log₂ to", name="cause", share=("share of the squared error", ".3~p")
        ),
    )  # fmt: skip
    rules = plot.mark("rule", pd.DataFrame({"low": list(edges)}), x=x, strokeDash=[4, 3], color=style.GREY)
    return plot.layers("Squared error by magnitude and cause", subtitle, rules, bars)


def channels(
    table: pd.DataFrame, title: str, subtitle: str | list[str], axes: Axes, chosen: int | None = None,
    clickable: bool = True,
) -> Chart:  # fmt: skip
    """A bar for each channel: the largest magnitude, from compute.channels, or the number of values in a range, from
    Held.by_channel. chosen: the first channel of the bar that is marked."""
    runs = bool((table["last"] > table["channel"]).any())
    tips: dict[str, plot.Tip] = {"channel": (f"{axes.columns} from" if runs else axes.column, ",")}
    tips |= {"last": ("to", ",")} if runs else {}
    if "absmax" in table:
        y = plot.y("absmax", "absmax")
        tips["absmax"] = ("absmax", ".4~g")
    else:
        y = plot.y("values", "values in the range", {"tickMinStep": 1})
        tips |= {"values": ("values in the range", ","), "of": ("of", ",")}
    x = plot.x("channel", axes.titles[0], domain=[0, float(table["last"].max()) + 1], nice=False)
    look: plot.Look = {"color": style.FINE, "choose": "channel" if clickable else ""}
    ends = table.assign(end=table["last"] + 1)
    if chosen is None:
        return plot.layers(title, subtitle, plot.steps(ends, x, "end", y, tips=tips, **look))
    look |= plot.when(f"datum.channel === {chosen}", opacity=(1, 0.5))
    last = float(table["last"][table["channel"] == chosen].iloc[0])
    rule = plot.rule(x=(chosen + last + 1) / 2, strokeDash=[4, 3])
    return plot.layers(title, subtitle, rule, plot.steps(ends, x, "end", y, tips=tips, **look))


def rows_by_columns(
    values: np.ndarray, shape: tuple[int, int], subtitle: str | list[str], axes: Axes, of: str = ""
) -> Chart:
    """A heatmap of log2 of the largest magnitude of each cell of compute.pooled, or of a difference `of` two; cells of
    zeros are gray."""
    with np.errstate(divide="ignore"):
        log2 = np.log2(values)
    log2 = np.where(np.isfinite(log2), log2, np.nan)
    title = style.title(f"{'Difference' if of else 'Magnitude'} by {axes.by}", subtitle)
    return heatmap(log2, title, *_axes(axes, shape), f"log₂ |{of or 'value'}|", missing="zero or not finite")


def range_by_cell(
    share: np.ndarray, shape: tuple[int, int], words: str, subtitle: str | list[str], axes: Axes
) -> Chart:
    """A heatmap of the share of each cell's values that lie in a range, from Held.by_cell: not zero everywhere."""
    title = style.title(f"Share of values in {words} by {axes.by}", subtitle)
    limits = 0.0, float(np.nanmax(share)) * 100
    return heatmap(share * 100, title, *_axes(axes, shape), "% of values", limits, missing="not in the sample")


def _axes(axes: Axes, shape: tuple[int, int]) -> tuple[tuple[str, int], tuple[str, int]]:
    return (axes.titles[0], shape[1]), (axes.titles[1], shape[0])
