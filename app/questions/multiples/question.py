"""How do distributions differ by two fields at once? Small multiples with shared axes: rows, columns and color by any
field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.control import Control
from binade.app.figure import Drawn, Figure, source
from binade.app.formatting import evenly
from binade.app.params import TITLES, One
from binade.app.questions.question import Question, not_in_report
from binade.app.questions.shared import distribution_charts
from binade.app.questions.shared.distributions import Distribution, log2_histogram
from binade.app.questions.shared.labels import group_name
from binade.app.questions.shared.laws import qq
from binade.app.questions.shared.runs import every_run, labels_of, run_looks
from binade.app.questions.shared.scope import scope_of, scoped
from binade.app.questions.shared.selection import Selection
from binade.data.catalog import Catalog
from binade.data.filter import INTEGER_FIELDS, Filter
from binade.quant.summary import bin_edges

NONE = "none"
FIELDS = ("layer_index", "operation", "module", "tensor_name", "quant_type", "recipe", "run_id", "iteration")
KINDS = {"histogram": "magnitudes", "qq": "Q–Q, normal"}
MOST = {"rows": 12, "columns": 8, "color": style.MAX_GROUPS}  # values of each field that are drawn
WIDE, HIGH = 1060, 120  # pixels of all columns together, and of a panel
TITLED = TITLES | {NONE: "none"}
CONTROLS = (
    Control(name="plot", label="Chart", param=One(tuple(KINDS)), titles=KINDS, row="facets"),
    Control(name="rows", label="Rows", param=One((*FIELDS, NONE)), titles=TITLED, widget="list", row="facets"),
    Control(
        name="columns", label="Columns", param=One(("operation", *(f for f in FIELDS if f != "operation"), NONE)),
        titles=TITLED, widget="list", row="facets",
    ),
    Control(
        name="color", label="Color", param=One(("quant_type", *(f for f in FIELDS if f != "quant_type"), NONE)),
        titles=TITLED, widget="list", row="facets",
    ),
)  # fmt: skip


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    opened = selection.opened
    by = {place: values[place] for place in MOST if values[place] != NONE}
    fields = tuple(dict.fromkeys(by.values()))
    where = scoped(opened, selection.where, fields)
    found, names, left = distributions(opened, where, fields, by)
    table = qq(found) if values["plot"] == "qq" else log2_histogram(found)
    if table.empty:
        return Drawn(problems=("Nothing to draw: there are no finite values that differ.",))
    table = table.merge(names, on="group").drop(columns="group")
    title = style.title(
        "Quantiles of each panel’s values against a normal distribution" if values["plot"] == "qq" else
        "Distribution of magnitudes", f"{len(found)} distributions · {scope_of(opened, where)} · from sketches",
    )  # fmt: skip
    words = f"{source(where, f'{len(found)} distributions, from sketches')}\nAll panels share their axes."
    rows, columns = names["rows"].nunique(), names["columns"].nunique()
    looks = run_looks(every_run(opened)) if by.get("color") == "run_id" else None
    chart = multiples(table, by, values["plot"], columns, title, looks)
    height = 130 + rows * (HIGH + 34)
    problems = [f"{title}: {MOST[place]} of {count} are drawn." for place, title, count in left]
    return Drawn((Figure("multiples", chart, table, words, height=height),), problems=tuple(problems))


def distributions(
    opened: Catalog, where: Filter, fields: tuple[str, ...], by: dict[str, str]
) -> tuple[list[Distribution], pd.DataFrame, list[tuple[str, str, int]]]:
    """(one distribution for each combination of these fields; group and the values of rows, columns and color by group;
    the place, title and number of values of each field of which some are left out)."""
    crossed = opened.crossed(where, fields) if fields else opened.distribution(where)
    moments = opened.moments(where, fields) if fields else opened.moments(where)
    labels = labels_of(opened)
    left: list[tuple[str, str, int]] = []
    for place, field in by.items():
        every = sorted(crossed[field].dropna().unique().tolist())
        if len(every) > MOST[place]:
            left.append((place, TITLES[field], len(every)))
            crossed = crossed[crossed[field].isin(evenly(every, MOST[place]))]
    found: list[Distribution] = []
    names: list[dict[str, Any]] = []
    keys = list(fields)
    known = {_key(row, keys): row for row in moments.to_dict("records")}
    for _, part in crossed.groupby(keys, dropna=False) if keys else [((), crossed)]:
        own = part[keys].iloc[0].to_dict()
        counts = part.groupby("bin")["count"].sum()
        low, high = bin_edges(counts.index.to_numpy())
        order = np.lexsort((high, low))
        group, row = str(len(found)), known[_key(own, keys)]
        count = counts.to_numpy()[order]
        found.append(Distribution(group, low[order], high[order], count, row["mean"], row["std"], exact=False))
        texts = {place: _text(own[by[place]], by[place], labels) if place in by else "all" for place in MOST}
        names.append({"group": group, **texts})
    return found, pd.DataFrame(names), left


def _key(row: Mapping[Any, Any], fields: list[str]) -> tuple[str, ...]:
    return tuple(str(row[field]) for field in fields)


def _text(value: Any, field: str, labels: dict[str, str]) -> Any:
    if field in INTEGER_FIELDS and not pd.isna(value):
        return int(value)
    return group_name(value, labels if field == "run_id" else None)


def _order(value: Any) -> tuple[bool, Any]:
    """Numbers, then the word for none."""
    return isinstance(value, str), value


def multiples(
    table: pd.DataFrame,
    by: dict[str, str],
    plot: str,
    columns: int,
    title: alt.TitleParams,
    looks: style.Looks | None = None,
) -> alt.FacetChart | alt.LayerChart:
    groups = sorted({str(value) for value in table["color"]})
    names = {
        place: {value: f"{TITLES[by[place]].lower()} {value}" for value in sorted(table[place].unique(), key=_order)}
        for place in ("rows", "columns") if by.get(place) in INTEGER_FIELDS
    }  # fmt: skip
    table = table.assign(color=table["color"].astype(str), **{p: table[p].map(found) for p, found in names.items()})
    by_color = TITLES[by["color"]].lower() if "color" in by else ""
    legend = style.legend(groups, by_color, line=True, place="top")
    colors, dashes = style.styles(groups, by_color, looks)
    color = alt.Color("color:N", scale=alt.Scale(domain=groups, range=colors), legend=legend)
    strokes = alt.Scale(domain=groups, range=[style.DASHES[n] for n in dashes])
    if plot == "qq":
        x, y = ("theoretical:Q", "normal quantile (σ)"), ("sample:Q", "quantile (σ)")
    else:
        x, y = ("low:Q", "|value|"), ("share:Q", "share per binade")
    axis = alt.Axis(tickCount=4) if plot == "qq" else style.binades(x[1], 4)
    number = alt.Axis(tickCount=3) if plot == "qq" else alt.Axis(format="~%", tickCount=3)
    tooltip = [
        *(alt.Tooltip(f"{place}:N", title=TITLES[field].lower()) for place, field in by.items()),
        alt.Tooltip(x[0], title=x[1], format=".3~f"),
        alt.Tooltip(y[0], title=y[1], format=".3~f" if plot == "qq" else ".3~p"),
    ]  # fmt: skip
    places = {
        "x": alt.X(x[0], title=x[1], axis=axis, scale=alt.Scale(nice=False, zero=False)),
        "y": alt.Y(y[0], title=None if "rows" in by else y[1], axis=number),  # once for all rows
    }
    lines = (
        alt.Chart()
        .mark_line(interpolate="linear" if plot == "qq" else "step-after", strokeWidth=1.4, clip=True)
        .encode(
            **places, color=color, tooltip=tooltip,
            strokeDash=alt.StrokeDash("color:N", scale=strokes, legend=legend),
        )
    )  # fmt: skip
    ends = [float(end(table["theoretical"])) for end in (min, max)] if plot == "qq" else []
    equal = alt.Chart(pd.DataFrame({"theoretical": ends, "sample": ends}))
    layers = [equal.mark_line(**distribution_charts.EQUAL, clip=True).encode(**places)] if ends else []
    panel = alt.layer(*layers, lines, data=table).properties(width=max(90, WIDE // columns - 40), height=HIGH)

    def facet(place: str) -> dict[str, Any]:
        look: dict[str, Any] = {"title": None, "labelFontSize": 12, "labelFontWeight": "bold"}
        if place == "rows":
            look |= {"title": y[1], "titleFontWeight": "normal", "labelOrient": "left", "labelAngle": 0}
        header = alt.Header(**look)
        kind = {"rows": alt.Row, "columns": alt.Column}[place]
        sort = list(names[place].values()) if place in names else "ascending"
        return {place.removesuffix("s"): kind(f"{place}:O", header=header, sort=sort)} if place in by else {}

    given = facet("rows") | facet("columns")
    result: alt.FacetChart | alt.LayerChart = (
        panel.facet(**given, spacing={"row": 18, "column": 10}) if given else panel
    )
    return result.properties(title=title)


MULTIPLES = Question(
    text="How do distributions differ by two fields at once?",
    title="Small multiples",
    icon=":material/grid_view:",
    help="Histograms or Q–Q plots by rows, columns and color, with shared axes",
    page="compare",
    view="multiples",
    draw=draw,
    controls=CONTROLS,
    report=not_in_report,
)
