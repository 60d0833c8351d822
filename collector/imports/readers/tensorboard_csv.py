from __future__ import annotations

from binade.collector.imports.readers.csv_table import CsvTable
from binade.collector.imports.readers.series import Confidence, Start
from binade.collector.imports.readers.text import csv_header


class TensorboardCsv(CsvTable):
    """The CSV of one scalar that TensorBoard's page downloads. The file does not name the scalar; its name may."""

    kind = "CSV of a TensorBoard scalar"
    example = "tb.csv"
    columns = "`Wall time,Step,Value`"
    steps = ("step",)
    losses = ("value",)

    def recognize(self, start: Start) -> Confidence:
        if csv_header(start.first) != ["Wall time", "Step", "Value"]:
            return Confidence.NONE
        return Confidence.POSSIBLE if is_other_tag(start.path.stem) else Confidence.SIGNATURE


def is_other_tag(name: str) -> bool:
    """Whether the name of a download, "run-RUN-tag-TAG", is that of another scalar than a loss."""
    _, separator, tag = name.lower().rpartition("-tag-")
    return bool(separator) and ("loss" not in tag or any(word in tag for word in ("val", "eval", "test")))
