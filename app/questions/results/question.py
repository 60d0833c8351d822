"""Which GEMM has the most error? The errors of forward, dgrad and wgrad results, compared with those of their
operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from binade.app import style
from binade.app.figure import Column, Drawn, Figure, Item, Table, Text, source
from binade.app.params import known_tensor
from binade.app.questions.question import Question
from binade.app.questions.results import accumulation, charts, compute
from binade.app.questions.shared import layer_chart
from binade.app.questions.shared.runs import given_names
from binade.app.questions.shared.scope import Scope, scope_of, scoped
from binade.app.questions.shared.selection import Selection
from binade.app.style import MEASURES
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.evidence import Measure
from binade.data.names import PRODUCTS, distinct_names, name_of, product_name

SQNR = MEASURES["sqnr_db"]
NOTHING = (
    "The filter selects no result of a quantized GEMM whose error was measured: choose a quantized run that was "
    "recorded with “result” under Also measured (--measures result)."
)
DEFINITION = (
    "SQNR of a result: 10·log₁₀(‖AB‖² / ‖Q(A)Q(B) − AB‖²), both products in the tensors’ dtype. Predicted: the noise "
    "ratios of the two operands added, as if their errors were independent."
)
COLUMNS = {
    "place": Column("Layer and module"),
    "gemm": Column("GEMM"),
    "result_db": Column("SQNR of the result", ".1f"),
    "operands_db": Column("Predicted from the operands", ".1f"),
    "gain_db": Column("Difference", ".1f", help="Above 0: the result has less error than predicted"),
    "results": Column("Results", "d"),
}
CHOOSE = "Choose a row to compare accumulators: its worst result is computed again from the operands on disk."
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


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    opened, where = selection.opened, selection.where
    results = opened.results(where)
    table = compute.by_product(results)
    if table.empty:
        return Drawn(problems=(NOTHING,))
    product = table["part"].where(table["part"].isin(PRODUCTS), table["module"])
    place = [*map(name_of, table["layer_index"], product)]
    table = table.assign(place=place, row=product.map(product_name) + " " + table["gemm"])
    words = f"{source(where, f'{len(table):,} GEMMs')}\n{DEFINITION}"
    cells = table.assign(
        value=table["result_db"],
        operation=table["gemm"].map({"forward": "forward"}).fillna("backward"),
        tensors=table["results"],
    )
    heat = Figure(
        "results",
        layer_chart.by_layer(cells, SQNR, "SQNR of GEMM results", scope_of(opened, where)),
        table,
        words,
        note="Brighter cells are worse.",
        hint="Click a cell to open its result.",
        height=layer_chart.height(cells),
        choose="tensor_id",
    )
    items: list[Item] = [heat]
    if table["operands_db"].notna().any():
        height = 380 + style.legend_height(sorted(set(table["gemm"])))
        chart = charts.against(
            table, "Measured and predicted error", "above the line: better than if errors were independent"
        )
        items.append(Figure("results_against_operands", chart, table, words, height=height, choose="tensor_id"))
    rows = table.sort_values("result_db", ignore_index=True).assign(result=lambda worst: worst["tensor_id"])
    items.append(Table("results", rows, COLUMNS, note=CHOOSE, choose="result"))
    if values["result"]:
        items.append(_accumulation(opened, values["result"]))
    scope = Scope(where, ((len(table), "GEMM"),))
    return Drawn(tuple(items), _verdict(compute.by_product(results, ("gemm",))), scope=scope)


def _accumulation(opened: Catalog, result: str) -> Table | Text:
    label = distinct_names(opened.rows_of([result]), given_names(opened), long=True)[result]
    try:
        table, what, unfit = accumulation.accumulated(opened, result)
    except accumulation.MissingError as error:
        return Text(f"{label} was not computed again. {error}", "problem")
    note = f"Computed again: {what}. Operands are rounded once, with scales from the values on disk."
    if unfit:
        note += f" Left out, as they cannot apply these scales: {', '.join(unfit)}."
    return Table("accumulation", table, ACCUMULATION, f"**Accumulation** · {label}", note)


def _verdict(by_gemm: pd.DataFrame) -> evidence.Sentence:
    """by_gemm: the results of all layers and modules, one row per GEMM."""

    def of(column: str, measure: Measure) -> list[evidence.Named]:
        ends = {column: "value", f"{column}_low": "low", f"{column}_high": "high"}
        rows = by_gemm[["gemm", "results", *ends]].rename(columns=ends).dropna(subset=["value"]).to_dict("records")
        return [(row["gemm"], evidence.spread(measure, row, "results")) for row in rows]

    results = of("result_db", SQNR)
    if len(results) == 1:
        name, value = results[0]
        first = evidence.say("Only {gemm} results were measured: SQNR {value}.", gemm=name, value=value)
    else:
        worst = evidence.extreme(results, "SQNR of GEMM results", lowest=True)
        first = evidence.together(worst, evidence.each_of(results, "SQNR"))
    gain = replace(SQNR.with_sign(), name="gain_db", low_is_bad=False)
    return evidence.together(first, evidence.each_of(of("gain_db", gain), "Measured minus predicted from the operands"))


RESULTS = Question(
    text="Which GEMM has the most error?",
    title="GEMMs",
    icon=":material/calculate:",
    help="Errors of results in forward, dgrad and wgrad, compared with those of their operands",
    page="map",
    room="map",
    within=lambda opened, where, values: scoped(opened, where, scored=True),
    view="gemms",
    draw=draw,
    takes={"result": known_tensor},
)
