"""Charts drawn from a table: its marks, axes, colors, tooltips and selections, as the whole app has them. No Streamlit.

A chart is `layers(title, subtitle, ...)` of marks. `mark` draws one mark per row; `bars`, `cells`, `steps`, `rule` and
`diagonal` are marks that several questions have. Places are made by `x`, `y`, `ordinal`, `iterations` and `names`,
colors by `style.color`, `named` and `ramp`, tooltips by `tips`. A column that has no title of its own is given by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import altair as alt
import pandas as pd

from binade.app.draw import style
from binade.app.draw.figure import Chart
from binade.data.words.fields import Field

Kind = Literal["area", "bar", "circle", "image", "line", "point", "rect", "rule", "text", "tick"]
X: TypeAlias = alt.X
Y: TypeAlias = alt.Y
Look = dict[str, Any]  # channels of a mark, and properties of marks, axes and scales, by Vega-Lite's names
Tip = str | tuple[str, str] | Field  # of a column: its title, or that and d3's format of its numbers, or its field
Tips = Mapping[str, Tip]
USUAL: dict[str, dict[str, Any]] = {
    "line": {"strokeWidth": 1.8},
    "point": {"filled": True, "size": 70},
    "rect": {"strokeWidth": 0},
    "text": {"align": "left", "fontSize": 12, "color": style.GREY},
}
"""The properties that marks have unless they are given others."""
_TYPES = {"x": ":Q", "y": ":Q", "text": ":N", "url": ":N", "detail": ":N", "order": ":Q"}  # of columns given by name


def tips(**columns: Tip) -> Tips:
    """What the pointer shows of a mark: columns of its table, in this order, by their titles. A field writes its values
    as sentences do."""
    return columns


def _with_tooltip(table: pd.DataFrame, shown: Tips) -> tuple[pd.DataFrame, list[alt.Tooltip]]:
    """The table with the texts that its tooltip shows of fields, and the tooltip. Other numbers are written by
    `app.draw.numbers`, unless a format is given."""
    tooltip, texts = [], {}
    for name, tip in shown.items():
        column = name
        if isinstance(tip, Field):
            column, title, form = f"{name} as text", tip.axis, ""
            texts[column] = table[name].map(tip.text)
        else:
            title, form = (tip, "") if isinstance(tip, str) else tip
        kind = "Q" if column == name and pd.api.types.is_numeric_dtype(table[name]) else "N"
        tooltip.append(alt.Tooltip(f"{column}:{kind}", title=title, format=form or alt.Undefined))
    return table.assign(**texts) if texts else table, tooltip


def _place(kind: type[alt.X] | type[alt.Y], column: str, title: Any, axis: Any, scale: dict[str, Any]) -> Any:
    shorthand = column if ":" in column else f"{column}:Q"
    look = alt.Axis(**axis) if isinstance(axis, dict) else axis
    return kind(shorthand, title=title, axis=look, scale=alt.Scale(**scale) if scale else alt.Undefined)


def x(column: str, title: Any = alt.Undefined, axis: Any = alt.Undefined, **scale: Any) -> alt.X:
    """The place of a mark along x. column: of numbers, unless it ends in ":O" or ":N". axis: properties of Vega-Lite's
    axis; scale: of its scale, such as zero=False, padding=16 (pixels), domain=[0, 1]."""
    place: alt.X = _place(alt.X, column, title, axis, scale)
    return place


def y(column: str, title: Any = alt.Undefined, axis: Any = alt.Undefined, log: bool = False, **scale: Any) -> alt.Y:
    """As `x`. log: a logarithmic axis, of whose scale only the domain can be given."""
    if log:
        axis, scale = style.DECADES, {"type": "log"} | {name: scale[name] for name in scale if name == "domain"}
    place: alt.Y = _place(alt.Y, column, title, axis, scale)
    return place


def ordinal(column: str, title: str | None = None, **axis: Any) -> alt.X:
    """Columns of a heat map, or bars: one per layer, head or iteration. title: by default the column's name."""
    return x(f"{column}:O", title or column, {"labelAngle": 0, "labelOverlap": True} | axis)


def iterations(**scale: Any) -> alt.X:
    """The iteration, as a number."""
    return x("iteration", "iteration", {"tickMinStep": 1, "format": "d"}, **scale)


