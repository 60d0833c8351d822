"""Every model by name and size, one line for each family. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from binade.collector.models import deepseek, gpt2, llama
from binade.collector.models.shape import Shape

MODELS: dict[str, Mapping[str, Shape]] = {
    **llama.MODELS,
    **deepseek.MODELS,
    **gpt2.MODELS,
}
