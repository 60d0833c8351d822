from __future__ import annotations

import re

from binade.collector.imports.readers.line_log import LineLog
from binade.collector.imports.readers.series import Window


class MegatronLog(LineLog):
    """` iteration 10/ 5000 | ... | lm loss: 1.09E+01 | ...`, the mean of the iterations since the last such line."""

    kind = "Megatron's output"
    example = "megatron.log"
    columns = "`iteration N/ M`, `lm loss:`"
    window = Window.INTERVAL
    step = re.compile(r"\biteration +(\d+)/ *\d+ \|", re.ASCII)
    labels = (("| lm loss:", "lm loss"),)
    losses = ("lm loss",)
    end = r"\|"
