from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from binade.collector.errors import ConfigError
from binade.collector.imports.readers.series import Confidence, Notes, Rows, Start, TableReader
from binade.collector.imports.readers.tensorboard_csv import is_other_tag
from binade.collector.imports.readers.text import json_document


class TensorboardJson(TableReader):
    """The JSON of one scalar that TensorBoard's page downloads: `[[wall time, step, value], ...]`."""

    kind = "JSON of a TensorBoard scalar"
    example = "tb.json"
    columns = "`[[wall time, step, value], ...]`"
    steps = ("step",)
    losses = ("value",)
    _number = r"\s*-?[\d.]+(?:[eE][-+]?\d+)?\s*"
    _begins: ClassVar = re.compile(rf"\s*\[\s*\[{_number},\s*\d+\s*,(?:{_number}|\s*\"?-?(?:NaN|Infinity)\"?\s*)\]")

    def recognize(self, start: Start) -> Confidence:
        if not start.lines or not self._begins.match("\n".join(start.lines[:6])[:400]):
            return Confidence.NONE
        return Confidence.POSSIBLE if is_other_tag(start.path.stem) else Confidence.SIGNATURE

    def rows(self, path: Path, notes: Notes) -> Rows:
        document = json_document(path)
        for number, row in enumerate(document if isinstance(document, list) else [], 1):
            if not isinstance(row, list) or len(row) != 3:
                raise ConfigError(f"{path}, entry {number}: expected [wall time, step, value]")
            yield f"{path}, entry {number}", {"step": row[1], "value": row[2]}
