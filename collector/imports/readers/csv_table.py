from __future__ import annotations

from pathlib import Path

from binade.collector.imports.readers.series import Confidence, Notes, Rows, Start, TableReader
from binade.collector.imports.readers.text import csv_header, csv_rows


class CsvTable(TableReader):
    """A CSV file with a column of steps and one of losses, such as the history that W&B's API returns."""

    kind = "CSV (W&B history and others)"
    example = "history.csv"
    columns = "`step`, `global_step`, `_step` and others; `loss`, `train/loss`, `lm loss` and others"

    def recognize(self, start: Start) -> Confidence:
        names = [] if start.first.startswith(("{", "[")) else csv_header(start.first)
        if start.path.suffix != ".csv" and any("=" in name for name in names):  # of a progress bar
            return Confidence.NONE
        widths = {len(csv_header(line)) for line in start.lines[:5] if line.strip()}
        table = len(names) > 1 and widths == {len(names)}
        lower = {name.strip().lower() for name in names}
        if self.has_columns(names) and (table or (lower & {*self.losses} and lower & {*self.steps})):
            return Confidence.COLUMNS
        return Confidence.POSSIBLE if table or start.path.suffix == ".csv" else Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        return csv_rows(path, notes)
