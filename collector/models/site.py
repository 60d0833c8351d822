"""The name of a place in a model whose matrix products can be quantized and recorded. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """layer_index counts from 1. module is qkv, proj, fc1, fc2, core, router, shared_fc1, shared_fc2, or MLA's q,
    q_down, q_up, kv_down, kv_up. expert is the index of a routed expert, from 0."""

    layer_index: int
    module: str
    expert: int | None = None

    @property
    def name(self) -> str:
        """layer1.qkv, layer1.core, layer2.expert3.fc1"""
        expert = "" if self.expert is None else f"expert{self.expert}."
        return f"layer{self.layer_index}.{expert}{self.module}"

    @property
    def names(self) -> tuple[str, ...]:
        """By which a recipe may name it, the narrowest first: layer2.expert3.fc1, layer2.fc1, fc1."""
        return tuple(dict.fromkeys((self.name, f"layer{self.layer_index}.{self.module}", self.module)))
