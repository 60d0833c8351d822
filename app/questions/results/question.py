"""Which GEMM has the most error? The errors of forward, dgrad and wgrad results, compared with those of their
operands."""

from __future__ import annotations

from typing import Any

import pandas as pd

from binade.app import style
from binade.app.figure import Column, Drawn, Figure, Table, source
from binade.app.questions.depth import charts as depth_charts
from binade.app.questions.question import Question
from binade.app.questions.results import charts, compute
from binade.app.questions.shared.labels import layer_names
from binade.app.questions.shared.selection import Selection
from binade.app.style import MEASURES

NOTHING = (
    "The filter selects no result of a quantized GEMM whose error was measured: choose a quantized run that was "
    "recorded with “result” under Also measured (--measures result)."
)
DEFINITION = (
    "SQNR of a result: 10·log₁₀(‖AB‖² / ‖Q(A)Q(B) − AB‖²), both products in the tensors’ dtype. Predicted: the noise "
    "ratios of the two operands added, as if their errors were independent."
)
COLUMNS = {
    "place": Column("Layer and module", width=160),
    "gemm": Column("GEMM", width=90),
    "result_db": Column("SQNR of the result", "%.1f"),
    "operands_db": Column("Predicted from the operands", "%.1f"),
    "gain_db": Column("Difference", "%+.1f", help="Above 0: the result has less error than predicted"),
    "results": Column("Results", "localized", 90),
}


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    found = selection.opened.results(selection.where)
    table = compute.pooled(found)
    if table.empty:
        return Drawn(problems=(NOTHING,))
    name = table["module"].where(table["part"].isin(("linear", "router")), table["part"])
    table = table.assign(place=layer_names(table["layer_index"]) + name, row=name + " " + table["gemm"])
    words = f"{source(selection.where, f'{len(table):,} GEMMs')}\n{DEFINITION}"
    cells = table.assign(
        value=table["result_db"],
        operation=table["gemm"].map({"forward": "forward"}).fillna("backward"),
        tensors=table["results"],
    )
    measure = MEASURES["sqnr_db"]
    heat = Figure(
        "results",
        depth_charts.depth(cells, measure, "SQNR of GEMM results", "all runs and iterations in the filter, combined"),
        table,
        words,
        note="Brighter cells are worse.",
        hint="Click a cell to open its result.",
        height=depth_charts.depth_height(cells),
        choose="tensor_id",
    )
    items: list[Figure | Table] = [heat]
    if table["operands_db"].notna().any():
        height = 380 + style.legend_height(sorted(set(table["gemm"])))
        chart = charts.against(
            table, "Measured and predicted error", "above the line: better than if errors were independent"
        )
        items.append(Figure("results_against_operands", chart, table, words, height=height, choose="tensor_id"))
    items.append(Table("results", table.sort_values("result_db", ignore_index=True), COLUMNS, choose="tensor_id"))
    return Drawn(tuple(items), _verdict(compute.pooled(found, ("gemm",)), table))


def _verdict(by_gemm: pd.DataFrame, table: pd.DataFrame) -> str:
    """by_gemm: the results of all layers together, one row per GEMM."""
    found = by_gemm.set_index("gemm")["result_db"].sort_values()
    if len(found) == 1:
        return f"Only results of the {found.index[0]} GEMM were measured: SQNR {found.iloc[0]:.1f} dB."
    others = ", ".join(f"{name} {value:.1f}" for name, value in zip(found.index[1:], found.iloc[1:], strict=True))
    text = f"{found.index[0]} has the most error: its results have an SQNR of {found.iloc[0]:.1f} dB ({others})."
    gains = table.dropna(subset=["gain_db"]).groupby("gemm")["gain_db"].median()
    near = [str(name) for name, gain in gains.items() if abs(gain) < 1]
    far = [
        f"{name} results are {abs(gain):.1f} dB {'better' if gain > 0 else 'worse'}"
        for name, gain in gains.items()
        if str(name) not in near
    ]
    if near:
        text += f" The sum of the operands’ noise ratios predicts {' and '.join(near)} results within 1 dB"
        return f"{text}; {', '.join(far)} than predicted." if far else f"{text}."
    return f"{text} Compared with the sum of the operands’ noise ratios, {', '.join(far)}." if far else text


RESULTS = Question(
    text="Which GEMM has the most error?",
    title="GEMMs",
    icon=":material/calculate:",
    help="Errors of results in forward, dgrad and wgrad, compared with those of their operands",
    page="worst",
    view="gemms",
    ignores=frozenset(("metric", "format")),
    draw=draw,
)
