from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from binade.collector.errors import ConfigError
from binade.collector.imports.readers.csv_table import CsvTable
from binade.collector.imports.readers.series import Columns, Confidence, LossTable, Notes, Series, Start, listed
from binade.collector.imports.readers.text import csv_header, csv_rows

BOUNDS = ("__MIN", "__MAX")  # of what a point of the chart summarizes


class WandbCsv(CsvTable):
    """What W&B's page exports of a chart: `Step`, and for each run `RUN - METRIC` with its `__MIN` and `__MAX`."""

    kind = "CSV of a W&B chart"
    example = "wandb_export.csv"
    columns = "`Step`, one series for each `RUN - train/loss`; `__MIN` and `__MAX` are left out"

    def recognize(self, start: Start) -> Confidence:
        names = csv_header(start.first)
        series = _series(names[1:])
        bounds = any(name.endswith(BOUNDS) for name in names)
        if series and self.steps_of(names[:1]) and any(self.losses_of(metrics) for metrics in series.values()):
            return Confidence.SIGNATURE
        return Confidence.POSSIBLE if series and bounds else Confidence.NONE

    def read(self, path: Path, columns: Columns) -> tuple[Series, ...]:
        names: list[str] = list(next((row for _, row in csv_rows(path, Notes())), {}))
        runs = {run: metrics for run, metrics in _series(names).items() if self.losses_of(metrics)}
        if columns.loss or not runs:
            return super().read(path, columns)
        notes, tables, means = Notes(), dict[str, LossTable](), Counter[str]()
        others: dict[str, tuple[str, ...]] = {}
        for run, metrics in runs.items():
            candidates = self.losses_of(metrics)
            if len(candidates) > 1 and candidates[0].strip().lower() not in self.losses:
                every = listed(f"{run} - {metric}" for metric in candidates)
                raise ConfigError(f"{path}: {every} may be the losses: choose one with --loss-column NAME")
            column = f"{run} - {candidates[0]}"
            tables[run] = LossTable(self, path, Columns(columns.step or self.steps_of(names[:1])[0], column))
            others[run] = tuple(f"{run} - {metric}" for metric in candidates[1:])
        for place, row in csv_rows(path, notes):
            for run, table in tables.items():
                table.add(place, row)
                bounds = {row.get(f"{table.columns.loss}{bound}") or None for bound in BOUNDS}
                means[run] += len(bounds - {None}) > 1
        series = []
        for run, table in tables.items():
            averaged = (
                f"{means[run]:,} points of {table.columns.loss} have __MIN below __MAX: W&B's chart has averaged them"
            )
            run_notes = replace(notes, facts=[averaged] * bool(means[run]))
            series.append(replace(self.series(table, run_notes, run), others=others[run]))
        return tuple(series)


def _series(names: Iterable[str]) -> dict[str, list[str]]:
    """The metrics of each run."""
    metrics: dict[str, list[str]] = {}
    for name in names:
        run, separator, metric = name.rpartition(" - ")
        if separator and not name.endswith(BOUNDS):
            metrics.setdefault(run, []).append(metric)
    return metrics
