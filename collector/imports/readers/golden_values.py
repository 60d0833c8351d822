from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from binade.collector.errors import ConfigError
from binade.collector.imports.readers.series import Confidence, Notes, Rows, Start, TableReader, Window
from binade.collector.imports.readers.text import json_document


class GoldenValues(TableReader):
    """The values that Megatron's tests expect, from TensorBoard: the loss of every n-th iteration, not a mean. Tests of
    NeMo-RL have values by step below each name."""

    kind = "Megatron's golden_values.json"
    example = "golden_values_dev.json"
    columns = '`values` of `lm loss`, by step; also `{"train/loss": {"1": X, ...}}` (NeMo-RL)'
    window = Window.ONE
    steps = ("step",)
    losses = ("lm loss", "train/loss")
    _by_step: ClassVar = re.compile(r'"train/loss":\s*\{\s*"\d+":', re.ASCII)

    def recognize(self, start: Start) -> Confidence:
        text = "\n".join(start.lines)
        of_megatron = all(f'"{key}"' in text for key in ("lm loss", "start_step", "values"))
        signature = text.lstrip().startswith("{") and (of_megatron or self._by_step.search(text))
        return Confidence.SIGNATURE if signature else Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        document = json_document(path)
        for metric, about in document.items() if isinstance(document, dict) else ():
            if not isinstance(about, dict):
                raise ConfigError(f"{path}, {metric[:80]}: expected start_step, step_interval and values")
            for step, value in _values(path, metric, about):
                yield f"{path}, {metric[:80]}, step {str(step)[:40]}", {"step": step, metric: value}


def _values(path: Path, metric: str, about: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The values by step: older files have a list of them."""
    values = about.get("values", about if about and all(map(str.isdecimal, about)) else None)
    if isinstance(values, dict):
        yield from values.items()
    elif isinstance(values, list) and all(type(about.get(key)) is int for key in ("start_step", "step_interval")):
        yield from ((about["start_step"] + n * about["step_interval"], value) for n, value in enumerate(values))
    else:
        raise ConfigError(f"{path}, {metric[:80]}: expected values by step, or a list with start_step, step_interval")
