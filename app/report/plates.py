"""What reports are made of: plates (figures ready to be drawn), tables, parts, and the report itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from binade.app.figure import Figure
from binade.app.params import TITLES
from binade.app.report.painting import HEIGHT, spec_of
from binade.app.style import MEASURES

_CHOOSE = re.compile(r"\s*Choose an? [^.]*\.")


@dataclass(frozen=True)
class Plate:
    """A figure with its place in the report (letters, digits, "_" and one "/") and its specification."""

    path: str
    figure: Figure

    @cached_property
    def spec(self) -> dict[str, Any]:
        return spec_of(self.figure.chart)

    @property
    def file(self) -> str:
        """The name of a file saved from a page."""
        return "binade-" + re.sub(r"[/_]", "-", self.path)

    @property
    def height(self) -> int:
        return self.figure.height or HEIGHT

    @property
    def note(self) -> str:
        """What a reader needs beside title and caption; without the app's "choose a bar"."""
        text = _CHOOSE.sub("", self.figure.note)
        for line in self.figure.caption.splitlines():
            text = text.replace(line, "")
        return "" if text.strip() in self.figure.caption else text.strip()

    @property
    def csv(self) -> str:
        """The numbers, the caption before them as comments."""
        comments = "".join(f"# {line}\n" for line in self.figure.caption.splitlines())
        return comments + self.figure.table.to_csv(index=False)


@dataclass(frozen=True)
class Table:
    """Numbers that stand by themselves. name is unique in a report."""

    name: str
    title: str
    frame: pd.DataFrame
    note: str = ""


@dataclass(frozen=True)
class Part:
    """A section. texts: (title, what is set as it is)."""

    name: str
    title: str
    plates: tuple[Plate, ...] = ()
    tables: tuple[Table, ...] = ()
    text: str = ""
    verdict: str = ""
    problems: tuple[str, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Report:
    """notes: HTML that was made safe, "" for none; facts: (name, value) as they stand under the title; archived:
    whether a ZIP was made as well."""

    title: str
    subtitle: str
    facts: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]
    notes: str = ""
    archived: bool = False


def shown(frame: pd.DataFrame, axis: str = "") -> pd.DataFrame:
    """A table as people read it: metrics by their names and units, shares in percent, words for columns. axis: of the
    chart that it is drawn as, see `axis_of`."""
    unit = f", {axis}" if axis else ""
    places = next((names for sign, names in PLACES.items() if sign in frame.columns), {})
    columns = {}
    for name in frame.columns:
        values = frame[name]
        if name in MEASURES and pd.api.types.is_float_dtype(values):
            measure = MEASURES[name]
            values, name = values * measure.factor, measure.axis
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
    "theoretical": "Quantile of the law (in its scale)", "sample": "Quantile of the values (in its scale)",
    "share": "Share (%)", "mass": "Probability held (%)", "head": "Head", "entropy": "Mean entropy (bits)",
    "lowest": "Lowest entropy (bits)", "highest": "Highest entropy (bits)", "uniform": "Even attention (bits)",
    "precision": "Precision", "tier": "Precision", "code": "Code", "codes": "Codes", "used": "Codes used",
    "count": "Values", "low": "Lowest", "q1": "25 %", "median": "Median", "q3": "75 %", "high": "Highest",
}  # fmt: skip
SHARES = ("share", "mass")
# What places are called in a table that has this column; their unit is that of the chart's axis.
PLACES = {
    "share": {"low": "From", "high": "To"},
    "p0_1": {
        "min": "Min", "p0_1": "0.1 %", "q1": "25 %", "median": "Median", "q3": "75 %", "p99_9": "99.9 %", "max": "Max",
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
    """A column's name that has none of its own here, as words: "column 3" as "Column 3"."""
    return name[:1].upper() + name[1:].replace("_", " ")


def plates(folder: str, figures: Iterable[Figure], suffix: str = "") -> tuple[Plate, ...]:
    return tuple(Plate(f"{folder}/{figure.name}{suffix}", figure) for figure in figures)
