from __future__ import annotations

import re

from binade.collector.imports.readers.line_log import LineLog


class TorchtuneLog(LineLog):
    """`Step 10 | loss:2.3 lr:2e-5 ...`, of DiskLogger."""

    kind = "torchtune's log"
    example = "log_1725000000.txt"
    columns = "`Step N |`, `loss:`"
    step = re.compile(r"^Step (\d+) \|", re.ASCII)
    labels = ((" loss:", "loss"),)
    losses = ("loss",)
