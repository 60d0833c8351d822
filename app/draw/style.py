"""One visual language: a format's color, numbers, axis wording, legends and titles. No Streamlit here."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import altair as alt
import numpy as np
import pandas as pd

from binade.app.draw.numbers import POWERS_OF_TWO
from binade.data.run import tensor_kinds
from binade.data.run.tensor_kinds import color_of, tensor_names
from binade.data.words.fields import MEASURES as MEASURES
from binade.data.words.text import superscript
from binade.quant.formats import FORMATS
from binade.quant.specs import Spec

# Of the formats that are not in DASHED, of BAD and of CLIPPED, any two can be told apart without red or green cones.
FORMAT_COLORS = {
    "bf16": "#6d7979",
    "fp16": "#929292",
    "fp8_e4m3": "#3d6d79",
    "fp8_e5m2": "#189ec2",
    "hifp8": "#aa6d0c",
    "mxfp8": "#006dff",
    "mxfp8_e5m2": "#5592ff",
    "mxfp6_e3m2": "#aa6d9e",
    "mxfp6_e2m3": "#86559e",
    "mxfp4": "#c2243d",
    "mxint8": "#188661",
    "nvfp4": "#559e79",
}
# Variants and newcomers, whose lines are dashed.
DASHED = {
    "fp8_e4m3fnuz": "#865586",
    "fp8_e5m2fnuz": "#617949",
    "mxfp8_e4m3fnuz": "#6192aa",
    "mxfp8_e5m2fnuz": "#b66118",
    "hif4": "#c26192",
    "nvint4": "#31866d",
    "mxint4": "#796db6",
}
SPARE = (*DASHED.values(),)
# A new format needs no change here. Its color follows from its name, so that no other format changes it.
DASHED |= {
    name: SPARE[zlib.crc32(name.encode()) % len(SPARE)] for name in FORMATS if name not in (*FORMAT_COLORS, *DASHED)
}
FORMAT_COLORS |= DASHED
# For groups that are not formats: none of the colors above. All are readable on light and on dark. The first six can
# be told apart without red or green cones, as can the formats that runs are most often trained in.
PALETTE = ["#6366f1", "#ab9218", "#18a0c6", "#ca1f85", "#4b6e22", "#cf7a78", "#a855c7", "#0d9488", "#b4633a", "#6b7a90"]
MAX_GROUPS = len(PALETTE)
# For runs whose format has its color taken. The first four can be told apart, and from hifp8, mxfp8 and mxfp4, without
# red or green cones.
RUN_COLORS = [*dict.fromkeys(["#18a0c6", "#ca1f85", "#cf7a78", "#22a04a", *PALETTE])]
ALIKE = 75  # distance of two colors in RGB, below which lines of both are hard to tell apart
MARKS = 5000  # the most marks that a chart sends to a browser
BAND = 0.25  # opacity of a selected range
DASHES = ([1, 0], [6, 3], [2, 2], [10, 3, 2, 3], [1, 4])
SHAPES = ("circle", "triangle-up", "cross", "square", "diamond")

_FORMAT = "|".join(sorted(FORMAT_COLORS, key=len, reverse=True))
_FORMAT_IN = re.compile(rf"(?<![A-Za-z0-9])({_FORMAT})(?:_scaled)?(?![A-Za-z0-9_])")
_RECIPE = re.compile(
    rf"((FA|linear|QK|PV|router)_)*({_FORMAT})(_scaled)?(\(.*\))?(( at | · ).*)?"
)  # "mxfp8 · seed 2", "mxfp8 at 08:31:18 UTC", "mxfp8(scale=ceil)"
GREY = tensor_kinds.NEUTRAL  # of what belongs to no group: readable on light and on dark
NEUTRAL = {"as captured": GREY, "quantized run": PALETTE[2]}  # groups that are shown next to formats


# Bright means large (or bad): the anchors of viridis, for heatmaps and for ordered groups such as layers.
RAMP = ["#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725"]
# For a difference: better, the same, worse.
DIVERGING = ["#3457d5", "#9db2ee", "#e6e6ea", "#f0a3ad", "#c81e3f"]
# For ordered groups drawn as lines: the ramp without the ends that are invisible on dark or on light.
ORDERED = ["#7b5bd6", "#3f7fd0", "#1f9a8a", "#5a9e2f", "#b38600", "#d2622a"]
Title = alt.TitleParams
Looks = Mapping[str, tuple[str, int]]  # of groups: the color, and which dash or shape
CHOSEN, ONLY = "chosen", "only"  # the selections that a click on a chart makes, without and with Shift
DRAGGED, CLEARED = "dragged", "cleared"  # those of a drag, and of a double click on what a drag selected
BAD, CLIPPED, FINE = "#e0455f", "#c2850c", "#4f46e5"
OPERATIONS = {"forward": "#0d9488", "backward": "#a855c7", "optimizer": GREY, "evaluation": "#3b8ea5"}


def ordered_colors(n: int) -> list[str]:
    """n colors that run from first to last, readable on light and on dark."""
    return ["#" + row.tobytes().hex() for row in mixed(ORDERED, n)]


def mixed(anchors: Sequence[str], n: int) -> np.ndarray:
    """n colors from the first of these to the last: uint8 [n, 3]."""
    channels = np.array([list(bytes.fromhex(color[1:])) for color in anchors], float)
    at = np.linspace(0, len(anchors) - 1, n)
    return np.stack([np.interp(at, np.arange(len(anchors)), channel) for channel in channels.T], 1).round().astype("u1")


def format_in(group: str) -> str | None:
    """The format that a quant type, a recipe or a label names: "FA_linear_mxfp8_e5m2(scale=ceil)" is mxfp8_e5m2."""
    named = _FORMAT_IN.findall(re.sub(r"(?<=\w)\([^()]*\)", "", group))
    return named[-1] if named else None


def color_of_spec(text: str) -> str:
    """A spec's color: that of its format."""
    return FORMAT_COLORS[Spec.of(text).format.name]


