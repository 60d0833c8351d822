"""The relative difference of each tensor, in the order of execution."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.data.words.text import number_text


def differences(table: pd.DataFrame, limit: float | None, first: int | None, subtitle: str) -> Chart:
    """first: the order of the first tensor that differs. A logarithmic axis has no 0 and no Inf: they are drawn at its
    ends."""
    finite = table["difference"][np.isfinite(table["difference"]) & (table["difference"] > 0)]
    ends = [*([finite.min(), finite.max()] if len(finite) else []), *([limit] if limit else [])] or [1e-3]
    low, high = 10.0 ** np.floor(np.log10(min(ends) / 2)), 10.0 ** np.ceil(np.log10(max(ends) * 2))
    shown = table.drop(columns=["shape", "shape_b", "at"]).assign(
        drawn=table["difference"].clip(low, high), label=table["difference"].map(number_text)
    )
    marks = plot.mark(
        "circle", shown, size=45, opacity=0.9, choose="tensor_id",
        x=plot.x("order", "tensor, in the order of execution", nice=False, padding=16),
        y=plot.y("drawn", "relative difference", log=True, domain=[low, high]),
        color=plot.operations(shown["operation"]),
        tips=plot.tips(place="tensor", label="relative difference", by="compared by"),
    )  # fmt: skip
    rules = [plot.rule(x=first, strokeDash=[1, 0], color=style.BAD)] if first is not None else []
    rules += [plot.rule(y=limit)] if limit else []
    return plot.layers("Difference between the two runs", subtitle, *rules, marks)
