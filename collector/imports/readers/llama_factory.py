from __future__ import annotations

from binade.collector.imports.readers.json_lines import JsonLinesReader
from binade.collector.imports.readers.series import Window


class LlamaFactory(JsonLinesReader):
    kind = "LLaMA-Factory's trainer_log.jsonl"
    example = "trainer_log.jsonl"
    columns = "`current_steps`, `loss`"
    signature = frozenset({"current_steps", "total_steps"})
    steps = ("current_steps",)
    losses = ("loss",)
    window = Window.INTERVAL
