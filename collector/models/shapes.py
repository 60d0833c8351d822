"""The models' dimensions: frozen dataclasses, one an architecture, and MODELS with the published values. No torch.

A full model has the published numbers. A tiny one keeps the architecture and the ratios of its widths, these rounded to
whole blocks of 32 where the published ones are, has fewer experts, and a vocabulary that holds the byte tokenizer's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rotary frequencies for long texts: wavelengths beyond original / low_frequency are stretched by
    `factor`, those below original / high_frequency are kept, those between are interpolated."""

    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original: int = 8192


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): dimensions that turn fewer than beta_slow times in the original context are stretched by
    `factor`, those that turn more than beta_fast times are kept. mscale and mscale_all_dim temper the attention."""

    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    original: int

    @property
    def rotary_scale(self) -> float:
        """What cos and sin are multiplied by."""
        return self._temper(self.mscale) / self._temper(self.mscale_all_dim)

    @property
    def softmax_scale(self) -> float:
        """What the attention scores are multiplied by, beside 1 / √d."""
        return self._temper(self.mscale_all_dim) ** 2

    def _temper(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


RotaryScaling = Llama3Scaling | YarnScaling | None


@dataclass(frozen=True)
class ModelShape:
    """A Llama's dimensions. ffn is the width of one SwiGLU branch, kv_heads the groups that share keys and values."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_sequence: int
    rope_theta: float
    norm_eps: float
    tied_embedding: bool
    rope_scaling: Llama3Scaling | None = None

    @property
    def rotary_dim(self) -> int:
        """How much of a head is rotated by position."""
        return self.head_dim

    @property
    def divided(self) -> dict[str, int]:
        """What tensor parallelism divides, and the number of each."""
        return {"heads": self.heads, "KV groups": self.kv_heads, "feed-forward channels": self.ffn}

    @property
    def parameters(self) -> int:
        """Number of weights."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied_embedding else 2)

    def describe(self) -> str:
        return (
            f"{self.layers} layers, hidden {self.hidden}, ffn {self.ffn}, {self.heads} heads, "
            f"{self.kv_heads} KV groups, head {self.head_dim}"
        )


@dataclass(frozen=True)
class DeepseekShape:
    """A DeepSeek-V2's dimensions: multi-head latent attention, and a mixture of experts after the first dense layers.

    qk_nope, qk_rope   of a query or key head, the parts without and with position
    kv_lora_rank       width of the latent that keys and values are expanded from; q_lora_rank likewise, None for none
    expert_ffn         width of one SwiGLU branch of an expert; shared experts are one MLP of shared_experts times it
    routed_scale       what the chosen experts' probabilities are multiplied by (they are not normalized)
    balance_alpha      weight of the load-balancing loss in the training loss
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    qk_nope: int
    qk_rope: int
    v_head: int
    kv_lora_rank: int
    q_lora_rank: int | None
    dense_layers: int
    routed_experts: int
    experts_per_token: int
    shared_experts: int
    expert_ffn: int
    routed_scale: float
    balance_alpha: float
    vocab: int
    max_sequence: int
    rope_theta: float
    norm_eps: float
    tied_embedding: bool
    rope_scaling: YarnScaling | None = None

    @property
    def head_dim(self) -> int:
        """Of a query or key head."""
        return self.qk_nope + self.qk_rope

    @property
    def kv_heads(self) -> int:
        """Every head has a key and a value of its own."""
        return self.heads

    @property
    def rotary_dim(self) -> int:
        """How much of a head is rotated by position."""
        return self.qk_rope

    @property
    def divided(self) -> dict[str, int]:
        """What tensor parallelism divides, and the number of each."""
        widths = {"feed-forward channels": self.ffn, "channels of an expert": self.expert_ffn}
        return {"heads": self.heads, **widths}

    @property
    def parameters(self) -> int:
        """Number of weights."""
        query_width = self.heads * self.head_dim
        if self.q_lora_rank is None:
            query = self.hidden * query_width
        else:
            query = self.q_lora_rank * (self.hidden + 1 + query_width)
        latent = self.hidden * (self.kv_lora_rank + self.qk_rope) + self.kv_lora_rank
        expanded = self.kv_lora_rank * self.heads * (self.qk_nope + self.v_head)
        attention = query + latent + expanded + self.heads * self.v_head * self.hidden
        dense = 3 * self.hidden * self.ffn
        experts = (self.routed_experts + self.shared_experts) * 3 * self.hidden * self.expert_ffn
        mixture = experts + self.routed_experts * self.hidden
        first = min(self.dense_layers, self.layers)
        layers = self.layers * (attention + 2 * self.hidden) + first * dense + (self.layers - first) * mixture
        return layers + self.hidden + self.vocab * self.hidden * (1 if self.tied_embedding else 2)

    def describe(self) -> str:
        return (
            f"{self.layers} layers ({min(self.dense_layers, self.layers)} dense), hidden {self.hidden}, "
            f"ffn {self.ffn}, {self.heads} heads, QK head {self.head_dim}, V head {self.v_head}, "
            f"KV latent {self.kv_lora_rank}, {self.routed_experts} experts of {self.expert_ffn}, "
            f"{self.experts_per_token} a token, {self.shared_experts} shared"
        )


