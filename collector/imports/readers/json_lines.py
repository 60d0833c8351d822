from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from binade.collector.imports.readers.series import Confidence, Notes, Rows, Start, TableReader
from binade.collector.imports.readers.text import json_object, json_rows

LOOKED_AT = 200  # lines


class JsonLinesReader(TableReader):
    """An object a line. signature: a key that only this kind has."""

    kind = "JSON lines (torchtune and others)"
    example = "losses.jsonl"
    columns = "the keys `step`, `iteration` and others; `loss`, `train/loss` and others"
    signature: ClassVar[frozenset[str]] = frozenset()

    def recognize(self, start: Start) -> Confidence:
        if any(self.signature <= row.keys() and self.has_columns(row) for row in self.objects(start)):
            return Confidence.SIGNATURE if self.signature else Confidence.COLUMNS
        looks = start.first.startswith("{") or start.path.suffix in (".jsonl", ".ndjson")
        return Confidence.POSSIBLE if looks and not self.signature else Confidence.NONE

    def objects(self, start: Start) -> Iterator[dict[str, Any]]:
        """Those of the first lines; an empty one for a line that has none."""
        return islice((json_object(line) for line in start.lines if line.strip()), LOOKED_AT)

    def rows(self, path: Path, notes: Notes) -> Rows:
        return json_rows(path, notes)