def names(
    column: str, order: Iterable[str] | None, longest: int = 240, axis: Look | None = None, **scale: Any
) -> alt.Y:
    """Names, one row each, in this order, or that of the table. longest: pixels of a name; axis: other properties of
    Vega-Lite's axis."""
    look: Look = {"ticks": False, "domain": False, "labelLimit": longest, "labelExpr": style.shortened(longest)}
    place = y(f"{column}:N", None, look | (axis or {}), **scale)
    return place.sort(None if order is None else list(order))


def named(column: str, looks: Mapping[Any, str], legend: Any = alt.Undefined) -> alt.Color:
    """The colors of names. legend: None for no legend, that of `style.legend`, or properties of Vega-Lite's."""
    scale = alt.Scale(domain=[*looks], range=[*looks.values()])
    legend = alt.Legend(**legend) if isinstance(legend, dict) else legend
    return alt.Color(column if ":" in column else f"{column}:N", scale=scale, legend=legend)


ABOVE = {"title": None, "orient": "top", "offset": 0}  # a legend between title and plot


def operations(present: Iterable[str], legend: Mapping[str, Any] = ABOVE) -> alt.Color:
    """The colors of those operations that are present, grey for one without a color of its own. A single one has no
    legend."""
    rest = set(present)
    ordered = [name for name in style.OPERATIONS if name in rest] + sorted(rest - set(style.OPERATIONS))
    colors = {name: style.OPERATIONS.get(name, style.GREY) for name in ordered}
    color: alt.Color = named("operation", colors, legend if len(colors) > 1 else None)
    return color


def ramp(column: str, legend: Mapping[str, Any] | None, **scale: Any) -> alt.Color:
    """The colors of numbers in a heat map: bright is large. legend and scale: properties of Vega-Lite's."""
    colors = alt.Scale(**({"range": style.RAMP, "interpolate": "rgb"} | scale))
    return alt.Color(f"{column}:Q", scale=colors, legend=alt.Legend(**legend) if legend else None)


def in_table() -> Look:
    """The channels of groups whose looks are in the table: columns group, color and dash. Such a chart stays when its
    groups change."""
    return {
        "color": alt.Color("color:N", scale=None),
        "strokeDash": alt.StrokeDash("dash:N", scale=None),
        "detail": "group:N",
    }


def shift(column: str, low: float, high: float) -> alt.YOffset:
    """A column that moves marks within their row, whose height is from low to high."""
    return alt.YOffset(f"{column}:Q", scale=alt.Scale(domain=[low, high]))


def when(test: str | alt.Parameter | alt.PredicateComposition, **looks: tuple[Any, Any]) -> dict[str, Any]:
    """Channels with one value where a test in Vega's language holds, or a selection, and another elsewhere."""
    return {
        name: style.as_channel(name, alt.condition(test, alt.value(here), alt.value(elsewhere)))
        for name, (here, elsewhere) in looks.items()
    }


def _crosshair(row: str, column: str, fade: bool) -> tuple[list[alt.Parameter], dict[str, Any]]:
    """Highlights the row and column of the heat map's cell under the pointer: (parameters, channels). They are
    outlined; with fade, for cells whose strokes cover the seams between them, the other cells are faded."""
    over = [
        alt.selection_point(name=f"over_{field}", fields=[field], on="pointerover", clear="pointerout", empty=fade)
        for field in (row, column)
    ]
    looks = {"fillOpacity": (1.0, 0.45), "strokeOpacity": (1.0, 0.0)} if fade else {"strokeWidth": (2.5, 0.5)}
    return over, when(over[0] | over[1], **looks)


