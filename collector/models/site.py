"""Sites: the layers of a model whose products can be quantized and recorded, and what they are called. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from binade.collector.models.shapes import DeepseekShape, Shape


@dataclass(frozen=True)
class Site:
    """Where a layer stands in the model: layer_index counts from 1; module is qkv, proj, fc1, fc2, core, router,
    shared_fc1, shared_fc2, or MLA's q, q_down, q_up, kv_down, kv_up; expert is the index of a routed expert, from 0."""

    layer_index: int
    module: str
    expert: int | None = None

    @property
    def name(self) -> str:
        """layer1.qkv, layer1.core, layer2.expert3.fc1"""
        expert = "" if self.expert is None else f"expert{self.expert}."
        return f"layer{self.layer_index}.{expert}{self.module}"


def sites(shape: Shape) -> tuple[Site, ...]:
    """Every site of a model of that shape, as collector.model builds it, layer by layer."""
    found: list[Site] = []
    for layer in range(1, shape.layers + 1):
        found += [Site(layer, module) for module in (*_attention(shape), "core", "proj")]
        if isinstance(shape, DeepseekShape) and layer > shape.dense_layers:
            experts = range(shape.routed_experts)
            found.append(Site(layer, "router"))
            found += [Site(layer, module, expert) for expert in experts for module in ("fc1", "fc2")]
            found += [Site(layer, "shared_fc1"), Site(layer, "shared_fc2")]
        else:
            found += [Site(layer, "fc1"), Site(layer, "fc2")]
    return tuple(found)


def _attention(shape: Shape) -> tuple[str, ...]:
    """The linear layers before the attention core."""
    if not isinstance(shape, DeepseekShape):
        return ("qkv",)
    return (*(("q",) if shape.q_lora_rank is None else ("q_down", "q_up")), "kv_down", "kv_up")
