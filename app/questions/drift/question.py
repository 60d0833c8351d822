"""Is it the format's rounding, or has the run drifted? A twin step of the run tells; without one, three tensors,
matched by identity."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from binade.app import style
from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Item, Table
from binade.app.params import known_run
from binade.app.questions.drift import charts, compute, twin
from binade.app.questions.question import Question
from binade.app.questions.shared import distribution_charts
from binade.app.questions.shared.distributions import log2_histogram
from binade.app.questions.shared.rounded import Recorded
from binade.app.questions.shared.runs import compared_to, every_run, labels_of, references_of, run_titles
from binade.app.questions.shared.selection import Of, SelectedTensor
from binade.data.catalog import Catalog, CatalogError
from binade.data.filter import Filter
from binade.data.same_data import equal_weights
from binade.data.store import TensorFileError
from binade.data.twin import Twin, read_twins
from binade.quant.metrics import METRICS
from binade.quant.specs import Spec

NOTHING = (
    "There is nothing to compare: this needs a bf16 run and a quantized run on the same data, both with this "
    "tensor. Collect them with the same options."
)
NO_TWIN = (
    "To see what rounding does to the gradients on the same weights, record a twin step: with --twin 16 or, in your "
    "own loop, with recorder.twin."
)
NOTE = (
    "The quantized run’s tensor is shown before its own rounding. It differs from the bf16 run’s tensor only because "
    f"operands of earlier GEMMs were rounded, in this iteration or a previous one. {NO_TWIN}"
)
WHAT = {
    "rounding": "bf16’s tensor, rounded: the format alone",
    "drift": "the quantized run’s tensor: the drift alone",
    "both": "the quantized run’s tensor, rounded: both",
}
EQUAL_WEIGHTS = {"drift": "the quantized run’s tensor: the rounding that earlier layers pass on"}
COLUMNS = {
    "what": Column("Compared with bf16’s tensor", text=lambda row: WHAT[row["what"]]),
    "sqnr_db": Column(),
    "relative_error": Column(format=".4f"),
    "cosine": Column(format=".5f"),
    "gradient_bias": Column("‖error‖² / ‖x‖²", ".5f"),
    "ks": Column("KS distance", ".4f", help=METRICS["ks"].definition + ", on bins of 1/8 binade"),
}

TWIN_COLUMNS = {
    "layer": Column("Layer", "d"),
    "module": Column("Module"),
    "expert": Column("Expert", "d"),
    "norm": Column("‖g‖", ".4g", help="Norm of the gradient without the recipe"),
    "bias": Column("Bias (%)", ".3g", help=twin.BIAS.definition),
    "error": Column("Error (%)", ".3g", help=twin.ERROR.definition),
    "bias_low": Column("from", ".3g", help="The 95% interval of the bias over the passes"),
    "bias_high": Column("to", ".3g", help="The 95% interval of the bias over the passes"),
    "noise": Column("√variance (%)", ".3g", help=twin.NOISE.definition),
    "cosine": Column(format=".5f"),
    "change": Column("Δloss", help=twin.CHANGE.definition),
}


@dataclass(frozen=True)
class Candidates:
    """The quantized runs that have the same tensor, by run_id; their labels and titles in a list; and the rows of the
    tensor there and in the bf16 run."""

    runs: list[str]
    labels: dict[str, str]
    titles: dict[str, str]
    quantized: pd.DataFrame
    base: pd.DataFrame
    reference_label: str


def candidates(selected: SelectedTensor) -> Candidates | None:
    """The runs to compare; None if no quantized run and bf16 run on the same data have this tensor."""
    table = every_run(selected.opened)
    of = table.set_index("run_id")
    twins = selected.opened.twins(selected.row["tensor_id"])
    with_it = set(twins["run_id"])
    reference = next((run for run in of.loc[selected.row["run_id"]]["references"] if run in with_it), None)
    if reference is None:
        return None
    quantized = twins[twins["run_id"].isin(compared_to(selected.opened, selected.where, [reference]))]
    if quantized.empty:
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
    if (choices := candidates(selected)) is None:
        return []
    default = chosen_run(selected, choices.runs, None)
    return [replace(RUN, options=sorted(choices.runs, key=lambda run: run != default), titles=choices.titles)]


def draw(selected: SelectedTensor, values: dict[str, Any]) -> Drawn:
    choices = candidates(selected)
    run = chosen_run(selected, choices.runs, values["against"]) if choices else selected.row["run_id"]
    if step := twin_step(selected, run):
        return of_twin(selected, run, step)
    if choices is None:
        return Drawn(problems=(NOTHING, NO_TWIN))
    return compared(selected, choices, run)


def twin_step(selected: SelectedTensor, run: str) -> Twin | None:
    """The twin step of a run in the tensor's iteration, else its last one."""
    try:
        steps = read_twins(selected.opened.root / run)
    except OSError:  # the catalog says so
        return None
    here = (step for step in steps if step.iteration == selected.row["iteration"])
    return next(here, steps[-1] if steps else None)


