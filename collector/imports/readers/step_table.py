from __future__ import annotations

import math
from pathlib import Path

from binade.collector.errors import ConfigError
from binade.collector.imports.readers.series import LOSSES, STEPS, Confidence, Notes, Rows, Start, TableReader, Window
from binade.collector.imports.readers.text import text_lines

MOST_FACTS = 12


class StepTable(TableReader):
    """Columns between spaces under a line that names them, `# step loss grad_norm`, as torchtitan's comparisons write
    them: the loss of each step."""

    kind = "a table with spaces (torchtitan)"
    example = "torchtitan_mxfp8.txt"
    columns = "`# step loss grad_norm`, then a row for each step"
    window = Window.ONE

    def recognize(self, start: Start) -> Confidence:
        for line, below in zip(start.lines, start.lines[1:], strict=False):
            if (names := _names(line)) and len(below.split()) == len(names) and all(map(_is_number, below.split())):
                return Confidence.SIGNATURE
        return Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        header: list[str] | None = None
        for number, line in enumerate(text_lines(path, notes), 1):
            place = f"{path}, line {number}"
            if header is None:
                header = _names(line)
                if header is None and line.startswith("#") and len(notes.facts) < MOST_FACTS:
                    notes.facts.append(line.strip("# \r\n")[:200])
            elif line.strip() and not line.startswith("#"):
                cells = line.split()
                if len(cells) != len(header):
                    raise ConfigError(f"{place}: there are {len(cells)} values: expected {len(header)}")
                yield place, dict(zip(header, cells, strict=True))


def _names(line: str) -> list[str] | None:
    """The columns that a line names, if a step and a loss are among them, and each once."""
    names = line.lstrip("#").split()
    lower = {name.lower() for name in names}
    return names if len(lower) == len(names) and lower & {*STEPS} and lower & {*LOSSES} else None


def _is_number(text: str) -> bool:
    try:
        return not math.isinf(float(text)) or "inf" in text.lower()
    except ValueError:
        return False