def styles(groups: list[str], by: str = "", own: Looks | None = None) -> tuple[list[str], list[int]]:
    """(colors, which dash or shape). own: of groups that have them already, such as runs. For the others: if the chart
    is by tensor name, tensors have the colors of data.run.tensor_kinds; all unknown names share one. A group that names
    a format has the format's color. Recipes of one format differ by dash or shape; if there are too many, and for other
    groups, colors come from the palette."""
    if own:
        looks = [own.get(group, (color, nth)) for group, color, nth in zip(groups, *styles(groups, by), strict=True)]
        return [color for color, _ in looks], [nth for _, nth in looks]
    if by == "tensor" and not set(groups).isdisjoint(tensor_names()):
        kinds = [color_of(name) for name in groups]
        return kinds, [kinds[:index].count(color) % len(DASHES) for index, color in enumerate(kinds)]
    formats = [group if group in NEUTRAL else format_in(group) for group in groups]
    most = len(DASHES) if all(group in NEUTRAL or _RECIPE.fullmatch(group) for group in groups) else 1
    if None in formats or max((formats.count(name) for name in formats), default=0) > most:
        return [PALETTE[i % len(PALETTE)] for i in range(len(groups))], [0] * len(groups)
    nth = [(formats[:index].count(name) + (name in DASHED)) % len(DASHES) for index, name in enumerate(formats)]
    return [(NEUTRAL | FORMAT_COLORS)[name] for name in formats if name], nth


