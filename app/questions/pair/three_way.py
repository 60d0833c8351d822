"""Is it the format's rounding, or has the run drifted? A tensor of the bf16 run, the same tensor rounded, and that of a
quantized run on the same data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pandas as pd
from torch import Tensor

from binade import quant
from binade.app.draw.figure import Column, Table
from binade.app.draw.style import MEASURES
from binade.app.questions.shared.rounded import NOT_RECORDED, Recorded
from binade.app.questions.shared.runs import every_run
from binade.app.questions.shared.selection import SelectedTensor
from binade.data.compare.evidence import Measure, Sentence, exact, say, together
from binade.data.compare.same_data import equal_weights
from binade.quant import sketch as sketches
from binade.quant.metrics import METRICS, errors
from binade.quant.specs import Spec

NOTE = (
    "The quantized run’s tensor is taken before its own rounding. It differs from the bf16 run’s tensor only because "
    "operands of earlier GEMMs were rounded, in this iteration or a previous one. A twin step (--twin 16) shows what "
    "rounding does to the gradients on the same weights."
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
TIMES = Measure("ratio", "Ratio", "times")


@dataclass(frozen=True)
class ThreeWay:
    """bf16's tensor g, the same rounded to a format, and the quantized run's tensor ĝ before its own rounding.

    table: rows rounding (of the rounded g against g), drift (ĝ against g) and both (the rounded ĝ against g); columns
    what, sqnr_db, relative_error, cosine, gradient_bias, ks. rounded: bf16's tensor, rounded to the format.
    """

    table: pd.DataFrame
    rounded: Tensor
    format: str
    equal_weights: bool = False  # then what differs is rounding that earlier layers pass on, not drift
    operand: bool = True  # of a GEMM: nothing else is rounded to the format

    @property
    def verdict(self) -> Sentence:
        """Say which of the two is larger, by their relative errors."""
        of = self.table.set_index("what")["relative_error"]
        rounding, drift = of["rounding"], of["drift"]
        if not (math.isfinite(rounding) and math.isfinite(drift)):
            return say("Cannot compare: one error is NaN or Inf.")
        if drift == 0:
            return say("Rounding alone: the run has not drifted; its tensor is identical to that of bf16.")
        error, ratio = exact(MEASURES["relative_error"], drift), drift / rounding if rounding else math.inf
        if not self.operand:
            word = "Propagated rounding" if self.equal_weights else "Drift"
            text = "{word}: relative error {error}. The tensor itself is not rounded: it is no operand of a GEMM."
            return say(text, word=word, error=error)
        if self.equal_weights:
            passed_on = say(
                "Propagated rounding: both runs have the same weights here; what earlier layers pass on has a relative "
                "error of {error}.",
                error=error,
            )
            multiple = say("That is {times} the format’s own rounding error.", times=exact(TIMES, ratio))
            return together(passed_on, multiple if rounding else "")
        if rounding == 0:
            text = "The run has drifted (relative error {error}); the format's rounding loses nothing here."
            return say(text, error=error)
        if ratio > 2:
            return say("Mostly drift: the drift is {times} the rounding error.", times=exact(TIMES, ratio))
        if ratio < 0.5:
            return say("Mostly rounding: the rounding error is {times} the drift.", times=exact(TIMES, 1 / ratio))
        return say("Both: the drift is {times} the rounding error.", times=exact(TIMES, ratio))


def three_way(
    reference: Tensor,
    quantized: Tensor,
    fmt: str,
    dim: int = -1,
    equal_weights: bool = False,
    operand: bool = True,
    recorded: Recorded = NOT_RECORDED,
) -> ThreeWay:
    """Is it the format's rounding, or has the run drifted? Both tensors of one shape; blocks along dim. recorded: how
    the run rounded its own tensor, which holds for both."""
    rounded, both = (recorded.look(x, Spec.of(fmt), dim).result for x in (reference, quantized))
    rows = []
    for what, q in (("rounding", rounded), ("drift", quantized), ("both", both)):
        error = errors(reference, q)
        rows.append(
            {"what": what, "sqnr_db": error.sqnr_db, "relative_error": error.relative_error, "cosine": error.cosine,
             "gradient_bias": error.relative_error**2,
             "ks": sketches.ks(quant.summarize(reference).sketch, quant.summarize(q).sketch)}
        )  # fmt: skip
    return ThreeWay(pd.DataFrame(rows), rounded, fmt, equal_weights, operand)


def three_way_of(selected: SelectedTensor, other: SelectedTensor) -> ThreeWay | str | None:
    """Of two tensors of one shape, which are the same in a quantized run and in a bf16 run that it may be compared
    with; None if they are not, a sentence if the rounding cannot be repeated."""
    runs = every_run(selected.opened).set_index("run_id")
    pair = {str(tensor.row["run_id"]): tensor for tensor in (selected, other)}
    quantized = [run for run in pair if runs["quantized"][run]]
    run = next((run for run in quantized if any(name in pair for name in runs["references"][run])), None)
    if run is None or selected.x.shape != other.x.shape or not selected.x.numel():
        return None
    if other.row["tensor_id"] not in {*selected.opened.twins(selected.row["tensor_id"])["tensor_id"]}:
        return None
    (base,) = {*pair} - {run}
    row = pair[run].row
    fmt = str(selected.spec) if pd.isna(row["format"]) else row["format"]
    recorded = Recorded.of(row)
    if problem := recorded.problem(Spec.of(fmt)):
        return problem
    branched = float(runs["branched"][[run, base]].max())
    equal = equal_weights(selected.opened, run, base, int(row["iteration"]), branched)
    operand = not pd.isna(row["contracted_axis"])
    return three_way(pair[base].x, pair[run].x, fmt, selected.dim, equal, operand, recorded)


def table_of(found: ThreeWay) -> Table:
    columns = COLUMNS
    if found.equal_weights:
        what = replace(COLUMNS["what"], text=lambda row: EQUAL_WEIGHTS.get(row["what"], WHAT[row["what"]]))
        columns = COLUMNS | {"what": what}
    return Table("three_way", found.table, columns, f"**Rounding or drift** · in {found.format}", note=NOTE)
