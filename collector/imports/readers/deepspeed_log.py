from __future__ import annotations

import re
from pathlib import Path

from binade.collector.errors import ConfigError
from binade.collector.imports.readers.line_log import LineLog
from binade.collector.imports.readers.series import Columns, Confidence, Series, Start


class DeepSpeedLog(LineLog):
    """`steps: 10 loss: 2.31 iter time (s): ...`, of a pipeline. Without one, DeepSpeed logs steps and no losses."""

    kind = "DeepSpeed's output"
    example = "deepspeed.log"
    columns = "`steps: N`, `loss:`, which only pipelines log"
    step = re.compile(r"\bsteps: (\d+) ", re.ASCII)
    labels = (("loss:", "loss"),)
    losses = ("loss",)
    _no_loss = re.compile(r"\[Rank \d+\] step=\d+, skipped=\d+, lr=", re.ASCII)

    def recognize(self, start: Start) -> Confidence:
        if super().recognize(start):
            return Confidence.SIGNATURE
        # Other programs log their losses between DeepSpeed's lines.
        return Confidence.POSSIBLE if any(map(self._no_loss.search, start.lines)) else Confidence.NONE

    def read(self, path: Path, columns: Columns) -> tuple[Series, ...]:
        if super().recognize(Start.of(path)):
            return super().read(path, columns)
        raise ConfigError(
            f"{path} is output of DeepSpeed, which has steps and learning rates but no losses: "
            "give the log of the training script"
        )