def of_twin(selected: SelectedTensor, run: str, step: Twin) -> Drawn:
    """What the recipe does to the gradients of a micro-batch, by layer and by parameter."""
    layers, table, label = twin.by_layer(step), twin.by_parameter(step), labels_of(selected.opened).get(run, run)
    several = step.draws and len(step.changes) > 1
    passes = "1 pass" if len(step.changes) == 1 else f"{len(step.changes)} passes"
    drawn = passes if step.draws else "the recipe draws no random numbers: exact for this micro-batch"
    of = f"{label} · iteration {step.iteration} · {drawn}"
    measures = (twin.BIAS, twin.NOISE) if several else (twin.ERROR,)
    definitions = ". ".join(f"{measure.label}: {measure.definition}" for measure in measures)
    caption = (
        f"Data: twin step of {run}, iteration {step.iteration}, one micro-batch, {passes} with the recipe and one "
        f"without. g: gradient without the recipe. ĝ: with it.\n{definitions}."
    )
    title = "Error of each layer’s gradient"
    items: list[Item] = []
    if not layers.empty:
        items.append(Figure("twin", charts.by_layer(layers, title, of), layers, caption, height=360))
    columns = {name: column for name, column in TWIN_COLUMNS.items() if table[name].notna().any()}
    items.append(Table("twin", table, columns, f"**Gradients by parameter** · {of}", note=caption.splitlines()[1]))
    return Drawn(tuple(items), twin.verdict(step))


def compared(selected: SelectedTensor, given: Candidates, run: str) -> Drawn:
    if given.base.empty:
        return Drawn(problems=("The bf16 run did not record this tensor.",))
    other = given.quantized[given.quantized["run_id"] == run].iloc[0]
    ids = given.base.iloc[0]["tensor_id"], other["tensor_id"]
    try:
        reference, quantized = (selected.opened.load(tensor_id) for tensor_id in ids)
    except (CatalogError, TensorFileError) as error:
        return Drawn(problems=(f"The values of one of the two tensors cannot be read: {error}.",))
    if reference.shape != quantized.shape or not reference.numel():
        return Drawn(problems=("The two tensors have different shapes and cannot be compared.",))
    fmt = str(selected.spec) if pd.isna(other["format"]) else other["format"]
    recorded = Recorded.of(other)
    if problem := recorded.problem(Spec.of(fmt)):
        return Drawn(problems=(problem,))
    base = given.base.iloc[0]["run_id"]
    branched = every_run(selected.opened).set_index("run_id")["branched"][[run, base]].max()
    equal = equal_weights(selected.opened.root, run, base, int(other["iteration"]), float(branched))
    operand = not pd.isna(other["contracted_axis"])
    comparison = compute.three_way(reference, quantized, fmt, selected.dim, equal, operand, recorded)
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
    histogram = log2_histogram([d for d in comparison.distributions if d.total])
    if not histogram.empty:
        groups = [d.group for d in comparison.distributions]
        chart = distribution_charts.histogram(histogram, f"{selected.label} · {label} compared with bf16", "values")
        items.append(Figure("three_way", chart, histogram, caption, height=360 + style.legend_height(groups)))
    return Drawn((*items, Table("three_way", comparison.table, columns, note=NOTE)), comparison.verdict)


def _beyond(opened: Catalog, where: Filter, run_ids: Collection[str]) -> Iterable[str]:
    """The bf16 runs of these; of a bf16 run, its quantized runs, the first of which is shown if none is chosen."""
    return [*references_of(opened, where, run_ids), *compared_to(opened, where, run_ids)]


DRIFT = Question(
    text="Is the difference rounding or drift?",
    title="The bf16 run",
    icon=":material/alt_route:",
    help="The bias and variance of gradients in a twin step; without one, the bf16 run’s tensor, the same tensor "
    "rounded, and the quantized run’s",
    page="tensor",
    of=Of.TENSOR,
    view="drift",
    room="law",
    draw=draw,
    controls=(RUN,),
    narrow=_controls,
    of_runs=True,
    beyond=_beyond,
)