Shape = ModelShape | DeepseekShape

LLAMA_31 = Llama3Scaling(8.0)
LLAMA_32 = Llama3Scaling(32.0)
DEEPSEEK_V2 = YarnScaling(40.0, beta_fast=32.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707, original=4096)

MODELS: dict[str, dict[str, Shape]] = {
    # config.json of meta-llama/Llama-3.1-8B
    "llama31-8b": {
        "full": ModelShape(32, 4096, 14336, 32, 8, 128, 128256, 131072, 500000.0, 1e-5, False, LLAMA_31),
        "tiny": ModelShape(2, 256, 896, 8, 2, 32, 384, 131072, 500000.0, 1e-5, False, LLAMA_31),
    },
    # config.json of meta-llama/Llama-3.2-1B
    "llama32-1b": {
        "full": ModelShape(16, 2048, 8192, 32, 8, 64, 128256, 131072, 500000.0, 1e-5, True, LLAMA_32),
        "tiny": ModelShape(2, 256, 1024, 8, 2, 32, 384, 131072, 500000.0, 1e-5, True, LLAMA_32),
    },
    # config.json of deepseek-ai/DeepSeek-V2-Lite
    "deepseek2_lite": {
        "full": DeepseekShape(
            layers=27,
            hidden=2048,
            ffn=10944,
            heads=16,
            qk_nope=128,
            qk_rope=64,
            v_head=128,
            kv_lora_rank=512,
            q_lora_rank=None,
            dense_layers=1,
            routed_experts=64,
            experts_per_token=6,
            shared_experts=2,
            expert_ffn=1408,
            routed_scale=1.0,
            balance_alpha=0.001,
            vocab=102400,
            max_sequence=163840,
            rope_theta=10000.0,
            norm_eps=1e-6,
            tied_embedding=False,
            rope_scaling=DEEPSEEK_V2,
        ),
        "tiny": DeepseekShape(
            layers=2,
            hidden=256,
            ffn=1376,
            heads=8,
            qk_nope=32,
            qk_rope=16,
            v_head=32,
            kv_lora_rank=64,
            q_lora_rank=None,
            dense_layers=1,
            routed_experts=16,
            experts_per_token=2,
            shared_experts=1,
            expert_ffn=192,
            routed_scale=1.0,
            balance_alpha=0.001,
            vocab=384,
            max_sequence=163840,
            rope_theta=10000.0,
            norm_eps=1e-6,
            tied_embedding=False,
            rope_scaling=DEEPSEEK_V2,
        ),
    },
}
