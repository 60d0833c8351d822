from __future__ import annotations

import re

from binade.collector.imports.readers.line_log import LineLog


class LlmcLog(LineLog):
    """`s:10 trl:5.2 lr:1e-4 norm:1.2`; `tel`, the loss of the validation data, is read if there is no `trl`."""

    kind = "llm.c's main.log"
    example = "main.log"
    columns = "`s:N`, `trl:`, or `tel:` (validation) alone"
    step = re.compile(r"^s:(\d+) ", re.ASCII)
    labels = (("trl:", "trl"), ("tel:", "tel"))
    losses = ("trl", "tel")
