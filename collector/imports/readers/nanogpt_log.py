from __future__ import annotations

import re

from binade.collector.imports.readers.line_log import LineLog


class NanogptLog(LineLog):
    """`step:125/1750 val_loss:4.2 train_time:...`; older versions log `train_loss` too, which comes first."""

    kind = "modded-nanogpt's log"
    example = "0a1b2c.txt"
    columns = "`step:N/M`, `train_loss:`, or `val_loss:` (validation) alone"
    step = re.compile(r"\bstep:(\d+)/\d+ ", re.ASCII)
    labels = (("train_loss:", "train_loss"), ("val_loss:", "val_loss"))
    losses = ("train_loss", "val_loss")
