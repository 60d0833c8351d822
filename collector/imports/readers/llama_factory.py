from __future__ import annotations

from binade.collector.imports.readers.json_lines import JsonLines
from binade.collector.imports.readers.series import Window


class LlamaFactory(JsonLines):
    kind = "LLaMA-Factory's trainer_log.jsonl"
    example = "trainer_log.jsonl"
    columns = "`current_steps`, `loss`"
    signature = frozenset({"current_steps", "total_steps"})
    steps = ("current_steps",)
    losses = ("loss",)
    window = Window.INTERVAL
