from __future__ import annotations

from binade.collector.imports.readers.json_lines import JsonLinesReader
from binade.collector.imports.readers.series import Window


class MsSwift(JsonLinesReader):
    """ms-swift's log; the steps are texts such as "3/20"."""

    kind = "ms-swift's logging.jsonl"
    example = "logging.jsonl"
    columns = "`global_step/max_steps` as `N/M`, `loss`"
    signature = frozenset({"global_step/max_steps"})
    steps = ("global_step/max_steps",)
    losses = ("loss",)
    window = Window.INTERVAL
