"""A twin step: what a recipe does to the loss and the gradients of one micro-batch, on the same weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd

from binade.data import evidence
from binade.data import names as tensor_names
from binade.data.evidence import Estimate, Measure, Sentence, exact, say, together, with_error
from binade.data.twin import GradientTwin, Twin

CHANGE = Measure(
    "change",
    "Δloss",
    definition="the loss with the recipe minus the loss without it; of experts, with their balance loss",
    format="+.3g",
)
BIAS = Measure("bias", "Bias", "%", "‖mean(ĝ) − g‖ / ‖g‖, without the noise of the passes")
NOISE = Measure("noise", "√variance", "%", "√(Σ‖ĝ − mean(ĝ)‖² / (M − 1)) / ‖g‖ over M passes")
ERROR = Measure("error", "Relative error", "%", "‖ĝ − g‖ / ‖g‖ of one pass")


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


def verdict(twin: Twin) -> Sentence:
    """What the recipe does to the whole step, and which parameter's gradient has the largest bias if one has."""
    change, bias, noise = change_of(twin), bias_of(twin, twin.step), noise_of(twin, twin.step)
    if not 0 < twin.step.norm < math.inf:
        return say("The gradient of this micro-batch is zero or not finite without the recipe: its error is unknown.")
    first = say("On the same weights and micro-batch, the recipe changes the loss by {change}.", change=change)
    if math.isnan(change.value):
        lost = sum(not math.isfinite(delta) for delta in twin.changes)
        first = say("With the recipe, the loss is not finite in {lost} of {n} passes.", lost=lost, n=len(twin.changes))
    if math.isnan(bias.value):
        names = [name_of(row) for row in twin.parameters if row.norm > 0 and math.isnan(bias_of(twin, row).value)]
        text = "The gradients of {n} of {of} parameters are not finite with the recipe: {names}."
        return together(first, say(text, n=len(names), of=len(twin.parameters), names=evidence.listed(names)))
    if bias.measure is ERROR:
        whole = say("The step’s gradient has a relative error of {error}.", error=bias)
        if twin.draws:
            return together(first, whole, "One pass does not separate bias from variance.")
    elif noise.value:
        whole = say(
            "The step’s gradient has a bias of {bias} and a √variance of {noise}, relative to its norm.",
            bias=bias,
            noise=noise,
        )
    else:
        whole = say("The step’s gradient has a bias of {bias}, relative to its norm.", bias=bias)
    items = [(name_of(row), bias_of(twin, row)) for row in twin.parameters]
    what = f"{bias.measure.label.lower()} of a parameter’s gradient"
    return together(first, whole, evidence.extreme(items, what, lowest=False))


def name_of(row: GradientTwin) -> str:
    """L2 fc1"""
    return tensor_names.name_of(row.layer_index or None, row.module, expert=row.expert) if row.module else row.name


def by_layer(twin: Twin) -> pd.DataFrame:
    """One row per layer and group (bias, or error of one pass; √variance where something is drawn): layer, group,
    value, low and high in percent, missing where there is no interval, and text."""
    rows = []
    for row in twin.layers:
        for estimate in (bias_of(twin, row), noise_of(twin, row)):
            if math.isnan(estimate.value) or (estimate.measure is NOISE and not twin.draws):
                continue
            ends = [x * 100 if math.isfinite(x) else math.nan for x in (estimate.low, estimate.high)]
            label = estimate.measure.label
            rows.append((row.layer_index, label, estimate.value * 100, *ends, str(estimate)))
    return pd.DataFrame(rows, columns=["layer", "group", "value", "low", "high", "text"])


def by_parameter(twin: Twin) -> pd.DataFrame:
    """The whole step, then each parameter: layer, module, expert, parameter, norm, bias (with several random
    passes; else error), bias_low, bias_high and noise in percent, cosine, change (as text, of the step)."""
    rows = []
    for row in (twin.step, *twin.parameters):
        is_step = row is twin.step
        bias, noise = bias_of(twin, row), noise_of(twin, row)
        rows.append(
            {
                "layer": row.layer_index or None,
                "module": "whole step" if is_step else row.module or row.name,
                "expert": row.expert,
                "parameter": row.name,
                "norm": row.norm,
                "bias": bias.value * 100 if bias.measure is BIAS else math.nan,
                "error": bias.value * 100 if bias.measure is ERROR else math.nan,
                "bias_low": bias.low * 100 if bias.interval else math.nan,
                "bias_high": bias.high * 100 if bias.interval else math.nan,
                "noise": noise.value * 100 if twin.draws else math.nan,
                "cosine": math.nan if row.cosine is None else row.cosine,
                "change": str(change_of(twin)) if is_step else "",
            }
        )
    table = pd.DataFrame(rows).astype({"layer": "Int64", "expert": "Int64"})
    return table.replace([math.inf, -math.inf], math.nan)
