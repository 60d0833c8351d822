"""A chart of the columns of a query's result. No Streamlit here."""

from __future__ import annotations

from typing import Any, Literal

import altair as alt
import numpy as np
import pandas as pd

from binade.app.draw import style
from binade.app.draw.figure import Figure
from binade.data.words.text import one_line


def is_number(values: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def figure(rows: pd.DataFrame, x: str, y: str, color: str | None, sql: str) -> Figure:
    """Bars over names, lines over numbers and times; points where one x of a color has several rows. Fields have names
    of our own, since Vega reads dots and brackets in a name as a path."""
    table = pd.DataFrame({"x": rows[x], "y": rows[y].astype(float), "group": _names(rows[color]) if color else "all"})
    kind: Literal["Q", "T", "N"] = "N"
    if is_number(rows[x]) or pd.api.types.is_datetime64_any_dtype(rows[x]):
        kind = "Q" if is_number(rows[x]) else "T"
    else:
        table["x"] = _names(rows[x])
    ordered = color and is_number(rows[color])
    table = table.loc[rows[color].sort_values().index if ordered else rows.index]
    table = table[np.isfinite(table["y"])]
    groups = style.groups_of(table)
    several = bool(table.duplicated(["x", "group"]).any())
    marks: dict[str, Any] = {"type": "bar"} if kind == "N" else {"type": "line", "point": True}
    marks = {"type": "point", "filled": True, "size": 40} if several else marks
    axis = alt.Axis(tickCount=8, tickMinStep=1 if pd.api.types.is_integer_dtype(rows[x]) else alt.Undefined)
    places: dict[str, Any] = {"axis": axis, "scale": alt.Scale(zero=False, nice=False)}
    if kind == "N":
        names = list(dict.fromkeys(table["x"].loc[table.index.sort_values()]))
        short = sum(map(len, names)) < 100
        places = {"axis": alt.Axis(labelAngle=0 if short else -40, labelLimit=160), "sort": names}
    colors = style.ordered_colors(len(groups)) if ordered else style.colors(groups)
    shown = rows[list(dict.fromkeys(name for name in (x, y, color) if name))]
    # Vega-Lite writes titles into expressions without escaping backslashes.
    x, y, color = (name.replace("\\", "∖") for name in (x, y, color or ""))
    fields = [alt.Tooltip(f"x:{kind}", title=x), alt.Tooltip("y:Q", title=y), alt.Tooltip("group:N", title=color)]
    shades = alt.Color("group:N", scale=alt.Scale(domain=groups, range=colors), legend=style.legend(groups, color))
    beside = kind == "N" and color and not several
    chart = alt.Chart(table, mark=alt.MarkDef(**marks)).encode(
        x=alt.X(f"x:{kind}", title=x, **places),
        y=alt.Y("y:Q", title=y, scale=alt.Scale(zero=marks["type"] == "bar"), axis=alt.Axis(tickCount=5)),
        xOffset=alt.XOffset("group:N", sort=groups) if beside else alt.Undefined,
        color=shades if color else alt.value(style.PALETTE[0]),
        tooltip=fields if color else fields[:2],
    )
    left_out = f", {len(rows) - len(table):,} without a finite y" if len(table) < len(rows) else ""
    chart = chart.properties(title=style.title(f"{y} by {x}", f"{len(rows):,} rows{left_out}"))
    return Figure("sql", chart, shown, one_line(sql, 4000), height=360 + style.legend_height(groups))


def _names(values: pd.Series) -> pd.Series:
    return values.astype(object).where(values.notna(), "none").astype(str)
