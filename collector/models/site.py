"""The name of a place in a model whose matrix products can be quantized and recorded, and the words in a module's path.
No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Usual ends of the paths of linear layers, and what collector calls them; a longer end goes first.
WORDS = {
    "c_q": "q",
    "q_lin": "q",
    "query": "q",
    "c_k": "k",
    "k_lin": "k",
    "key": "k",
    "c_v": "v",
    "v_lin": "v",
    "value": "v",
    "out_lin": "proj",
    "attn.c_proj": "proj",
    "attention.dense": "proj",
    "self_attention.dense": "proj",
    "self_attn.dense": "proj",
    "attention.output.dense": "proj",
    "intermediate.dense": "fc1",
    "dense_h_to_4h": "fc1",
    "lin1": "fc1",
    "mlp.c_proj": "fc2",
    "output.dense": "fc2",
    "dense_4h_to_h": "fc2",
    "lin2": "fc2",
    "w1": "gate",
    "w3": "up",
    "w2": "fc2",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "qkv_proj": "qkv",
    "query_key_value": "qkv",
    "c_attn": "qkv",
    "o_proj": "proj",
    "out_proj": "proj",
    "gate_proj": "gate",
    "up_proj": "up",
    "gate_up_proj": "fc1",
    "c_fc": "fc1",
    "down_proj": "fc2",
    # Meta's and Mistral's Llama, ModernBERT, T5
    "wq": "q",
    "wk": "k",
    "wv": "v",
    "attention.wo": "proj",
    "Wqkv": "qkv",
    "attn.Wo": "proj",
    "Wi": "fc1",
    "mlp.Wo": "fc2",
    "SelfAttention.o": "proj",
    "wi": "fc1",
    "wi_0": "gate",
    "wi_1": "up",
    "DenseReluDense.wo": "fc2",
}
WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "base_layer")


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
        """The names that a recipe may use for it, the most specific first: layer2.expert3.fc1, layer2.fc1, fc1."""
        return tuple(dict.fromkeys((self.name, f"layer{self.layer_index}.{self.module}", self.module)))


HEAD = Site(0, "head")


def path_parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part and part not in WRAPPERS]


def site(name: str, module: str | None = None) -> tuple[Site, str]:
    """The site of a module by its path, and an alternative module name: the path without the layer's number."""
    parts = path_parts(name)
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    number = 0 if at is None else int(parts[at]) + 1
    below = parts if at is None else parts[at + 1 :]
    expert = re.search(r"(?:^|\.)experts\.(\d+)\.", ".".join(below))
    last = below[-1] if below else "linear"
    path = ".".join(part for i, part in enumerate(parts) if i != at) or last
    if module == "core":
        path = f"{path}.core"
    lora = next((i for i, part in enumerate(below) if part.startswith("lora_")), len(below))
    ends = (".".join(below[start:lora]) for start in range(lora))
    word = next((WORDS[end] for end in ends if end in WORDS), below[lora - 1] if lora else last)
    word = ".".join((word, *(part for part in below[lora:] if part != "default")))
    return Site(number, module or word, int(expert[1]) if expert else None), path
