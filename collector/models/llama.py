"""Llama 3: grouped-query attention and a SwiGLU feed-forward in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from binade.collector.models.rope_scaling import Llama3Scaling
from binade.collector.models.shape import RotaryShape
from binade.collector.models.site import Site
from binade.collector.models.specs import CoreSpec, LinearSpec, Split, mlp_linears


@dataclass(frozen=True, kw_only=True)
class LlamaShape(RotaryShape):
    """A Llama's dimensions. kv_heads is the number of groups that share keys and values."""

    model_type = "llama"
    defaults: ClassVar = {
        **RotaryShape.defaults,
        "vocab_size": 32000,
        "num_key_value_heads": None,  # as many as heads
        "head_dim": None,  # hidden_size / heads
    }

    kv_heads: int
    head_dim: int

    def attention(self, layer: int) -> tuple[LinearSpec, CoreSpec, LinearSpec]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        qkv, core, proj = (Site(layer, module) for module in ("qkv", "core", "proj"))
        return (
            LinearSpec(
                qkv, self.hidden, queries + 2 * keys, Split.COLUMN, "self_attention.linear_qkv", rows, self.kv_heads
            ),
            CoreSpec(core, self.heads, self.kv_heads, self.head_dim, self.head_dim),
            LinearSpec(
                proj, queries, self.hidden, Split.ROW, "self_attention.linear_proj", {"self_attn.o_proj": self.hidden}
            ),
        )

    def feed_forward(self, layer: int) -> tuple[LinearSpec, LinearSpec]:
        return mlp_linears(layer, self.hidden, self.ffn)

    def activation_bytes(self, layer: int) -> int:
        return 6 * (self.heads + 2 * self.kv_heads) * self.head_dim + 8 * self.ffn

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    @property
    def divided(self) -> dict[str, int]:
        return {"heads": self.heads, "KV groups": self.kv_heads, "feed-forward channels": self.ffn}

    def describe(self) -> str:
        return (
            f"{self.layers} layers, hidden {self.hidden}, ffn {self.ffn}, {self.heads} heads, "
            f"{self.kv_heads} KV groups, head {self.head_dim}"
        )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        common = cls.common_settings(settings)
        return cls(
            **common,
            kv_heads=settings["num_key_value_heads"] or common["heads"],
            head_dim=settings["head_dim"] or common["hidden"] // common["heads"],
        )


# config.json of meta-llama/Llama-3.1-8B
LLAMA31_8B = LlamaShape(
    layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256, max_sequence=131072,
    rope_theta=500000.0, norm_eps=1e-5, tied_embedding=False, rope_scaling=Llama3Scaling(8.0),
)  # fmt: skip
# config.json of meta-llama/Llama-3.2-1B
LLAMA32_1B = replace(
    LLAMA31_8B, layers=16, hidden=2048, ffn=8192, head_dim=64, tied_embedding=True, rope_scaling=Llama3Scaling(32.0)
)


def _tiny(published: LlamaShape, ffn: int) -> LlamaShape:
    return replace(published, layers=2, hidden=256, ffn=ffn, heads=8, kv_heads=2, head_dim=32, vocab=384)


MODELS = {
    "llama31-8b": {"full": LLAMA31_8B, "tiny": _tiny(LLAMA31_8B, ffn=896)},
    "llama32-1b": {"full": LLAMA32_1B, "tiny": _tiny(LLAMA32_1B, ffn=1024)},
}
