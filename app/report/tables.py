"""A report's tables for readers: names, units and numbers."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from binade.app.draw.style import MEASURES
from binade.app.view.params import TITLES
from binade.data.words.text import number_text


def shown(frame: pd.DataFrame, axis: str = "") -> pd.DataFrame:
    """A table for readers: metrics with names and units, shares in percent, words for columns. axis: that of the
    table's chart, see `axis_of`."""
    unit = f", {axis}" if axis else ""
    places = next((names for sign, names in PLACES.items() if sign in frame.columns), {})
    columns = {}
    for name in frame.columns:
        values = frame[name]
        if name in MEASURES and pd.api.types.is_float_dtype(values):
            measure = MEASURES[name]
            values, name = values * measure.factor, measure.axis
        elif (bound := str(name).rpartition("_"))[2] in BOUNDS and bound[0] in MEASURES:
            measure = MEASURES[bound[0]]
            values, name = values * measure.factor, f"{measure.axis}, {BOUNDS[bound[2]]}"
        elif name in TITLES:
            name = TITLES[name]
        else:
            values = values * 100 if name in SHARES else values
            name = f"{places[name]}{unit}" if name in places else COLUMNS.get(name, _words(str(name)))
        columns[name] = values
    return pd.DataFrame(columns)


COLUMNS = {
    "group": "Group", "numel": "Values", "tensors": "Tensors", "finite": "Finite", "mean": "Mean", "rms": "RMS",
    "min": "Min", "max": "Max", "absmin": "Smallest |x| > 0", "zeros": "Zeros", "nans": "NaN", "infs": "Inf",
    "state": "State", "started": "Started", "loss_last": "Last loss (nats)", "rank": "Rank", "place": "Place",
    "tensor_id": "Worst tensor", "gap": "Mean gap (nats)", "last": "Last gap (nats)", "label": "Run’s recipe",
    "parts": "Rounded", "iterations": "Iterations", "only": "Rounded alone", "loss": "Loss (nats)", "format": "Format",
    "theoretical": "Quantile of the distribution (in its scale)", "sample": "Quantile of the values (in its scale)",
    "share": "Share (%)", "mass": "Probability mass lost (%)", "head": "Head", "entropy": "Mean entropy (bits)",
    "lowest": "Lowest entropy (bits)", "highest": "Highest entropy (bits)", "uniform": "Uniform attention (bits)",
    "precision": "Precision", "tier": "Precision", "code": "Code", "codes": "Codes", "used": "Codes used",
    "count": "Values", "low": "Lowest", "q1": "25%", "median": "Median", "q3": "75%", "high": "Highest",
    "rung": "Step", "from": "Stacked from", "to": "Stacked to",
}  # fmt: skip
SHARES = ("share", "mass")
BOUNDS = {"low": "10%", "high": "90%"}  # percentiles of the tensors' values: sqnr_db_low
# What places are called in a table that has this column; their unit is that of the chart's axis.
PLACES = {
    "value": {"low": f"Value, {BOUNDS['low']}", "high": f"Value, {BOUNDS['high']}"},
    "share": {"low": "From", "high": "To"},
    "p0_1": {
        "min": "Min", "p0_1": "0.1%", "q1": "25%", "median": "Median", "q3": "75%", "p99_9": "99.9%", "max": "Max",
    },
}  # fmt: skip


def axis_of(spec: Any) -> str:
    """The title of a chart's axis of places, of a histogram or boxes; "" for another chart."""
    if isinstance(spec, dict):
        x = spec.get("x")
        if isinstance(x, dict) and x.get("field") in ("low", "p0_1") and x.get("title"):
            return str(x["title"])
    inner = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ()
    return next(filter(None, map(axis_of, inner)), "")


def _words(name: str) -> str:
    """A readable name for a column that has no entry here: "Column 3" for "column 3"."""
    return name[:1].upper() + name[1:].replace("_", " ")


def with_intervals(frame: pd.DataFrame) -> pd.DataFrame:
    """A shown table with a median and its percentiles in one column, as "30.1 (21.4 to 40.2)"."""
    bounds = {name: [f"{name}, {bound}" for bound in BOUNDS.values()] for name in frame.columns}
    bounds = {name: both for name, both in bounds.items() if set(both) <= set(frame.columns)}
    columns: dict[str, Any] = {}
    for name in frame.columns.difference([column for both in bounds.values() for column in both], sort=False):
        if name in bounds:
            texts = zip(*(map(_text, frame[column]) for column in (name, *bounds[name])), strict=True)
            columns[f"{name}, median (10% to 90%)"] = [f"{median} ({low} to {high})" for median, low, high in texts]
        else:
            columns[name] = frame[name]
    return pd.DataFrame(columns)


def cells(frame: pd.DataFrame) -> list[list[str]]:
    """Every row's cells: numbers in at most six digits, "–" for none."""
    return [[_text(value) for value in row] for row in frame.itertuples(index=False, name=None)]


def _text(value: object) -> str:
    if value is None or value is pd.NaT or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number_text(value, ".6g")
    return f"{value:,}" if isinstance(value, int) else str(value)
