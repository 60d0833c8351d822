"""GPT-2: LayerNorms, biases, learned positions and a GELU. Its dropout is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from binade.collector.models.shape import Shape
from binade.collector.models.site import Site
from binade.collector.models.specs import CoreSpec, LinearSpec, NormSpec, Spec, Split

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPT2Shape(Shape):
    """A GPT-2's dimensions. Its checkpoints hold the weights of Conv1D modules: [inputs, outputs], those of queries,
    keys and values in one tensor."""

    model_type = "gpt2"
    fixed: ClassVar = {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    defaults: ClassVar = {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,  # 4 n_embd
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
    aliases: ClassVar = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    modules: ClassVar = {
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "layers": "transformer.h",
        "final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
    }
    unused: ClassVar = (".attn.bias", ".attn.masked_bias")  # masks
    transposed = True
    norm_bias = True
    norm_bytes = 8

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def tables(self) -> dict[str, int]:
        return super().tables | {"position_embedding": self.max_sequence}

    def attention(self, layer: int) -> tuple[Spec, ...]:
        hidden, heads = self.hidden, self.heads
        qkv, core, proj = (Site(layer, module) for module in ("qkv", "core", "proj"))
        return (
            LinearSpec(
                qkv, hidden, 3 * hidden, Split.COLUMN, "self_attention.linear_qkv", {"attn.c_attn": 3 * hidden},
                groups=heads, fused=3, bias=True,
            ),
            CoreSpec(core, heads, heads, self.head_dim, self.head_dim),
            LinearSpec(
                proj, hidden, hidden, Split.ROW, "self_attention.linear_proj", {"attn.c_proj": hidden}, bias=True
            ),
        )  # fmt: skip

    def feed_forward(self, layer: int) -> tuple[LinearSpec, ...]:
        hidden, ffn = self.hidden, self.ffn
        fc1, fc2 = (Site(layer, module) for module in ("fc1", "fc2"))
        return (
            LinearSpec(fc1, hidden, ffn, Split.COLUMN, "mlp.linear_fc1", {"mlp.c_fc": ffn}, bias=True),
            LinearSpec(fc2, ffn, hidden, Split.ROW, "mlp.linear_fc2", {"mlp.c_proj": hidden}, bias=True),
        )

    def norms(self, layer: int) -> tuple[NormSpec, ...]:
        return (
            NormSpec("input_layernorm", self.hidden, "ln_1"),
            NormSpec("pre_mlp_layernorm", self.hidden, "ln_2"),
        )

    def build_norm(self, width: int, *, sequence_parallel: bool = False) -> nn.Module:
        from binade.collector.models.norm import LayerNorm

        return LayerNorm(width, self.norm_eps, sequence_parallel=sequence_parallel)

    def build_positions(self) -> nn.Module:
        from binade.collector.models.positions import LearnedPositions

        return LearnedPositions(self.max_sequence, self.hidden)

    @staticmethod
    def activation(x: Tensor) -> Tensor:
        """The GELU in its approximation by tanh."""
        from torch.nn.functional import gelu

        return gelu(x, approximate="tanh")

    def activation_bytes(self, layer: int) -> int:
        return 8 * self.hidden + 4 * self.ffn

    @property
    def divided(self) -> dict[str, int]:
        return {"heads": self.heads, "feed-forward channels": self.ffn}

    def describe(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}, ffn {self.ffn}, {self.heads} heads, head {self.head_dim}"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        return cls(
            layers=settings["n_layer"],
            hidden=settings["n_embd"],
            ffn=settings["n_inner"] or 4 * settings["n_embd"],
            heads=settings["n_head"],
            vocab=settings["vocab_size"],
            max_sequence=settings["n_positions"],
            norm_eps=settings["layer_norm_epsilon"],
            tied_embedding=settings["tie_word_embeddings"],
        )


# config.json of openai-community/gpt2; the larger ones differ in layers, width and heads of the same size
GPT2 = GPT2Shape(
    layers=12, hidden=768, ffn=3072, heads=12, vocab=50257, max_sequence=1024, norm_eps=1e-5, tied_embedding=True
)
TINY = replace(GPT2, layers=2, hidden=256, ffn=1024, heads=4, vocab=384)

MODELS = {
    name: {"full": replace(GPT2, layers=layers, hidden=hidden, ffn=4 * hidden, heads=hidden // 64), "tiny": TINY}
    for name, layers, hidden in (
        ("gpt2", 12, 768),
        ("gpt2-medium", 24, 1024),
        ("gpt2-large", 36, 1280),
        ("gpt2-xl", 48, 1600),
    )
}
