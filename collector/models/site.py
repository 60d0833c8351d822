"""The name of a place in a model whose matrix products can be quantized and recorded, and the words in a module's path.
No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from binade.data.run.tensor_kinds import OF_ROUTER, ROUTER, SCALAR_GATE

# Usual ends of the paths of linear layers, and what collector calls them; a longer end goes first.
_ENDS = {
    "q": ("c_q", "q_lin", "query", "q_proj", "wq"),
    "k": ("c_k", "k_lin", "key", "k_proj", "wk"),
    "v": ("c_v", "v_lin", "value", "v_proj", "wv"),
    "proj": (
        *("o_proj", "out_proj", "out_lin", "attn.c_proj", "attn.Wo", "attention.wo", "SelfAttention.o"),
        *("attention.dense", "self_attention.dense", "self_attn.dense", "attention.output.dense"),
    ),
    "fc1": ("intermediate.dense", "dense_h_to_4h", "lin1", "gate_up_proj", "c_fc", "fc_in", "input_linear", "Wi", "wi"),
    "fc2": (
        *("mlp.c_proj", "output.dense", "dense_4h_to_h", "lin2", "w2", "down_proj", "mlp.Wo", "DenseReluDense.wo"),
        *("fc_out", "output_linear"),
    ),
    "gate": ("w1", "gate_proj", "wi_0"),
    "up": ("w3", "up_proj", "wi_1"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv"),
}
WORDS = {end: word for word, ends in _ENDS.items() for end in ends}
# Where Megatron's GPTModel has our linear layers within a layer.
_MEGATRON = {
    **{module: f"self_attention.linear_{module}" for module in ("qkv", "proj")},
    **{module: f"self_attention.linear_{module}_proj" for module in ("q", "q_down", "q_up", "kv_down", "kv_up")},
    **{module: f"mlp.linear_{module}" for module in ("fc1", "fc2")},
    **{f"shared_{module}": f"mlp.shared_experts.linear_{module}" for module in ("fc1", "fc2")},
}
# Layers of other models that are parts of one in GPTModel, where they could be.
SEPARATE = {"k": "self_attention.k", "v": "self_attention.v", "gate": "mlp.gate", "up": "mlp.up"}
MTP = "mtp"  # the tower of multi-token prediction
WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "base_layer")


@dataclass(frozen=True)
class Site:
    """layer_index counts from 1. module is qkv, proj, fc1, fc2, core, router, shared_fc1, shared_fc2, or MLA's q,
    q_down, q_up, kv_down, kv_up. expert is the index of a routed expert, from 0. tower is the list of blocks that
    counts the layer, in a model with several, such as vision, audio, text, encoder, decoder and mtp."""

    layer_index: int
    module: str
    expert: int | None = None
    tower: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """layer1.qkv, layer1.core, layer2.expert3.fc1"""
        expert = "" if self.expert is None else f"expert{self.expert}."
        return f"layer{self.layer_index}.{expert}{self.module}"

    @property
    def is_router(self) -> bool:
        """Whether the layer chooses among experts; in a model of several towers, other words precede."""
        return self.module.rpartition(".")[2] == "router"

    @property
    def is_of_router(self) -> bool:
        """Whether the part `router` of a recipe covers the layer: a router, or a gate with one output."""
        return re.search(OF_ROUTER, self.module) is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a recipe may use for it, the most specific first: layer2.expert3.fc1, layer2.fc1, fc1."""
        return tuple(dict.fromkeys((self.name, f"layer{self.layer_index}.{self.module}", self.module)))

    @property
    def megatron_paths(self) -> tuple[str, ...]:
        """The paths that the linear layer may have in Megatron's GPTModel; none if it is not known there."""
        expert = None if self.expert is None else str(self.expert)
        return megatron_paths(str(self.layer_index - 1), self.module, expert)


HEAD = Site(0, "head")


def megatron_paths(layer: str, module: str, expert: str | None) -> tuple[str, ...]:
    """The paths of a linear layer in Megatron's GPTModel, where layers count from 0. An expert is a part of a grouped
    GEMM or a module of its own."""
    path = (_MEGATRON | SEPARATE).get(module, "")
    if expert is not None:
        paths = [path.replace("mlp.", f"mlp.experts.{prefix}") for prefix in ("", f"local_experts.{expert}.")]
    else:
        paths = [path]
    return tuple(f"decoder.layers.{layer}.{path}" for path in paths if path)


def path_parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part and part not in WRAPPERS]


def site(name: str, module: str | None = None) -> tuple[Site, str]:
    """The site of a module by its path, and an alternative module name: the path without the layer's number."""
    parts = path_parts(name)
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    number = 0 if at is None else int(parts[at]) + 1
    below = parts if at is None else parts[at + 1 :]
    expert = re.search(r"(?:^|\.)experts\.(?:expert_)?(\d+)\.", ".".join(below))
    last = below[-1] if below else "linear"
    path = ".".join(part for i, part in enumerate(parts) if i != at) or last
    if module in ("core", ROUTER, SCALAR_GATE):
        path = f"{path}.{module}"
    lora = next((i for i, part in enumerate(below) if part.startswith("lora_")), len(below))
    ends = (".".join(below[start:lora]) for start in range(lora))
    word = next((WORDS[end] for end in ends if end in WORDS), below[lora - 1] if lora else last)
    word = ".".join(
        (word, *(part for part in below[max(lora, 1) :] if part != "default")) if lora < len(below) else (word,)
    )
    return Site(number, module or word, int(expert[1]) if expert else None), path
