"""Tables: CSV, columns between spaces, Parquet and SQLite."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import re2

from binade.collector.errors import ConfigError, raising
from binade.collector.imports.readers.json_logs import is_other_tag
from binade.collector.imports.readers.kind import Confidence, Kind, Start
from binade.collector.imports.readers.numbers import number_of
from binade.collector.imports.readers.series import LOSSES, STEPS, Columns, Notes, Rows, Series, listed
from binade.collector.imports.readers.table import LossTable, has_columns, loss_names
from binade.collector.imports.readers.text import csv_header, csv_rows, flat, text_lines
from binade.data.run.store import regular

BOUNDS = ("__MIN", "__MAX")  # of what a point of W&B's chart summarizes
TIMES = "_timestamp"  # ends the column with the times of a series of SwanLab
MOST_FACTS = 12
NO_HEADER = re2.compile(r"[-+.0-9{\[]|.*[={}]|.*:\s|.*\s[-+]?[0-9]+\.[0-9]")  # a cell that names no column


def is_header(names: list[str]) -> bool:
    """Whether the cells of a line may name columns: text has numbers and dates in its first line."""
    blank = sum(not name.strip() for name in names)
    return len(names) > 1 and blank <= 1 and not any(NO_HEADER.match(name.strip()) for name in names)


@dataclass(frozen=True, kw_only=True)
class Csv(Kind):
    """looks: how sure it is from the names of the columns and the start; those of CSV with any columns by default."""

    looks: Callable[[list[str], Start], Confidence] | None = None

    def recognize(self, start: Start) -> Confidence:
        names = [] if start.first.startswith(("{", "[")) else csv_header(start.first)
        if self.looks:
            return self.looks(names, start) if names else Confidence.NONE
        is_csv = start.path.suffix.lower() in (".csv", ".tsv") and bool(start.lines)
        if is_header(names) and has_columns(self, names):
            lower = {name.strip().lower() for name in names}
            table = {len(csv_header(line)) for line in start.lines[:5] if line.strip()} == {len(names)}
            if table or (lower & {*self.losses} and lower & {*self.steps}):
                return Confidence.COLUMNS
        return Confidence.POSSIBLE if is_csv and start.content.strip() else Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        return csv_rows(path, notes)


def is_tensorboard_csv(names: list[str], start: Start) -> Confidence:
    if names != ["Wall time", "Step", "Value"]:
        return Confidence.NONE
    return Confidence.POSSIBLE if is_other_tag(start.path.stem) else Confidence.SIGNATURE


def is_lightning(names: list[str], start: Start) -> Confidence:
    """`epoch`, `step` and a column for each metric, of which most cells are empty. A metric with `_step` is that of the
    step, one with `_epoch` the mean of an epoch."""
    of_lightning = {"epoch", "step"} <= {*names} and any(name.endswith(("_step", "_epoch")) for name in names)
    lower = {name.strip().lower() for name in names}
    return Confidence.SIGNATURE if of_lightning and not lower.isdisjoint(LIGHTNING_LOSSES) else Confidence.NONE


LIGHTNING_LOSSES = ("train_loss_step", "train/loss_step", "loss_step", "train_loss", "train/loss", "loss")


@dataclass(frozen=True, kw_only=True)
class Chart(Csv):
    """What a page exports of a chart: the step, and a column for each run and metric. W&B: `RUN - METRIC` with its
    `__MIN` and `__MAX`; SwanLab: `RUN-METRIC` with its `_timestamp`."""

    def recognize(self, start: Start) -> Confidence:
        names = csv_header(start.first)
        series = _of_chart(names[1:])
        if series and step_of_chart(names) and any(_losses(self, metrics) for metrics in series.values()):
            return Confidence.SIGNATURE
        return Confidence.POSSIBLE if series and any(name.endswith(BOUNDS) for name in names) else Confidence.NONE

    def read(self, path: Path, columns: Columns) -> tuple[Series, ...]:
        names: list[str] = list(next((row for _, row in csv_rows(path, Notes())), {}))
        runs = {run: metrics for run, metrics in _of_chart(names[1:]).items() if _losses(self, metrics)}
        if columns.loss or not runs:
            return super().read(path, columns)
        notes, tables, means = Notes(), dict[str, LossTable](), Counter[str]()
        others: dict[str, tuple[str, ...]] = {}
        for run, metrics in runs.items():
            candidates = _losses(self, metrics)
            if len(candidates) > 1 and candidates[0].strip().lower() not in self.losses:
                every = listed(metrics[metric] for metric in candidates)
                raise ConfigError(f"{path}: {every} may be the losses: choose one with --loss-column NAME")
            chosen = replace(columns, step=columns.step or names[0], loss=metrics[candidates[0]])
            tables[run] = LossTable(self, path, chosen, notes)
            others[run] = tuple(metrics[metric] for metric in candidates[1:])
        for place, row in csv_rows(path, notes):
            for run, table in tables.items():
                table.add(place, row)
                bounds = {row.get(f"{table.columns.loss}{bound}") or None for bound in BOUNDS}
                means[run] += len(bounds - {None}) > 1
        found: list[Series] = []
        for run, table in tables.items():
            averaged = (
                f"{means[run]:,} points of {table.columns.loss} have __MIN below __MAX: W&B's chart has averaged them"
            )
            for series in table.series(lambda: csv_rows(path, Notes()), run):
                facts = (*series.facts, averaged) if means[run] else series.facts
                found.append(replace(series, others=others[run], facts=facts))
        return tuple(found)


def step_of_chart(names: list[str]) -> bool:
    return bool(names) and names[0].strip().lower() in STEPS


def _losses(kind: Kind, metrics: Iterable[str]) -> list[str]:
    names = loss_names(kind)
    for metric in metrics:
        names.add(metric)
    return names.candidates


def _of_chart(names: list[str]) -> dict[str, dict[str, str]]:
    """The column of each metric of each run."""
    metrics: dict[str, dict[str, str]] = {}
    every = {*names}
    for name in names:
        if name.endswith((*BOUNDS, TIMES)):
            continue
        run, separator, metric = name.rpartition(" - ")
        if not separator and f"{name}{TIMES}" in every:
            metric = max((loss for loss in LOSSES if name.lower().endswith(f"-{loss}")), key=len, default="")
            run, separator, metric = name[: len(name) - len(metric) - 1], metric, name[len(name) - len(metric) :]
        if separator:
            metrics.setdefault(run, {})[metric] = name
    return metrics


@dataclass(frozen=True, kw_only=True)
class Spaced(Kind):
    """Columns between spaces under a line that names them, `# step loss grad_norm`."""

    def recognize(self, start: Start) -> Confidence:
        for line, below in zip(start.lines, start.lines[1:], strict=False):
            if (names := _header(line)) and len(below.split()) == len(names) and all(map(_is_number, below.split())):
                return Confidence.SIGNATURE
        return Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        header: list[str] | None = None
        for number, line in enumerate(text_lines(path, notes), 1):
            place = f"{path}, line {number}"
            if header is None:
                header = _header(line)
                if header is None and line.startswith("#") and len(notes.facts) < MOST_FACTS:
                    notes.facts.append(line.strip("# \r\n")[:200])
            elif line.strip() and not line.startswith("#"):
                yield place, _cells(place, line, header)


@dataclass(frozen=True, kw_only=True)
class Bare(Kind):
    """Columns between spaces that nothing names. names: the columns, and where the file is; None if it is not one."""

    names: Callable[[Start], list[str] | None]

    def recognize(self, start: Start) -> Confidence:
        names = self.names(start)
        if not names or not has_columns(self, names):
            return Confidence.NONE
        sure = "loss" in start.path.name.lower() or "loss" in start.path.parent.name.lower()
        return Confidence.COLUMNS if sure else Confidence.POSSIBLE

    def rows(self, path: Path, notes: Notes) -> Rows:
        names = self.names(Start.of(path)) or []
        notes.facts.append(f"the file does not name its columns: they are read as {', '.join(names)}")
        for number, line in enumerate(text_lines(path, notes), 1):
            if line.strip() and not line.startswith("#"):
                yield f"{path}, line {number}", _cells(f"{path}, line {number}", line, names)


def pairs(start: Start) -> list[str] | None:
    """A step and a loss, if each line has two numbers, of which the first ones are whole and rise."""
    before, number = -1, 0
    for line in start.lines:
        if not line.strip() or line.startswith("#"):
            continue
        cells = line.split()
        if len(cells) != 2 or not (cells[0].isdecimal() and len(cells[0]) < 17 and _is_number(cells[1])):
            return None
        if int(cells[0]) <= before:
            return None
        before, number = int(cells[0]), number + 1
    return ["step", "loss"] if number >= 3 else None


def mlflow_metric(start: Start) -> list[str] | None:
    """A time, a value and a step, in `metrics/NAME` of a run's folder in MLflow's store."""
    parts = start.path.parts
    if "metrics" not in parts[:-1]:
        return None
    name = "/".join(parts[len(parts) - parts[::-1].index("metrics") :])
    lines = [line.split() for line in start.lines if line.strip()]
    fits = lines and all(
        len(cells) == 3 and len(cells[0]) >= 10 and cells[0].isdecimal() and _is_number(cells[1]) for cells in lines
    )
    return ["timestamp", name, "step"] if fits else None


def _header(line: str) -> list[str] | None:
    """The columns that a line names, if a step and a loss are among them, and each once."""
    names = line.lstrip("#").split() if "\t" not in line else []
    lower = {name.lower() for name in names}
    return names if len(lower) == len(names) and lower & {*STEPS} and lower & {*LOSSES} else None


def _cells(place: str, line: str, names: list[str]) -> dict[str, str]:
    cells = line.split()
    if len(cells) != len(names):
        raise ConfigError(f"{place}: there are {len(cells)} values: expected {len(names)}")
    return dict(zip(names, cells, strict=True))


def _is_number(text: str) -> bool:
    try:
        number_of(text)
    except ValueError:
        return False
    return True


MOST_BATCH = 10_000  # rows of Parquet at once


@dataclass(frozen=True, kw_only=True)
class Parquet(Kind):
    """A table such as the history that W&B keeps of a run."""

    def recognize(self, start: Start) -> Confidence:
        if not start.content.startswith(b"PAR1"):
            return Confidence.NONE
        try:
            return Confidence.COLUMNS if has_columns(self, _parquet_columns(start.path)) else Confidence.POSSIBLE
        except ConfigError:
            return Confidence.POSSIBLE

    def rows(self, path: Path, notes: Notes) -> Rows:
        import pyarrow
        import pyarrow.parquet

        columns = _parquet_columns(path)
        number = 0
        with (
            raising(ConfigError, f"{path} cannot be read as Parquet", pyarrow.ArrowException, OSError),
            open(path, "rb", opener=regular) as file,
        ):
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(MOST_BATCH, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row


def _parquet_columns(path: Path) -> list[str]:
    """The columns of numbers, texts and truth values. Raises ConfigError."""
    import pyarrow
    import pyarrow.parquet

    with (
        raising(ConfigError, f"{path} cannot be read as Parquet", pyarrow.ArrowException, OSError),
        open(path, "rb", opener=regular) as file,
    ):
        schema = pyarrow.parquet.ParquetFile(file).schema_arrow
    types = pyarrow.types
    simple = (types.is_integer, types.is_floating, types.is_string, types.is_large_string, types.is_boolean)
    return [field.name for field in schema if any(is_of(field.type) for is_of in simple) and "." not in field.name]


@dataclass(frozen=True, kw_only=True)
class Sqlite(Kind):
    """A database of SQLite. query: its rows; row: the values by column, of one of them. Nothing of the file is run but
    this query on tables: no views, no triggers."""

    table: str
    has: frozenset[str]
    query: str
    row: Callable[[tuple[Any, ...]], dict[str, Any]]

    def recognize(self, start: Start) -> Confidence:
        if not start.content.startswith(b"SQLite format 3\0"):
            return Confidence.NONE
        try:
            with closing(_connect(start.path)) as database:
                columns = {
                    name for _, name, *_ in database.execute("SELECT * FROM pragma_table_info(?)", (self.table,))
                }
                names = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
                is_table = database.execute(names, (self.table,)).fetchone()
        except sqlite3.Error:
            return Confidence.NONE
        return Confidence.SIGNATURE if is_table and self.has <= columns else Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        what = f"{path} cannot be read as a database"
        with raising(ConfigError, what, sqlite3.Error), closing(_connect(path)) as database:
            for number, values in enumerate(database.execute(self.query), 1):
                if row := self.row(values):
                    yield f"{path}, row {number}", row


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    database.execute("PRAGMA trusted_schema = OFF")
    database.execute("PRAGMA query_only = ON")
    return database


def trackio_row(values: tuple[Any, ...]) -> dict[str, Any]:
    run, step, metrics = values
    try:
        content = json.loads(metrics)
    except (TypeError, ValueError, RecursionError):
        raise ConfigError(f"the metrics of step {str(step)[:40]} of {str(run)[:80]!r} are not JSON") from None
    return {"run_name": run, "step": step, **flat(content)} if isinstance(content, dict) else {}


def mlflow_row(values: tuple[Any, ...]) -> dict[str, Any]:
    run, key, value, step, is_nan = values
    return {"run_uuid": run, "key": key, "value": float("nan") if is_nan else value, "step": step}
