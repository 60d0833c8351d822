from __future__ import annotations

import re

from binade.collector.imports.readers.line_log import LineLog


class TorchtitanLog(LineLog):
    """`step:  1  loss:  8.2  grad_norm:  1.4 ...`, in colors or without them. `validate step:` has another loss."""

    kind = "torchtitan's output"
    example = "torchtitan.log"
    columns = "`step: N`, `loss:`"
    step = re.compile(r"(?<!validate )\bstep: +(\d+) ", re.ASCII)
    labels = ((" loss:", "loss"),)
    losses = ("loss",)
