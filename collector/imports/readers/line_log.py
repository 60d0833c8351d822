"""Text logs in which a line states an iteration and its losses, among any other lines."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from binade.collector.imports.readers.series import Confidence, Notes, Rows, Start, TableReader, Window
from binade.collector.imports.readers.text import text_lines

COLORS = re.compile(r"\x1b\[[0-9;]*m")


@cache
def _number(end: str) -> re.Pattern[str]:
    """Finds a loss that is followed by `end`."""
    return re.compile(rf"\s*([^\s|,]+)\s*?{end}")


class LineLog(TableReader):
    """A reader of such a log.

    step    finds the iteration, its group 1
    labels  what stands before each loss, after the iteration, and the loss's name; the names are `losses`
    end     what follows a loss
    """

    step: ClassVar[re.Pattern[str]]
    labels: ClassVar[tuple[tuple[str, str], ...]]
    end: ClassVar[str] = r"(?:\s|$)"
    steps = ("step",)
    window = Window.ONE

    def recognize(self, start: Start) -> Confidence:
        signature = any(values for line in start.lines for _, values, _ in [self._parse(line)])
        return Confidence.SIGNATURE if signature else Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        for number, line in enumerate(text_lines(path, notes, errors="replace"), 1):
            step, values, damaged = self._parse(line)
            notes.damaged += [f"line {number}: expected a number after {label!r}" for label in damaged]
            if values:
                yield f"{path}, line {number}", {"step": step, **values}

    def _parse(self, line: str) -> tuple[str, dict[str, Any], list[str]]:
        """The iteration, the losses by name, and the labels without a number."""
        line = COLORS.sub("", line) if "\x1b" in line else line
        values: dict[str, Any] = {}
        damaged: list[str] = []
        if not (step := self.step.search(line)):
            return "", values, damaged
        for label, name in self.labels:
            if (at := line.find(label, step.end())) < 0:
                continue
            number = _number(self.end).match(line, at + len(label))
            try:
                values[name] = float(number[1]) if number else float("no number")
            except ValueError:
                damaged.append(label.strip())
        return step[1], values, damaged
