from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from binade.collector.imports.readers.line_log import COLORS
from binade.collector.imports.readers.series import Confidence, Notes, Rows, Start, TableReader
from binade.collector.imports.readers.text import text_lines

ENOUGH = 3  # steps: a sentence may have one


class PrintedLog(TableReader):
    """Lines that print a step and a loss, as most training scripts do. Other readers know more of their tools."""

    kind = "lines with a step and a loss (NeMo, nanoGPT, nanochat, MaxText and others)"
    example = "train.log"
    columns = (
        "`global_step: N`, `step N`, `iteration N/M` or `iter N`; `loss: X`, `train loss X`, `reduced_train_loss=X`"
    )
    steps = ("step",)
    # Of several steps in a line, the first one here counts: NeMo's iteration starts again with each epoch.
    _steps: ClassVar = tuple(
        re.compile(
            rf"(?<![\w/])(?<!total )(?<!max )['\"]?{name}['\"]?\s*[:=]?\s*\[?(\d+)(?:\.0+)?(?=[\s:/,;|\])(}}]|$)", re.I
        )
        for name in ("global_step", "step", "steps", "iteration", "iter")
    )
    _loss: ClassVar = re.compile(
        r"(?<![\w/.-])['\"]?((?:(?:training|train|lm|val|valid|validation|eval|test) )?(?:[a-z_][\w/.-]*)?loss)['\"]?"
        r"(?: train)?(?:\s*[:=]\s*|\s+)([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))(?![\w.])",
        re.I | re.ASCII,
    )

    _validation: ClassVar = re.compile(
        r"\b(?:validat(?:e|ion|ing)|eval(?:uat(?:e|ion|ing))?|val(?:id)?|test(?:ing)?)\b(?=[\s:\])|])", re.I
    )

    def recognize(self, start: Start) -> Confidence:
        rows = [row for line in start.lines if (row := self._row(line)) and self.has_columns(row)]
        return Confidence.COLUMNS if len({row["step"] for row in rows}) >= ENOUGH else Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        for number, line in enumerate(text_lines(path, notes, errors="replace"), 1):
            if row := self._row(line):
                yield f"{path}, line {number}", row

    def _row(self, line: str) -> dict[str, str]:
        """The step and the losses of a line; empty if one of them is missing."""
        line = COLORS.sub("", line) if "\x1b" in line else line
        first = self._loss.search(line) if "loss" in line.lower() else None
        losses = dict(self._loss.findall(line)) if first and not self._validation.search(line, 0, first.start()) else {}
        step = next((match[1] for pattern in self._steps if (match := pattern.search(line))), None)
        return {"step": step, **losses} if losses and step is not None else {}
