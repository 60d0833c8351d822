"""A tensor of the bf16 run, the same tensor rounded, and its twin of a quantized run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
from torch import Tensor

from binade import quant
from binade.app.questions.shared.distributions import Distribution, distribution_of
from binade.data.text import short
from binade.quant import sketch as sketches
from binade.quant.metrics import errors


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

    @property
    def verdict(self) -> str:
        """Say which of the two is larger, by their relative errors."""
        of = self.table.set_index("what")["relative_error"]
        rounding, drift = of["rounding"], of["drift"]
        if not (math.isfinite(rounding) and math.isfinite(drift)):
            return "Undetermined: one of the three errors is not finite."
        if drift == 0:
            return "Rounding alone: the run has not drifted; its tensor is identical to that of bf16."
        if self.equal_weights:
            times = f", {drift / rounding:.2f} times the format’s own rounding error" if rounding else ""
            return (
                "Propagated rounding: both runs have the same weights here; what earlier layers pass on has a relative "
                f"error of {short(drift, 3)}{times}."
            )
        if rounding == 0:
            return f"The run has drifted (relative error {short(drift, 3)}); the format's rounding loses nothing here."
        ratio = drift / rounding
        if ratio > 2:
            return f"Mostly drift: the drift is {ratio:.1f} times the rounding error."
        if ratio < 0.5:
            return f"Mostly rounding: the rounding error is {1 / ratio:.1f} times the drift."
        return f"Both: the drift is {ratio:.2f} times the rounding error."


def three_way(reference: Tensor, own: Tensor, fmt: str, dim: int = -1, equal_weights: bool = False) -> ThreeWay:
    """Is it the format's rounding, or has the run drifted? Both tensors of one shape; blocks along dim."""
    rounded, both = quant.fake_quantize(reference, fmt, dim), quant.fake_quantize(own, fmt, dim)
    rows = []
    for what, q in (("rounding", rounded), ("drift", own), ("both", both)):
        found = errors(reference, q)
        rows.append(
            {"what": what, "sqnr_db": found.sqnr_db, "relative_error": found.relative_error, "cosine": found.cosine,
             "gradient_bias": found.relative_error**2,
             "ks": sketches.ks(quant.summarize(reference).sketch, quant.summarize(q).sketch)}
        )  # fmt: skip
    names = ("bf16 run", f"bf16 run, rounded to {fmt}", "quantized run")
    shown = [distribution_of(name, x) for name, x in zip(names, (reference, rounded, own), strict=True)]
    return ThreeWay(pd.DataFrame(rows), shown, fmt, equal_weights)
