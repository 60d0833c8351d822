from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from binade.collector.imports.readers.line_log import COLORS
from binade.collector.imports.readers.series import Confidence, Notes, Rows, Start, TableReader
from binade.collector.imports.readers.text import text_lines


class OlmoLog(TableReader):
    """`[step=10/1000,epoch=1,eta=...]`, and its metrics in the lines below it: `    train/CE loss=2.3`."""

    kind = "OLMo's output"
    example = "olmo.log"
    columns = "`[step=N/M,...]`, then `train/CE loss=`"
    steps = ("step",)
    losses = ("train/ce loss", "train/crossentropyloss")
    _step: ClassVar = re.compile(r"\[step=([\d,]+?)/[\d,]+[,\]]", re.ASCII)
    _metric: ClassVar = re.compile(r"^\s+(train/(?:CE loss|CrossEntropyLoss))=(\S*)")

    def recognize(self, start: Start) -> Confidence:
        lines = [COLORS.sub("", line) for line in start.lines]
        signature = any(map(self._step.search, lines)) and any(map(self._metric.search, lines))
        return Confidence.SIGNATURE if signature else Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        step = None
        for number, line in enumerate(text_lines(path, notes, errors="replace"), 1):
            line = COLORS.sub("", line)
            if match := self._step.search(line):
                step = match[1].replace(",", "")
            elif match := self._metric.match(line):
                try:
                    value = float(match[2].replace(",", ""))
                except ValueError:
                    notes.damaged.append(f"line {number}: expected a number after {match[1]!r}")
                    continue
                if step is not None:
                    yield f"{path}, line {number}", {"step": step, match[1]: value}
