from __future__ import annotations

from binade.collector.imports.readers.csv_table import CsvTable
from binade.collector.imports.readers.series import Confidence, Start, Window
from binade.collector.imports.readers.text import csv_header


class LightningCsv(CsvTable):
    """Lightning's CSVLogger: `epoch`, `step` and a column for each metric, of which most cells are empty. A metric with
    `_step` is that of the step, one with `_epoch` the mean of an epoch."""

    kind = "Lightning's metrics.csv"
    example = "lightning_logs/version_0/metrics.csv"
    columns = "`step`, `train_loss_step` or `train_loss`"
    steps = ("step",)
    losses = ("train_loss_step", "train/loss_step", "loss_step", "train_loss", "train/loss", "loss")
    window = Window.ONE

    def recognize(self, start: Start) -> Confidence:
        names = csv_header(start.first)
        of_lightning = {"epoch", "step"} <= {*names} and any(name.endswith(("_step", "_epoch")) for name in names)
        return Confidence.SIGNATURE if of_lightning and self.has_columns(names) else Confidence.NONE
