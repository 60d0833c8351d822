"""A tensor of the bf16 run, the same tensor rounded, and its twin of a quantized run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
from torch import Tensor

from binade import quant
from binade.app.questions.shared.distributions import Distribution, distribution_of
from binade.app.questions.shared.rounded import NOT_RECORDED, Recorded
from binade.app.style import MEASURES
from binade.data.evidence import Measure, Sentence, exact, say, together
from binade.quant import sketch as sketches
from binade.quant.metrics import errors
from binade.quant.specs import Spec

TIMES = Measure("ratio", "Ratio", "times")


@dataclass(frozen=True)
class ThreeWay:
    """bf16's tensor g, the same rounded to a format, and the quantized run's tensor ĝ before its own rounding.

    table: rows rounding (of the rounded g against g), drift (ĝ against g) and both (the rounded ĝ against g); columns
    what, sqnr_db, relative_error, cosine, gradient_bias, ks.
    """

    table: pd.DataFrame
    distributions: list[Distribution]
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
    names = ("bf16 run", f"bf16 run, rounded to {fmt}", "quantized run")
    shown = [distribution_of(name, x) for name, x in zip(names, (reference, rounded, quantized), strict=True)]
    return ThreeWay(pd.DataFrame(rows), shown, fmt, equal_weights, operand)