def run_styles(runs: Sequence[tuple[str, str | None]]) -> list[tuple[str, int]]:
    """The color and the dash of each run, given (what it rounds to, the color that a user chose) in order, so that
    runs added later change nothing. bf16 has its own color, and the first run of each other format that of the format;
    all others have one of RUN_COLORS. A color that is used again, or is hard to tell from one in use, has another
    dash."""
    used = Counter(color for _, color in runs if color)
    looks: list[tuple[str, int]] = []

    def near(color: str) -> int:
        rgb = bytes.fromhex(color[1:])
        return sum(count for other, count in used.items() if math.dist(rgb, bytes.fromhex(other[1:])) < ALIKE)

    for rounded, chosen in runs:
        if chosen:
            looks.append((chosen, sum(color == chosen for color, _ in looks) % len(DASHES)))
            continue
        color = FORMAT_COLORS.get(format_in(rounded) or "", RUN_COLORS[0])
        if used[color] and rounded != "bf16":
            color = min(RUN_COLORS, key=lambda candidate: used[candidate])
        looks.append((color, near(color) % len(DASHES)))
        used[color] += 1
    return looks


def colors(groups: list[str], by: str = "", own: Looks | None = None) -> list[str]:
    """One color per group, as `styles`."""
    return styles(groups, by, own)[0]


def shortened(pixels: int) -> str:
    """The labels of an axis or a legend, as one of Vega's expressions: names that are longer than this lose letters of
    their middle, since names that begin alike differ at their ends. Vega itself would cut off the ends."""
    half = pixels // WIDEST // 2
    cut = f"slice(datum.label, 0, {half}) + '…' + slice(datum.label, 1 - {half})"
    return f"length(datum.label) > {2 * half} ? {cut} : datum.label"


DECADES = alt.Axis(labelOverlap=True, tickCount=6)  # of a logarithmic axis
SYMBOL = 300  # square pixels of a line in a legend: as long as most dashes and their gaps
DOT = 60  # square pixels of a point in a legend
LEGEND_WIDTH = 310  # pixels that every chart has for a legend above it, even on a phone
LEGEND_LABEL = 380  # pixels of the longest label of a legend
BESIDE = 18  # characters of the longest label of a legend next to the lines; with longer labels, it is above them
Place = Literal["right", "top"]  # of a legend: next to the plot, or above it
WIDEST = 8  # pixels of a letter of a long name
DIRECT = 8  # lines that are labelled at their ends
EARLY = 0.95  # of the width: a line that ends before has its name at its own end
LABEL = 14  # pixels between two such labels


def power_of_two(exponent: float) -> str:
    """2⁻¹², 2⁻¹²·⁵"""
    return "2" + superscript(f"{exponent:.6g}")


def binades(title: str, ticks: int = 8) -> alt.Axis:
    """The axis of a field that is a log₂, labelled with powers of two."""
    return alt.Axis(title=title, labelExpr=POWERS_OF_TWO, tickMinStep=1, tickCount=ticks)