def mark(
    kind: Kind,
    table: pd.DataFrame,
    *,
    tips: Tips | None = None,
    choose: str = "",
    fade: tuple[float, float] | None = None,
    only: Sequence[str] = (),
    params: Sequence[alt.Parameter] = (),
    **more: Any,
) -> alt.Chart:
    """One mark for each row of the table.

    tips    what the pointer shows
    choose  the field that a click on a mark selects, see `style.choice`
    fade    with choose, the opacities of selected marks and of others
    only    the fields that a click with Shift selects, see `style.only`
    params  other selections
    more    channels and properties of the mark, by Vega-Lite's names. A channel is what the functions above return, the
            name of a column, or a number of pixels from the upper left corner. point, of a line: the size of its points
    """
    channels: dict[str, Any] = {}
    look = dict(USUAL.get(kind, {}))
    for name, value in more.items():
        if name in (*_TYPES, "x2", "y2") and isinstance(value, str):
            channels[name] = style.as_channel(name, value if ":" in value else value + _TYPES.get(name, ""))
        elif name in ("x", "y") and isinstance(value, int | float):
            channels[name] = style.as_channel(name, {"value": value})
        elif hasattr(value, "_encoding_name"):
            channels[name] = value
        elif name == "color" and more.get("point"):  # a property would not color the line's points
            channels[name] = alt.ColorValue(value)
        elif name == "point":
            points = alt.OverlayMarkDef(size=value, cursor="pointer" if choose else alt.Undefined)
            look[name] = points if value else False
        else:
            look[name] = value
    if "color" in channels:
        look.pop("color", None)
    if choose:
        if kind != "line":
            look["cursor"] = "pointer"
        selected = style.choice(choose)
        params = [*params, selected]
        if fade:
            channels |= when(selected, opacity=fade)
    if only:
        params = [*params, style.only(*only)]
    if tips:
        table, channels["tooltip"] = _with_tooltip(table, tips)
    chart: alt.Chart = alt.Chart(table, mark=alt.MarkDef(type=kind, **look)).encode(**channels)
    return chart.add_params(*params) if params else chart


def rule(*, x: float | None = None, y: float | None = None, **look: Any) -> alt.Chart:
    """A line across the plot at a value of x or of y: dashed and grey, unless `look` differs."""
    name, value = ("y", y) if x is None else ("x", x)
    usual: Look = {name: name, "strokeDash": [4, 4], "color": style.GREY}
    return mark("rule", pd.DataFrame({name: [value]}), **usual | look)


def diagonal(low: float, high: float, **look: Any) -> alt.Chart:
    """The line on which x and y are equal."""
    ends = pd.DataFrame({"x": [low, high], "y": [low, high]})
    usual: Look = {"strokeDash": [4, 3], "color": style.GREY, "strokeWidth": 1.5}
    return mark("line", ends, **{"x": "x", "y": "y"} | usual | look)


def cells(table: pd.DataFrame, row: str, column: str, *, seams: bool = True, **more: Any) -> alt.Chart:
    """A heat map: the row and the column under the pointer are outlined; more: as of `mark`. row, column: fields of the
    cells. without seams: strokes of its color cover those between cells, and the other cells are faded instead."""
    over, crossed = _crosshair(row, column, not seams)
    if not seams:
        color = more["color"]
        crossed["stroke"] = alt.Stroke(color["shorthand"], scale=color["scale"], legend=None)
    chart: alt.Chart = mark("rect", table, params=over, **{"strokeWidth": alt.Undefined if seams else 0.8} | more)
    return chart.encode(**crossed)


def bars(
    table: pd.DataFrame, y: alt.Y, x: alt.X, *, text: str, end: str, between: tuple[str, str] | None = None, **more: Any
) -> list[alt.Chart]:
    """Bars to the right with the column `text` beside each, at the column `end`. between: columns of the ends of a thin
    line on the bar, such as percentiles. more: of the bars, as of `mark`."""
    shown = more.get("tips")
    drawn = [mark("bar", table, y=y, x=x, **{"size": 18, "cornerRadiusEnd": 3} | more)]
    if between:
        low, high = between
        drawn.append(intervals(table, low, high, y=y))
    return [*drawn, mark("text", table, y=y, x=end, text=text, tips=shown, dx=5)]


def intervals(table: pd.DataFrame, low: str, high: str, **more: Any) -> alt.Chart:
    """A line from one column to another: along x if y is given, along y if x is. Rows without an end have none."""
    along = "x" if "y" in more else "y"
    usual: Look = {along: low, f"{along}2": high, "color": style.GREY, "strokeWidth": 1.5}
    return mark("rule", table.dropna(subset=[low, high]), **usual | more)


def steps(table: pd.DataFrame, x: alt.X, high: str, y: alt.Y, **more: Any) -> alt.Chart:
    """A histogram: bars from 0, from x to the column `high`."""
    return mark("rect", table, x=x, x2=high, y=y, y2=alt.Y2Datum(0), **more)


