"""What a recipe does to the gradients of one micro-batch on the same weights, as a twin step of the run measured it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pandas as pd

from binade.app.draw.figure import Column, Table
from binade.app.measures.cells import PLACE, product
from binade.app.measures.map_measure import ITERATION, LAYER, CellQuery, MapMeasure
from binade.app.questions.shared.runs import labels_of
from binade.data.compare import evidence
from binade.data.compare.evidence import Estimate, Measure, Sentence, exact, say, together, with_error
from binade.data.index.catalog import Catalog
from binade.data.run.directory import RunError
from binade.data.run.evaluations import GradientTwin, Twin, has_twins, read_twins
from binade.data.run.tensor_kinds import Gemm
from binade.data.words.filter import Filter
from binade.data.words.names import name_of

CHANGE = Measure(
    "change",
    "Δloss",
    definition="the loss with the recipe minus the loss without it; of experts, with their balance loss",
    format="+.3g",
)
BIAS = Measure("bias", "Bias", "%", "‖mean(ĝ) − g‖ / ‖g‖, without the noise of the passes")
NOISE = Measure("noise", "√variance", "%", "√(Σ‖ĝ − mean(ĝ)‖² / (M − 1)) / ‖g‖ over M passes")
ERROR = Measure("error", "Relative error", "%", "‖ĝ − g‖ / ‖g‖ of one pass")
_OF_TWIN = "g: gradient of a micro-batch without the recipe, ĝ: with it, on the same weights"
TWIN_BIAS = Measure(
    "twin_bias", "Bias of the gradient", "%",
    f"{BIAS.definition}; with one pass, the relative error ‖ĝ − g‖ / ‖g‖. {_OF_TWIN}", log=True,
)  # fmt: skip
TWIN_NOISE = Measure("twin_noise", "Noise of the gradient", "%", f"{NOISE.definition}. {_OF_TWIN}", log=True)
WEIGHT = ("module", "of_expert")  # what a weight of a layer is known by
COLUMNS = {
    "layer": Column("Layer", "d"),
    "module": Column("Module"),
    "expert": Column("Expert", "d"),
    "norm": Column("‖g‖", ".4g", help="Norm of the gradient without the recipe"),
    "bias": Column("Bias (%)", ".3g", help=BIAS.definition),
    "error": Column("Error (%)", ".3g", help=ERROR.definition),
    "bias_low": Column("from", ".3g", help="The 95% interval of the bias over the passes"),
    "bias_high": Column("to", ".3g", help="The 95% interval of the bias over the passes"),
    "noise": Column("√variance (%)", ".3g", help=NOISE.definition),
    "noise_low": Column("from", ".3g", help="The 95% interval of √variance over the passes"),
    "noise_high": Column("to", ".3g", help="The 95% interval of √variance over the passes"),
    "cosine": Column(format=".5f"),
    "change": Column("Δloss", help=CHANGE.definition),
}


def change_of(twin: Twin) -> Estimate:
    """The mean change of the loss; exact if every pass has the same loss, as where the forward pass draws nothing."""
    if not twin.draws or (len(twin.changes) > 1 and len(set(twin.changes)) == 1):
        return exact(CHANGE, twin.changes[0])
    return evidence.mean(CHANGE, twin.changes, "passes")


def bias_of(twin: Twin, row: GradientTwin) -> Estimate:
    """The bias of a gradient; its relative error if the recipe draws nothing, which is exact for the micro-batch, or if
    there is one pass."""
    if row.bias is None or not row.norm:
        return exact(BIAS if twin.draws else ERROR, math.nan)
    if not twin.draws:
        return exact(ERROR, row.bias)
    if row.bias_corrected is None:
        return with_error(ERROR, row.bias, math.nan, 1, "passes")
    if not row.variance:
        return exact(BIAS, row.bias_corrected)
    pairs, error = len(twin.changes) // 2, row.bias_error
    if error is None:
        return with_error(BIAS, row.bias_corrected, math.nan, len(twin.changes), "passes")
    estimate = with_error(BIAS, row.bias_corrected, error, pairs, "pairs of passes")
    return replace(estimate, low=max(estimate.low, 0.0))


def noise_of(twin: Twin, row: GradientTwin) -> Estimate:
    """√variance of a gradient."""
    if row.variance is None:
        return with_error(NOISE, math.nan, math.nan, len(twin.changes), "passes")
    value, passes = math.sqrt(row.variance), len(twin.changes)
    if not value:
        return exact(NOISE, 0.0)
    error = math.nan if row.variance_error is None else row.variance_error / (2 * value)
    estimate = with_error(NOISE, value, error, passes - 1, "passes")  # so many independent differences
    return replace(estimate, n=passes, low=max(estimate.low, 0.0))


def of_step(twin: Twin) -> Sentence:
    """What the recipe does to the loss and to the gradient of the whole step."""
    change, bias, noise = change_of(twin), bias_of(twin, twin.step), noise_of(twin, twin.step)
    if not 0 < twin.step.norm < math.inf:
        return say("The gradient of this micro-batch is zero or not finite without the recipe: its error is unknown.")
    first = say("On the same weights and micro-batch, the recipe changes the loss by {change}.", change=change)
    if math.isnan(change.value):
        lost = sum(not math.isfinite(delta) for delta in twin.changes)
        first = say("With the recipe, the loss is not finite in {lost} of {n} passes.", lost=lost, n=len(twin.changes))
    if math.isnan(bias.value):
        names = [_name(row) for row in twin.parameters if row.norm > 0 and math.isnan(bias_of(twin, row).value)]
        text = "The gradients of {n} of {of} parameters are not finite with the recipe: {names}."
        return together(first, say(text, n=len(names), of=len(twin.parameters), names=evidence.listed(names)))
    if bias.measure is ERROR:
        whole = say("The step’s gradient has a relative error of {error}.", error=bias)
        return together(first, whole, "One pass does not separate bias from variance." if twin.draws else "")
    noisy = say(" and a √variance of {noise}", noise=noise) if noise.value else Sentence()
    whole = say("The step’s gradient has a bias of {bias}{noisy}, relative to its norm.", bias=bias, noisy=noisy)
    return together(first, Sentence(whole, (*whole.evidence, *noisy.evidence)))


def _name(row: GradientTwin) -> str:
    """L2 fc1"""
    return name_of(row.layer_index or None, row.module, expert=row.expert) if row.module else row.name


def by_gradient(twin: Twin) -> pd.DataFrame:
    """The whole step, each layer, then each parameter: layer, module, expert, parameter, norm, bias (with several
    random passes; else error) and noise in percent with their intervals, cosine, change (as text, of the step)."""
    rows = []
    for row in twin.gradients:
        is_step = row is twin.step
        bias, noise = bias_of(twin, row), noise_of(twin, row)
        whole = "whole step" if is_step else "whole layer" if row in twin.layers else ""
        rows.append(
            {
                "layer": row.layer_index or None,
                "module": whole or row.module or row.name,
                "expert": row.expert,
                "parameter": row.name,
                "norm": row.norm,
                "bias": bias.value * 100 if bias.measure is BIAS else math.nan,
                "error": bias.value * 100 if bias.measure is ERROR else math.nan,
                "bias_low": bias.low * 100 if bias.interval else math.nan,
                "bias_high": bias.high * 100 if bias.interval else math.nan,
                "noise": noise.value * 100 if twin.draws else math.nan,
                "noise_low": noise.low * 100 if twin.draws and noise.interval else math.nan,
                "noise_high": noise.high * 100 if twin.draws and noise.interval else math.nan,
                "cosine": math.nan if row.cosine is None else row.cosine,
                "change": str(change_of(twin)) if is_step else "",
            }
        )
    table = pd.DataFrame(rows).astype({"layer": "Int64", "expert": "Int64"})
    return table.replace([math.inf, -math.inf], math.nan)


def steps(query: CellQuery) -> Iterator[tuple[str, Twin]]:
    """The runs of the selection, each with its twin steps in the columns of the map; if these are layers, with the step
    of the iteration that is shown, else its last one."""
    for run in query.opened.distinct(("run_id",), query.where)["run_id"]:
        try:
            twins = read_twins(query.opened.root / run)
        except (OSError, RunError):  # the catalog says so
            continue
        here = [twin for twin in twins if not query.where.iteration or twin.iteration in query.where.iteration]
        chosen = here if query.across == ITERATION else here[-1:] or twins[-1:]
        yield from ((run, twin) for twin in chosen)


def cells(measure: Measure, query: CellQuery) -> pd.DataFrame:
    """The bias or the noise of the gradients of weights: of several experts or runs their median, without an
    interval."""
    values, weights = _values(measure, query), _weights(query)
    by = [name for name in ("run_id", ITERATION, LAYER, *WEIGHT) if name in weights]
    values = values.astype({name: weights[name].dtype for name in by})
    table = weights.merge(values[[*by, "value", "low", "high", "broken"]], on=by)
    groups = table.sort_values("value", ascending=False, kind="stable").groupby([*PLACE, query.across], dropna=False)
    count = groups.size()
    found = groups[["value", "low", "high"]].median()
    found["value"] = found["value"].where(groups["value"].count() == count)
    found[["low", "high"]] = found[["low", "high"]].where(count == 1)
    return found.assign(
        tensors=count, tensor_id=groups["tensor_id"].first(), broken=groups["broken"].sum().astype(int)
    ).reset_index()


def _values(measure: Measure, query: CellQuery) -> pd.DataFrame:
    """The gradients of weights in the twin steps: run_id, iteration, layer_index, WEIGHT, value, low, high (missing
    without an interval) and broken (whether the recipe made it NaN or Inf)."""
    rows = []
    for run, twin in steps(query):
        for row in twin.parameters:
            if not (row.layer_index and row.module) or row.name.endswith("bias"):
                continue
            bias, noise = bias_of(twin, row), noise_of(twin, row)
            if measure is TWIN_NOISE and not twin.draws:
                continue
            value = bias if measure is TWIN_BIAS else noise
            ends = (value.low, value.high) if 0 < value.high - value.low < math.inf else (math.nan, math.nan)
            broken = row.norm > 0 and math.isnan(bias.value)
            rows.append((run, twin.iteration, row.layer_index, row.module, row.expert, value.value, *ends, broken))
    columns = ["run_id", ITERATION, LAYER, *WEIGHT, "value", "low", "high", "broken"]
    return pd.DataFrame(rows, columns=columns).astype({"value": float, "low": float, "high": float, "broken": bool})


def _weights(query: CellQuery) -> pd.DataFrame:
    """The weights of the selection by their products: run_id, the iteration if the columns are these, layer_index,
    PLACE, WEIGHT and tensor_id, of the gradient if it was recorded."""
    condition, parameters = query.opened.condition(query.where)
    moment = "iteration, " if query.across == ITERATION else ""
    return query.opened.ask(
        f"""
        SELECT run_id, {moment}layer_index, '{Gemm.WGRAD}' AS gemm, {product()} AS product, 'grad_weight' AS tensor,
               CASE WHEN module = ? THEN expert END AS expert, module, expert AS of_expert,
               arg_min(tensor_id, (tensor_name <> 'grad_weight', tensor_name <> 'weight', tensor_id)) AS tensor_id
        FROM tensor WHERE {condition} AND layer_index IS NOT NULL AND module IS NOT NULL GROUP BY ALL ORDER BY ALL
        """,
        [query.expanded, *parameters],
    )


def gradients(query: CellQuery, cell: pd.Series | None) -> Table | None:
    """Each gradient of a twin step: that of the cell's iteration, else the last one that is shown."""
    found = list(steps(query))
    if not found:
        return None
    at = cell[ITERATION] if cell is not None and query.across == ITERATION else None
    run, twin = next(((run, twin) for run, twin in found if twin.iteration == at), found[-1])
    passes = "1 pass" if len(twin.changes) == 1 else f"{len(twin.changes)} passes"
    drawn = passes if twin.draws else "the recipe draws no random numbers: exact for this micro-batch"
    table = by_gradient(twin)
    columns = {name: column for name, column in COLUMNS.items() if table[name].notna().any()}
    title = f"**Gradients** · {labels_of(query.opened).get(run, run)} · iteration {twin.iteration} · {drawn}"
    note = (
        f"{of_step(twin)} Data: one micro-batch, {passes} with the recipe and one without. g: gradient without the "
        "recipe. ĝ: with it."
    )
    return Table("twin", table, columns, title, note=note, height=min(38 + 35 * len(table), 420))


def _runs_with_steps(opened: Catalog) -> list[str]:
    return [run for run in opened.runs()["run_id"] if has_twins(opened.root / run)]


def _nothing(opened: Catalog, where: Filter, fmt: str) -> str:
    labels = labels_of(opened)
    if runs := [labels[run] for run in _runs_with_steps(opened) if not where.run_id or run not in where.run_id]:
        return f"This run has no twin step with this measure: choose another one, such as {evidence.listed(runs)}."
    return (
        "No twin step was recorded: record one with --twin 16 or, in your own loop, with recorder.twin. Without "
        "one, Compared with on the page Tensor tells rounding from drift."
    )


def _recorded(opened: Catalog) -> bool:
    return bool(_runs_with_steps(opened))


OF_TWIN_STEPS = tuple(
    MapMeasure(
        measure=measure, cells=partial(cells, measure), nothing=_nothing, recorded=_recorded, of="gradient",
        interval="95% interval over passes", extra=gradients,
    )
    for measure in (TWIN_BIAS, TWIN_NOISE)
)  # fmt: skip
