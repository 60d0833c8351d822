from __future__ import annotations

from binade.collector.imports.readers.json_lines import JsonLinesReader
from binade.collector.imports.readers.series import Confidence, Start, Window


class MsSwiftMegatron(JsonLinesReader):
    """The log of ms-swift's Megatron trainer, whose `iteration` is a text such as "3/20"."""

    kind = "ms-swift's logging.jsonl (Megatron)"
    example = "logging.jsonl"
    columns = "`iteration` as `N/M`, `loss` or `lm loss`"
    steps = ("iteration",)
    losses = ("loss", "lm loss")
    window = Window.INTERVAL

    def recognize(self, start: Start) -> Confidence:
        texts = (str(row.get("iteration")) for row in self.objects(start) if self.has_columns(row))
        return Confidence.SIGNATURE if any("/" in text for text in texts) else Confidence.NONE