def layers(
    title: str | alt.TitleParams, subtitle: str | list[str], *marks: Chart, independent: str = "", **properties: Any
) -> Chart:
    """A chart of marks, the first at the bottom. Charts of layers are taken apart, so that every selection is a
    parameter of the outermost chart. independent: a channel whose scales differ between layers."""
    flat: list[Any] = []
    params: list[Any] = []
    resolve: Any = alt.Undefined
    for mark in marks:
        if not isinstance(mark, alt.LayerChart):
            flat.append(mark)
            continue
        for layer in mark.layer:  # Altair moves the data that all layers share to their chart
            flat.append(layer.copy(deep=False))
            flat[-1].data = mark.data if layer.data is alt.Undefined else layer.data
        params += mark.params if isinstance(mark.params, list) else []
        resolve = mark.resolve if resolve is alt.Undefined else resolve
    flat = [layer.copy(deep=False) for layer in flat]
    for layer in flat:
        layer.title = alt.Undefined
    single = len(flat) == 1 and not (params or independent)
    chart: Any = flat[0] if single else alt.LayerChart(layer=flat, params=params or alt.Undefined, resolve=resolve)
    chart.title = style.title(title, subtitle) if isinstance(title, str) else title
    if independent:
        chart = chart.resolve_scale(**{independent: "independent"})
    for name, value in properties.items():  # `chart.properties` would copy and check the whole chart
        setattr(chart, name, value)
    result: Chart = chart
    return result


def pointer(lines: alt.Chart, groups: list[str], field: str) -> list[alt.Chart]:
    """What the pointer shows in a chart of lines by iteration: a rule at the nearest iteration, whose tooltip has every
    group's value of the field, and a point on each line."""
    nearest = alt.selection_point(
        name="nearest", fields=["iteration"], nearest=True, on="pointerover", clear="pointerout", empty=False
    )
    texts = {f"t{nth}": f"isValid(datum.v{nth}) ? format(datum.v{nth}, '.4f') : '–'" for nth in range(len(groups))}
    titles = [group.replace("\\", "\\\\") for group in groups]  # Vega-Lite does not escape them in tooltips
    tooltip = [alt.Tooltip("iteration:Q", title=f"{field} at iteration")]
    # Vega-Lite looks for a text of the mark that is nearest in the wrong place, unless it has a format.
    tooltip += [alt.Tooltip(f"t{nth}:N", title=title, format="") for nth, title in enumerate(titles)]
    rule = (
        mark("rule", lines.data, x=lines.encoding.x, color=style.GREY, **when(nearest, opacity=(0.8, 0)))
        .transform_calculate(key=f"'v' + indexof({json.dumps(groups)}, datum.group)")
        .transform_pivot("key", field, groupby=["iteration"])
        .transform_calculate(**texts)
        .encode(tooltip=tooltip)
        .add_params(nearest)
    )
    places = {"x": lines.encoding.x, "y": lines.encoding.y, "color": lines.encoding.color}
    points = mark("point", lines.data, size=45, opacity=1, tooltip=None, **places).transform_filter(nearest)
    return [rule, points]


def facets(
    title: str, lines: alt.Chart, behind: Sequence[alt.Chart], by: Mapping[str, tuple[str, dict[str, Any]]], **size: int
) -> Chart:
    """A chart for each value of some columns of the lines' table, with shared axes. behind: marks in each of them;
    by: for "row" and "column" the column of the table, and properties of Vega-Lite's header."""
    table, inner = lines.data, lines.copy(deep=False)
    inner.data = alt.Undefined
    places: Look = {
        name: {"row": alt.Row, "column": alt.Column}[name](
            f"{column}:O", header=alt.Header(**look), sort=list(dict.fromkeys(table[column]))
        )
        for name, (column, look) in by.items()
    }
    panel = alt.layer(*behind, inner, data=table).properties(**size)
    chart: alt.FacetChart = panel.facet(**places, spacing={"row": 18, "column": 10})
    return chart.properties(title=style.title(title, ""))


def apart(title: alt.TitleParams, charts: Sequence[Chart], columns: int) -> Chart:
    """Charts side by side and below each other, each with colors of its own."""
    drawn = alt.concat(*charts, columns=columns, spacing=40).properties(title=title)
    chart: alt.ConcatChart = drawn.resolve_scale(color="independent", strokeDash="independent")
    return chart


def grid(title: alt.TitleParams, charts: Sequence[Chart], columns: int) -> Chart:
    """Charts side by side and below each other, of one color scale."""
    rows = [charts[index : index + columns] for index in range(0, len(charts), columns)]
    drawn = [alt.hconcat(*row, spacing=30).resolve_scale(color="shared") for row in rows]
    chart: alt.VConcatChart = alt.vconcat(*drawn, spacing=24).properties(title=title).resolve_scale(color="shared")
    return chart
