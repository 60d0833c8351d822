"""The errors of GEMM results, compared with the prediction from the errors of their operands."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart, Column, Figure, Table, Text, source
from binade.app.measures.accumulation import MissingError, accumulated
from binade.app.measures.cells import by_cell, product
from binade.app.measures.map_measure import CellQuery, MapMeasure, if_any
from binade.app.questions.shared.runs import given_names
from binade.app.questions.shared.scope import scope_of
from binade.data.compare.evidence import Measure
from binade.data.index.catalog import Catalog, quantiles
from binade.data.run.tensor_kinds import Gemm
from binade.data.words.fields import MEASURES
from binade.data.words.filter import Filter
from binade.data.words.names import PRODUCTS, distinct_names, name_of

SQNR = MEASURES["result_sqnr_db"]
GAIN = Measure(
    "result_gain_db", "Result, measured minus predicted", "dB", "SQNR of the result minus what it would be if the "
    "errors of the two operands were independent: their noise ratios add", "+.1f", low_is_bad=True,
)  # fmt: skip
PRODUCT = ("layer_index", "module", "part", "gemm")
CHOOSE = "Click a cell to compare accumulators: its worst result is computed again from the operands on disk."
ACCUMULATION = {
    "title": Column("Addition of the products"),
    "result_db": Column(
        "SQNR of the result", help="Against the exact product of the unrounded operands",
        text=lambda row: SQNR.text(row["result_db"]), align="right",
    ),
    "sums_db": Column(
        "SQNR of the addition", help="Against the exact product of the rounded operands; scales multiply sums",
        text=lambda row: SQNR.text(row["sums_db"]), align="right",
    ),
}  # fmt: skip


def cells(query: CellQuery) -> pd.DataFrame:
    """Of the result of each GEMM, which has a row of its own."""
    condition, parameters = query.opened.condition(query.where)
    return query.opened.ask(
        f"""
        SELECT gemm, {product()} AS product, tensor_name AS tensor, NULL AS expert, {query.across},
               {quantiles("result_sqnr_db")}, count(*) AS tensors,
               count(*) FILTER (isnan(result_sqnr_db) AND nans + infs > 0) AS broken,
               arg_min(tensor_id, result_sqnr_db) AS tensor_id
        FROM tensor WHERE result_sqnr_db IS NOT NULL AND layer_index IS NOT NULL AND {condition} GROUP BY ALL
        ORDER BY ALL
        """,
        parameters,
    ).rename(columns={"result_sqnr_db": "value", "result_sqnr_db_low": "low", "result_sqnr_db_high": "high"})


def results(query: CellQuery) -> pd.DataFrame:
    """Each result: tensor_id, PRODUCT, iteration, result_db (its SQNR), operands_db (what it would be if the errors of
    the two operands were independent; NaN if one was not recorded) and gain_db, the difference. Results that have no
    error or that overflowed are left out."""
    table = query.opened.results(query.where)
    table = table[np.isfinite(table["result_sqnr_db"])]
    with np.errstate(divide="ignore"):  # operands without error
        predicted = -10 * np.log10(table["operand_noise"].astype(float))
    table = table.assign(result_db=table["result_sqnr_db"], operands_db=predicted)
    with_gain: pd.DataFrame = table.assign(gain_db=table["result_db"] - table["operands_db"])
    return with_gain


def gains(query: CellQuery) -> pd.DataFrame:
    values = results(query)[["tensor_id", "gain_db"]].rename(columns={"gain_db": "value"})
    return by_cell(query, values, low_is_bad=True, every_gemm=False)


def against(query: CellQuery, cell: pd.Series | None) -> Figure | None:
    """Measured against predicted SQNR, a point for each layer, module and GEMM: the medians of its results."""
    groups = results(query).groupby(list(PRODUCT), dropna=False)
    names = ["result_db", "operands_db", "gain_db"]
    complete = groups["operands_db"].count() == groups.size()
    table = groups[names].median().assign(results=groups.size(), tensor_id=groups["tensor_id"].first())
    table = table[complete & np.isfinite(table["operands_db"])].reset_index()
    if table.empty:
        return None
    product_names = table["part"].where(table["part"].isin(PRODUCTS), table["module"])
    table = table.assign(place=[*map(name_of, table["layer_index"], product_names)])
    what = f"{scope_of(query.opened, query.where)} · above the line: better than if errors were independent"
    chart = _chart(table, "Measured and predicted error of results", what)
    caption = f"{source(query.where, f'{len(table):,} GEMMs')}\n{GAIN.label}: {GAIN.definition}."
    height = 380 + style.legend_height(sorted(set(table["gemm"])))
    return Figure("results_against_operands", chart, table, caption, height=height, choose="tensor_id")


def _chart(table: pd.DataFrame, title: str, subtitle: str) -> Chart:
    shown = table.rename(columns={"gemm": "group"})
    known = shown[["operands_db", "result_db"]]
    groups = [gemm.value for gemm in Gemm if gemm.value in set(shown["group"])]
    scales: list[plot.Look] = [
        {"domain": [known[name].min() - 1, known[name].max() + 1], "nice": False, "zero": False} for name in known
    ]
    tips = plot.tips(
        place="product", group="GEMM", result_db=("result (dB)", ".1f"), operands_db=("predicted (dB)", ".1f"),
        gain_db=("difference (dB)", "+.1f"), results=("results", ","),
    )  # fmt: skip
    points = plot.mark(
        "point", shown, color=style.color(groups, "GEMM"), shape=style.shape(groups, "GEMM"), tips=tips,
        x=plot.x("operands_db", "predicted from the operands (dB)", {"tickCount": 8}, **scales[0]),
        y=plot.y("result_db", "SQNR of the result (dB)", **scales[1]),
        choose="tensor_id", fade=(0.9, 0.3),
    )  # fmt: skip
    line = plot.diagonal(float(known.min().min()), float(known.max().max()), clip=True)
    return plot.layers(title, subtitle, line, points)


def accumulation(query: CellQuery, cell: pd.Series | None) -> Table | Text:
    """The worst result of the selected cell, with each accumulator."""
    if cell is None:
        return Text(CHOOSE)
    opened, result = query.opened, str(cell["tensor_id"])
    label = distinct_names(opened.rows_of([result]), given_names(opened), long=True)[result]
    try:
        table, what, unfit = accumulated(opened, result)
    except MissingError as error:
        return Text(f"{label} was not computed again. {error}", "problem")
    note = f"Computed again: {what}. Operands are rounded once, with scales from the values on disk."
    if unfit:
        note += f" Left out, as they cannot apply these scales: {', '.join(unfit)}."
    return Table("accumulation", table, ACCUMULATION, f"**Accumulation** · {label}", note)


def _nothing(opened: Catalog, where: Filter, fmt: str) -> str:
    return (
        "No result of a quantized GEMM was measured: choose a quantized run recorded with “result” under Also "
        "measured (--measures result)."
    )


_RECORDED = if_any("tensor WHERE result_sqnr_db IS NOT NULL")
RESULT = MapMeasure(
    measure=SQNR, cells=cells, nothing=_nothing, of="result", ends=(0.0, 40.0), recorded=_RECORDED, extra=accumulation
)
RESULT_GAIN = MapMeasure(
    measure=GAIN, cells=gains, nothing=_nothing, of="result", neutral=0.0, recorded=_RECORDED, extra=against
)
