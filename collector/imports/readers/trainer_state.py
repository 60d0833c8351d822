from __future__ import annotations

from pathlib import Path

from binade.collector.errors import ConfigError
from binade.collector.imports.readers.series import Confidence, Notes, Rows, Start, TableReader, Window
from binade.collector.imports.readers.text import json_document, json_object


class TrainerState(TableReader):
    """What the Trainer of Hugging Face saves with each checkpoint. Each loss is the mean since the one before it."""

    kind = "trainer_state.json of Hugging Face"
    example = "checkpoint-100/trainer_state.json"
    columns = "`step` and `loss` of `log_history`"
    steps = ("step",)
    losses = ("loss",)
    window = Window.INTERVAL

    def recognize(self, start: Start) -> Confidence:
        if not start.first.lstrip().startswith("{"):
            return Confidence.NONE
        whole = json_object(start.first)  # an object in one line, or the first one of JSON lines
        named = "log_history" in whole if whole else any('"log_history":' in line for line in start.lines)
        return Confidence.SIGNATURE if named else Confidence.NONE

    def rows(self, path: Path, notes: Notes) -> Rows:
        document = json_document(path)
        history = document.get("log_history") if isinstance(document, dict) else None
        if not isinstance(history, list):
            raise ConfigError(f"{path}: expected log_history, a list of what was logged")
        for number, row in enumerate(history):
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, log_history[{number}]: expected an object with step and loss")
            yield f"{path}, log_history[{number}]", row
