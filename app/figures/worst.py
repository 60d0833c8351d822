"""Worst: any metric over the selection, ranked, by depth, in training, forward against backward."""

from __future__ import annotations

from typing import Any

import pandas as pd

from binade.app import charts, style
from binade.app.analysis import boards, recipes
from binade.app.analysis.labels import thinned, thinned_note
from binade.app.charts import boards as draw
from binade.app.figure import Drawn, Figure, source
from binade.app.formatting import first_formats, losses_of
from binade.app.params import One, Param
from binade.app.style import MEASURES, Measure
from binade.data.catalog import Catalog
from binade.data.filter import Filter

VIEWS = {
    "board": "Ranking",
    "depth": "By depth",
    "training": "In training",
    "directions": "Forward and backward",
}
POOLED = "all runs and iterations of the filter together"


def params(opened: Catalog) -> dict[str, Param]:
    return {"view": One(tuple(VIEWS)), "metric": One(boards.METRICS), "format": One(first_formats(opened))}


def drawn(opened: Catalog, where: Filter, values: dict[str, Any], tensors: list[str]) -> Drawn:
    measure, fmt = MEASURES[values["metric"]], values["format"] or ""
    if boards.is_error(measure.key) and not fmt:
        return Drawn(problems=("No operand of a GEMM is scored here: choose a statistic of the values.",))
    view = {"board": board, "depth": depth, "training": training, "directions": directions}[values["view"]]
    return view(opened, where, fmt, measure)


def board(opened: Catalog, where: Filter, fmt: str, measure: Measure) -> Drawn:
    table = boards.ranking(opened, where, fmt, measure.key)
    if table.empty:
        return _nothing(measure)
    worst = table.iloc[0]
    verdict = f"{worst['place']} suffers most: {measure.label} {measure.quantity(worst['value'])}."
    title = _title(fmt, measure, ", worst first")
    subtitle = f"{min(len(table), draw.BARS)} of {len(table):,} places · {POOLED}"
    figure = Figure(
        "ranking",
        draw.ranking(table, measure, title, subtitle),
        table,
        _caption(where, fmt, measure, f"{len(table):,} places (layer, module, operation, tensor)"),
        note=definition(fmt, measure),
        hint="Choose a bar to look into its worst tensor.",
        height=draw.ranking_height(table),
        choose="tensor_id",
    )
    return Drawn((figure,), verdict)


def depth(opened: Catalog, where: Filter, fmt: str, measure: Measure) -> Drawn:
    table = boards.depth(opened, where, fmt, measure.key)
    if table.empty:
        return _nothing(measure)
    figure = Figure(
        "depth",
        draw.depth(table, measure, _title(fmt, measure, " by layer and tensor"), POOLED),
        table,
        _caption(where, fmt, measure, f"{len(table):,} cells of layer and tensor"),
        note=f"{definition(fmt, measure)} Bright is bad.",
        hint="Choose a cell to look into its worst tensor.",
        height=draw.depth_height(table),
        choose="tensor_id",
    )
    return Drawn((figure,), _depth_verdict(table, measure))


def _depth_verdict(table: pd.DataFrame, measure: Measure) -> str:
    layers = table["layer_index"].nunique()
    change = boards.slope(table)
    if layers > 1 and not change.empty:
        worse = change["change"] < 0 if measure.low_is_bad else change["change"] > 0
        first, last = int(table["layer_index"].min()), int(table["layer_index"].max())
        return f"{int(worse.sum())} of {len(change)} tensors are worse in layer {last} than in layer {first}."
    return "There is one layer in the filter: nothing to compare." if layers == 1 else ""


def training(opened: Catalog, where: Filter, fmt: str, measure: Measure) -> Drawn:
    table = boards.training(opened, where, fmt, measure.key)
    if table.empty:
        return _nothing(measure)
    figure = Figure(
        "training",
        draw.training(table, measure, _title(fmt, measure, " by iteration"), "all tensors of a layer together"),
        table,
        _caption(where, fmt, measure, f"{len(table):,} points of iteration and layer"),
        note=definition(fmt, measure),
        hint="Choose a point to look into its worst tensor.",
        height=420,
        choose="tensor_id",
    )
    return Drawn((figure, *_losses(opened, where)), _training_verdict(table, measure))


