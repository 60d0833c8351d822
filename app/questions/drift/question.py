"""Is it the format's rounding, or has the run drifted? Three tensors, matched by identity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from binade.app import style
from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Item, Table
from binade.app.params import known_run
from binade.app.questions.drift import compute
from binade.app.questions.question import Question, not_in_report
from binade.app.questions.shared import distribution_charts
from binade.app.questions.shared.distributions import log2_histogram
from binade.app.questions.shared.runs import compared_to, every_run, run_titles
from binade.app.questions.shared.selection import SelectedTensor
from binade.data.catalog import CatalogError
from binade.data.same_data import equal_weights
from binade.data.store import TensorFileError
from binade.quant.metrics import METRICS

NOTHING = (
    "There is nothing to compare: this needs a bf16 run and a quantized run on the same data, both with this "
    "tensor. Collect them with the same options."
)

NOTE = (
    "The quantized run’s tensor is shown before its own rounding. It differs from the bf16 run’s tensor only because "
    "operands of earlier GEMMs were rounded, in this iteration or a previous one."
)
WHAT = {
    "rounding": "bf16’s tensor, rounded: the format alone",
    "drift": "the quantized run’s tensor: the drift alone",
    "both": "the quantized run’s tensor, rounded: both",
}
EQUAL_WEIGHTS = {"drift": "the quantized run’s tensor: the rounding that earlier layers pass on"}
COLUMNS = {
    "what": Column("Compared with bf16’s tensor", width=330, text=lambda row: WHAT[row["what"]]),
    "sqnr_db": Column(),
    "relative_error": Column(format="%.4f"),
    "cosine": Column(format="%.5f"),
    "gradient_bias": Column("‖error‖² / ‖x‖²", "%.5f"),
    "ks": Column("KS distance", "%.4f", help=METRICS["ks"].definition + ", on bins of 1/8 binade"),
}


@dataclass(frozen=True)
class Candidates:
    """The quantized runs that have the same tensor, by run_id; their labels and titles in a list; and the rows of the
    tensor there and in the bf16 run."""

    runs: list[str]
    labels: dict[str, str]
    titles: dict[str, str]
    twins: pd.DataFrame
    base: pd.DataFrame
    reference_label: str


def candidates(selected: SelectedTensor) -> Candidates | None:
    """The runs to compare; None if no quantized run and bf16 run on the same data have this tensor."""
    table = every_run(selected.opened)
    of = table.set_index("run_id")
    twins = selected.opened.twins(selected.row["tensor_id"])
    reference = of.loc[selected.row["run_id"]]["reference"]
    quantized = twins[twins["run_id"].isin(table.loc[table["quantized"] & (table["reference"] == reference), "run_id"])]
    if reference is None or quantized.empty:
        return None
    base = twins[twins["run_id"] == reference]
    labels = {run: of.loc[run, "label"] for run in quantized["run_id"]}
    return Candidates(
        quantized["run_id"].tolist(), labels, run_titles(table), quantized, base, of.loc[reference, "label"]
    )


def chosen_run(selected: SelectedTensor, runs: list[str], wanted: str | None) -> str:
    """The requested run, else the tensor's own, else the first."""
    if wanted in runs:
        return str(wanted)
    return selected.row["run_id"] if selected.row["run_id"] in runs else runs[0]


RUN = Control(name="against", label="Quantized run", param=known_run, widget="list")


def _controls(selected: SelectedTensor, values: dict[str, Any]) -> list[Control]:
    if (found := candidates(selected)) is None:
        return []
    own = chosen_run(selected, found.runs, None)
    return [replace(RUN, options=sorted(found.runs, key=lambda run: run != own), titles=found.titles)]


def draw(selected: SelectedTensor, values: dict[str, Any]) -> Drawn:
    found = candidates(selected)
    if found is None:
        return Drawn(problems=(NOTHING,))
    return compared(selected, found, chosen_run(selected, found.runs, values["against"]))


def compared(selected: SelectedTensor, given: Candidates, run: str) -> Drawn:
    if given.base.empty:
        return Drawn(problems=("The bf16 run did not record this tensor.",))
    twin = given.twins[given.twins["run_id"] == run].iloc[0]
    ids = given.base.iloc[0]["tensor_id"], twin["tensor_id"]
    try:
        reference, own = (selected.opened.load(tensor_id) for tensor_id in ids)
    except (CatalogError, TensorFileError) as error:
        return Drawn(problems=(f"The values of one of the two tensors cannot be read: {error}.",))
    if reference.shape != own.shape or not reference.numel():
        return Drawn(problems=("The two tensors have different shapes and cannot be compared.",))
    fmt = str(selected.spec) if pd.isna(twin["format"]) else twin["format"]
    equal = equal_weights(selected.opened.root, run, given.base.iloc[0]["run_id"], int(twin["iteration"]))
    found = compute.three_way(reference, own, fmt, selected.dim, equal)
    columns = COLUMNS
    if equal:
        what = replace(COLUMNS["what"], text=lambda row: EQUAL_WEIGHTS.get(row["what"], WHAT[row["what"]]))
        columns = COLUMNS | {"what": what}
    label = given.labels[run]
    caption = (
        f"{selected.source()}\nThe same tensor (by identity) of {given.reference_label} and of {label}; rounded "
        f"to {fmt}. Each is compared with bf16’s tensor. Relative error: {METRICS['relative_error'].definition}."
    )
    items: list[Item] = []
    histogram = log2_histogram([d for d in found.distributions if d.total])
    if not histogram.empty:
        groups = [d.group for d in found.distributions]
        chart = distribution_charts.histogram(histogram, f"{selected.label} · {label} compared with bf16", "values")
        items.append(Figure("three_way", chart, histogram, caption, height=360 + style.legend_height(groups)))
    return Drawn((*items, Table("three_way", found.table, columns, note=NOTE)), found.verdict)


DRIFT = Question(
    text="Is the difference rounding or drift?",
    title="Rounding or drift",
    icon=":material/alt_route:",
    help="The bf16 run’s tensor, the same tensor rounded, and the quantized run’s",
    page="tensor",
    view="drift",
    draw=draw,
    controls=(RUN,),
    narrow=_controls,
    beyond=compared_to,  # without a run in its address, the first
    report=not_in_report,
)
