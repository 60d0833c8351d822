"""What reports are made of: plates (figures ready to be drawn), tables, parts, and the report itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from app.figure import Figure
from app.params import TITLES
from app.report.painting import HEIGHT, spec_of
from app.style import MEASURES

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
    """notes: HTML that was made safe, "" for none; facts: (name, value) as they stand under the title."""

    title: str
    subtitle: str
    facts: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]
    notes: str = ""


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """A table as people read it: metrics by their names and units, shares in percent, words for columns."""
    columns = {}
    for name in frame.columns:
        values = frame[name]
        if name in MEASURES and pd.api.types.is_float_dtype(values):
            measure = MEASURES[name]
            values, name = values * measure.factor, measure.axis
        elif name in TITLES:
            name = TITLES[name]
        else:
            name = COLUMNS.get(name, str(name).replace("_", " "))
        columns[name] = values
    return pd.DataFrame(columns)


COLUMNS = {
    "group": "Group", "numel": "Values", "tensors": "Tensors", "finite": "Finite", "mean": "Mean", "rms": "RMS",
    "min": "Min", "max": "Max", "absmin": "Smallest |x| > 0", "zeros": "Zeros", "nans": "NaN", "infs": "Inf",
    "state": "State", "started": "Started", "loss_last": "Last loss (nats)", "rank": "Rank", "place": "Place",
    "tensor_id": "Worst tensor", "gap": "Mean gap (nats)", "last": "Last gap (nats)", "label": "Run’s recipe",
    "parts": "Rounded", "iterations": "Iterations",
}  # fmt: skip


def plates(folder: str, figures: Iterable[Figure], suffix: str = "") -> tuple[Plate, ...]:
    return tuple(Plate(f"{folder}/{figure.name}{suffix}", figure) for figure in figures)