def _training_verdict(table: pd.DataFrame, measure: Measure) -> str:
    iterations = sorted(table["iteration"].unique())
    if len(iterations) < 2:
        return f"Only iteration {int(iterations[0])} is in the filter: nothing to compare."
    ends = [
        table[table["iteration"] == end].set_index("layer_index")["value"] for end in (iterations[0], iterations[-1])
    ]
    change = (ends[1] - ends[0]).dropna()
    worse = change < 0 if measure.low_is_bad else change > 0
    return (
        f"From iteration {int(iterations[0])} to {int(iterations[-1])} it gets worse in "
        f"{int(worse.sum())} of {len(change)} layers."
    )


def _losses(opened: Catalog, where: Filter) -> list[Figure]:
    """The loss of the filter's runs, over the same iterations."""
    runs = set(opened.facets(where.without("run_id")).get("run_id", []))
    if where.run_id:
        runs &= set(where.run_id)
    table = recipes.overview(opened.runs(), opened.parts())
    table = table[table["run_id"].isin(runs)].tail(style.MAX_GROUPS)
    records = losses_of(opened, table["run_id"].tolist())
    rows = [
        {"group": run.label, "iteration": record["iteration"], "loss": record["loss"]}
        for run in table.itertuples()
        for record in records[run.run_id]
    ]
    if not rows:
        return []
    shown, step = thinned(pd.DataFrame(rows), style.MARKS)
    height = 340 + style.legend_height(style.groups_of(shown))
    words = f"{source(where, 'the runs of the filter')}\nLoss: cross entropy in nats per token."
    return [Figure("losses", charts.losses(shown), shown, words, note=thinned_note(step), height=height)]


def directions(opened: Catalog, where: Filter, fmt: str, measure: Measure) -> Drawn:
    table = boards.directions(opened, where, fmt, measure.key)
    if table.empty:
        return _nothing(measure)
    totals = boards.direction_totals(opened, where, fmt, measure.key).set_index("operation")["value"]
    parts = [f"{name} {measure.quantity(totals[name])}" for name in ("forward", "backward") if name in totals]
    worst = table[table["operation"] == "backward"].head(1)
    words = f"{measure.label}: {', '.join(parts)}."
    if not worst.empty:
        words += f" Worst going backward: {worst['row'].iloc[0]} ({measure.quantity(worst['value'].iloc[0])})."
    figures = []
    for operation in ("forward", "backward"):
        part = table[table["operation"] == operation]
        if part.empty:
            continue
        figure = Figure(
            f"direction_{operation}",
            draw.direction(table, measure, operation, f"{len(part)} tensors · {POOLED}", table),
            part,
            _caption(where, fmt, measure, f"{operation}, all layers together"),
            height=draw.ranking_height(table.groupby("operation").head(draw.BARS).query("operation == 'forward'")),
            choose="tensor_id",
            group="directions",
        )
        figures.append(figure)
    return Drawn(tuple(figures), words)


def definition(fmt: str, measure: Measure) -> str:
    if boards.is_error(measure.key):
        pooled = "of the summed powers" if measure.low_is_bad else "of all elements concerned"
        return f"{measure.label} in {fmt}: {measure.definition}; several tensors together: {pooled}."
    return f"{measure.label}: {measure.definition}; the largest of the tensors that are taken together."


def _caption(where: Filter, fmt: str, measure: Measure, what: str) -> str:
    return f"{source(where, what)}\n{definition(fmt, measure)}"


def _title(fmt: str, measure: Measure, rest: str = "") -> str:
    return f"{measure.label} in {fmt}{rest}" if boards.is_error(measure.key) else f"{measure.label}{rest}"


def _nothing(measure: Measure) -> Drawn:
    what = "operands of a GEMM, which alone are scored" if boards.is_error(measure.key) else "tensors with a value"
    return Drawn(problems=(f"The filter selects no {what}.",))