def columns(groups: list[str]) -> int:
    """The number of columns of a legend above a plot."""
    return max(1, min(len(groups), LEGEND_WIDTH // (56 + 7 * max(len(group) for group in groups))))


def legend_height(groups: list[str], place: Place = "right") -> int:
    """The height in pixels that a chart's legend needs: 0 if it is next to the lines, and for a single group, which has
    no legend."""
    if len(groups) < 2 or _orient(groups, place) != "top":
        return 0
    return 22 * math.ceil(len(groups) / columns(groups))


def _orient(groups: list[str], place: Place) -> Place:
    return "top" if max(len(group) for group in groups) > BESIDE else place


def legend(groups: list[str], title: str, line: bool = False, place: Place = "right") -> alt.Legend | None:
    """A legend; above the plot if the labels are long."""
    if len(groups) < 2:
        return None
    orient = _orient(groups, place)
    above = orient == "top"
    return alt.Legend(
        title=None if above else title,
        orient=orient,
        columns=columns(groups) if above else 1,
        offset={"top": 2, "right": 10}[orient],
        labelLimit=LEGEND_LABEL,
        labelExpr=shortened(LEGEND_LABEL),
        rowPadding=1,
        symbolOpacity=1,
        symbolType="stroke" if line else alt.Undefined,
        symbolSize=SYMBOL if line else DOT,
    )


def color(
    groups: list[str],
    title: str,
    shown: bool = True,
    line: bool = False,
    own: Looks | None = None,
    place: Place = "right",
) -> alt.Color:
    """The color of the column group; shown: with a legend; own: as in `styles`; place: as in `legend`."""
    scale = alt.Scale(domain=groups, range=colors(groups, title, own))
    return alt.Color("group:N", scale=scale, legend=legend(groups, title, line, place) if shown else None)


def dash(groups: list[str], title: str, place: Place = "right", own: Looks | None = None) -> alt.StrokeDash:
    scale = alt.Scale(domain=groups, range=[DASHES[n] for n in styles(groups, title, own)[1]])
    return alt.StrokeDash("group:N", scale=scale, legend=legend(groups, title, True, place))


def shape(groups: list[str], title: str, place: Place = "right", own: Looks | None = None) -> alt.Shape:
    scale = alt.Scale(domain=groups, range=[SHAPES[n] for n in styles(groups, title, own)[1]])
    return alt.Shape("group:N", scale=scale, legend=legend(groups, title, place=place))


def choice(field: str) -> alt.Parameter:
    """Make marks clickable: the selection CHOSEN holds the field of the clicked one."""
    return alt.selection_point(name=CHOSEN, fields=[field], on="click[!event.shiftKey]", toggle=False, empty=True)


def drag() -> alt.Parameter:
    """Make a range of x selectable with a drag: the selection DRAGGED holds its ends."""
    mark = alt.BrushConfig(fill=GREY, fillOpacity=BAND, stroke=GREY)
    return alt.selection_interval(name=DRAGGED, encodings=["x"], zoom=False, mark=mark)


def clear(field: str) -> alt.Parameter:
    """Make the mark of a selected range clearable: the selection CLEARED is that of a double click on it."""
    return alt.selection_point(name=CLEARED, fields=[field], on="dblclick", toggle=False, clear=False)


def only(*fields: str) -> alt.Parameter:
    """Make marks Shift-clickable: the selection ONLY holds their fields, to which the filter is then set."""
    return alt.selection_point(
        name=ONLY, fields=list(fields), on="click[event.shiftKey]", toggle=False, clear=False, empty=True
    )


def labelled(lines: alt.Chart, groups: Sequence[str]) -> alt.Chart | alt.LayerChart:
    """The lines of the groups with their names at their ends in place of a legend, if they are few and the names short.

    A stroke with the color and the dash of its line leads to each name. Where ends nearly coincide, the names move
    apart. A line that ends before EARLY of the width has its name there, and no stroke: it would look like more of the
    line. Positions in pixels are known only where the chart is drawn, hence Vega's expressions."""
    x, y, group = (str(getattr(lines.encoding, name).shorthand).partition(":")[0] for name in ("x", "y", "color"))
    known = lines.data[np.isfinite(lines.data[y].astype(float))].sort_values(x, kind="stable")
    ends = known.groupby(group).tail(1).sort_values(y, ascending=False, kind="stable")
    if not 2 <= len(ends) <= DIRECT or len(ends) < len(groups) or max(map(len, groups)) > BESIDE:
        return lines
    lines = lines.copy()
    for channel in (lines.encoding.color, lines.encoding.strokeDash):
        if channel is not alt.Undefined:
            channel.legend = None
    ends = ends[[x, y, group]].assign(name=ends[group])
    early = ends[x] < known[x].min() + EARLY * (known[x].max() - known[x].min())
    stopped, ends = ends[early], ends[~early].assign(place=range(int((~early).sum())))
    shift = _apart([float(value) for value in ends[y]])
    at = {"width": f"scale('x', datum['{x}'])", "height": f"scale('y', datum['{y}'])"}
    right, down = (f"(round(clamp({place}, 0, {size}) - {place}) || 0)" for size, place in at.items())  # where zoomed
    base = alt.Chart(ends).encode(y=lines.encoding.y, color=lines.encoding.color)
    strokes = base.mark_rule(
        strokeWidth=1.8,
        opacity=alt.ExprRef(f"{right} || {down} ? 0 : 0.8"),
        aria=False,
        clip=False,
        xOffset=alt.ExprRef(right),
        yOffset=alt.ExprRef(down),
        x2Offset=20,
        y2Offset=shift,
    ).encode(
        x=lines.encoding.x,
        x2=as_channel("x2", {"value": "width"}),
        y2=alt.Y2(f"{y}:Q"),
        strokeDash=lines.encoding.strokeDash,
    )
    names = base.mark_text(align="left", clip=False, dx=24, dy=shift, fontSize=12, fontWeight=600).encode(
        x=as_channel("x", {"value": "width"}), text=alt.Text("name:N")
    )
    title, lines.title = lines.title, alt.Undefined
    layers = [lines, strokes, names]
    if len(stopped):
        at_end = alt.Chart(stopped).mark_text(align="left", dx=8, dy=-8, fontSize=12, fontWeight=600)
        look = {"x": lines.encoding.x, "y": lines.encoding.y, "color": lines.encoding.color}
        layers.append(at_end.encode(**look, text=alt.Text("name:N")))
    return alt.LayerChart(layer=layers, title=title)


def _apart(values: list[float]) -> alt.ExprRef:
    """By how many pixels to shift the label of the row `datum.place` of descending values, so that all lie LABEL apart
    and within the plot: halfway between the smallest shift that only lowers labels and that which only raises them.
    0 if the chart is part of another, where the name of the scale of y differs."""
    at = [f"scale('y', {value!r})" for value in values]
    steps = [f"{position} + {LABEL} * (datum.place - {index})" for index, position in enumerate(at)]
    lowered = ", ".join(f"{index} > datum.place ? -1e9 : {step}" for index, step in enumerate(steps))
    raised = ", ".join(f"{index} < datum.place ? 1e9 : {step}" for index, step in enumerate(steps))
    above = f"item.mark.group.height - {LABEL} * ({len(values) - 1} - datum.place)"
    middle = f"max({LABEL} * datum.place, min({above}, (max({lowered}) + min({raised})) / 2))"
    return alt.ExprRef(f"({middle} - [{', '.join(at)}][datum.place]) || 0")


DRAG = "[pointerdown{}, window:pointerup] > window:pointermove!"


def zoom(name: str) -> alt.Parameter:
    """Zoom with a pinch or Ctrl and the wheel, move with Alt. name: of the chart, among those next to it."""
    return alt.selection_interval(
        name=f"zoom{name}",
        bind="scales",
        on=DRAG.format("[event.altKey]"),
        translate=DRAG.format("[event.altKey]"),
        zoom="wheel![event.ctrlKey]",
    )


def title(text: str, subtitle: str | list[str]) -> alt.TitleParams:
    """A chart's title and subtitle; a list has one line per item."""
    if not subtitle:
        return alt.TitleParams(text, anchor="start", offset=6)
    return alt.TitleParams(text, subtitle=subtitle, anchor="start", subtitleColor=GREY, subtitleFontSize=12, offset=12)


def small_title(text: str, subtitle: str | None = None) -> alt.TitleParams:
    """The title of one of several plots of a chart."""
    below: dict[str, Any] = {"subtitle": subtitle, "subtitleColor": GREY} if subtitle else {}
    return alt.TitleParams(text, anchor="start", fontSize=13, **below)


def as_channel(name: str, value: str | Any) -> Any:
    """A channel of a column, or of a value or a condition of Altair's. `encode` makes the same object, but compares the
    value with all classes of its schema, which took a quarter of the time of Explore."""
    kind = name[0].upper() + name[1:]
    return getattr(alt, kind)(value) if isinstance(value, str) else getattr(alt, f"{kind}Value")(**value)


def groups_of(table: pd.DataFrame) -> list[str]:
    """The values of the column group, in order of appearance."""
    return list(dict.fromkeys(table["group"]))
