"""DeepSeek-V2: multi-head latent attention, and a mixture of experts after the first dense layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Self

from binade.collector.models.rope_scaling import YarnScaling
from binade.collector.models.shape import RotaryShape
from binade.collector.models.site import Site
from binade.collector.models.specs import CoreSpec, LinearSpec, NormSpec, Spec, Split, mlp_linears

if TYPE_CHECKING:
    from torch import Tensor, nn

    from binade.collector.models.attention import LatentAttention
    from binade.collector.ranks import RankGroup

LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeepseekShape(RotaryShape):
    """A DeepSeek-V2's dimensions.

    qk_nope, qk_rope   the parts of a query or key head without and with position
    kv_lora_rank       width of the latent that keys and values are expanded from; q_lora_rank likewise, None for none
    expert_ffn         width of one SwiGLU branch of an expert; the shared experts are one MLP of shared_experts times
                       this width
    routed_scale       what the chosen experts' probabilities are multiplied by (they are not normalized)
    balance_alpha      weight of the load-balancing loss in the training loss
    """

    model_type = "deepseek_v2"
    fixed: ClassVar = {
        **RotaryShape.fixed,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
    }
    defaults: ClassVar = {
        **RotaryShape.defaults,
        "vocab_size": 102400,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
    }
    aliases: ClassVar = {"num_experts": "n_routed_experts"}

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

    @property
    def head_dim(self) -> int:
        """The width of a query or key head."""
        return self.qk_nope + self.qk_rope

    def attention(self, layer: int) -> tuple[Spec, ...]:
        hidden, latent, queries = self.hidden, self.kv_lora_rank, self.heads * self.head_dim

        def linear(module: str, inputs: int, outputs: int, split: Split, tensor: str) -> LinearSpec:
            path, tensors = f"self_attention.linear_{module}", {f"self_attn.{tensor}": outputs}
            return LinearSpec(Site(layer, module), inputs, outputs, split, path, tensors)

        if self.q_lora_rank is None:
            query = [linear("q", hidden, queries, Split.COLUMN, "q_proj")]
        else:
            query = [
                linear("q_down", hidden, self.q_lora_rank, Split.REPLICATED, "q_a_proj"),
                linear("q_up", self.q_lora_rank, queries, Split.COLUMN, "q_b_proj"),
            ]
        return (
            *query,
            linear("kv_down", hidden, latent + self.qk_rope, Split.REPLICATED, "kv_a_proj_with_mqa"),
            linear("kv_up", latent, self.heads * (self.qk_nope + self.v_head), Split.COLUMN, "kv_b_proj"),
            CoreSpec(Site(layer, "core"), self.heads, self.heads, self.head_dim, self.v_head),
            linear("proj", self.heads * self.v_head, hidden, Split.ROW, "o_proj"),
        )

    def norms(self, layer: int) -> tuple[NormSpec, ...]:
        widths = {"kv": self.kv_lora_rank} | ({} if self.q_lora_rank is None else {"q": self.q_lora_rank})
        return (
            *super().norms(layer),
            *(
                NormSpec(f"self_attention.{name}_layernorm", width, f"self_attn.{name}_a_layernorm")
                for name, width in widths.items()
            ),
        )

    def feed_forward(self, layer: int) -> tuple[LinearSpec, ...]:
        """The dense MLP, or the router, the experts one after the other, and the shared experts."""
        if layer <= self.dense_layers:
            return mlp_linears(layer, self.hidden, self.ffn)
        experts, share = self.routed_experts, Fraction(self.experts_per_token, self.routed_experts)
        gate = {"mlp.gate": experts}
        return (
            LinearSpec(Site(layer, "router"), self.hidden, experts, Split.REPLICATED, "mlp.router", gate),
            *(
                spec
                for index in range(experts)
                for spec in mlp_linears(
                    layer, self.hidden, self.expert_ffn, path=f"mlp.experts.{index}", expert=index, share=share
                )
            ),
            *mlp_linears(
                layer, self.hidden, self.shared_experts * self.expert_ffn, path="mlp.shared_experts", prefix="shared_"
            ),
        )

    def build_attention(self, layer: int, group: RankGroup) -> LatentAttention:
        from binade.collector.models.attention import LatentAttention

        scale = (self.rope_scaling.softmax_scale if self.rope_scaling else 1.0) / math.sqrt(self.head_dim)
        return LatentAttention(self.attention(layer), scale, self.build_latent_norm, group)

    @staticmethod
    def build_latent_norm(width: int) -> nn.Module:
        """rms_norm_eps is not for the norms of latents: modeling_deepseek.py and transformers leave theirs at 1e-6."""
        from binade.collector.models.norm import RMSNorm

        return RMSNorm(width, LATENT_NORM_EPS)

    def build_feed_forward(self, layer: int, group: RankGroup) -> nn.Module:
        from binade.collector.models.feedforward import MixtureOfExperts

        if layer <= self.dense_layers:
            return super().build_feed_forward(layer, group)
        return MixtureOfExperts(self.feed_forward(layer), self.route, self.activation, group)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Softmax over all experts; the largest are taken greedily and not normalized. As MoEGate in
        modeling_deepseek.py.

        logits [s, b, experts] -> weights and indices of each token's experts [s, b, k], and the balance loss
        """
        probs = logits.softmax(-1)
        weights, chosen = probs.topk(self.experts_per_token, -1)
        return weights * self.routed_scale, chosen, balance_loss(probs, chosen) * self.balance_alpha

    def activation_bytes(self, layer: int) -> int:
        attention = 6 * self.heads * (2 * self.head_dim + self.v_head) + 14 * self.kv_lora_rank
        if layer <= self.dense_layers:
            return attention + 8 * self.ffn
        experts = self.experts_per_token + self.shared_experts
        return attention + 8 * self.expert_ffn * experts + 6 * self.hidden * self.experts_per_token

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope

    @property
    def divided(self) -> dict[str, int]:
        widths = {"feed-forward channels": self.ffn, "channels of an expert": self.expert_ffn}
        return {"heads": self.heads, **widths}

    def describe(self) -> str:
        return (
            f"{self.layers} layers ({min(self.dense_layers, self.layers)} dense), hidden {self.hidden}, "
            f"ffn {self.ffn}, {self.heads} heads, QK head {self.head_dim}, V head {self.v_head}, "
            f"KV latent {self.kv_lora_rank}, {self.routed_experts} experts of {self.expert_ffn}, "
            f"{self.experts_per_token} per token, {self.shared_experts} shared"
        )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        return cls(
            **cls.common_settings(settings),
            qk_nope=settings["qk_nope_head_dim"],
            qk_rope=settings["qk_rope_head_dim"],
            v_head=settings["v_head_dim"],
            kv_lora_rank=settings["kv_lora_rank"],
            q_lora_rank=settings["q_lora_rank"],
            dense_layers=settings["first_k_dense_replace"],
            routed_experts=settings["n_routed_experts"],
            experts_per_token=settings["num_experts_per_tok"],
            shared_experts=settings["n_shared_experts"],
            expert_ffn=settings["moe_intermediate_size"],
            routed_scale=settings["routed_scaling_factor"],
            balance_alpha=settings.get("aux_loss_alpha", 0.0),
        )


def balance_loss(probs: Tensor, chosen: Tensor) -> Tensor:
    """How unevenly tokens are routed, averaged over the sequences: 1 when even. The gradient flows through the
    probabilities only. As MoEGate with seq_aux in DeepSeek-V2-Lite's modeling_deepseek.py.

    probs [s, b, experts], chosen int64 [s, b, k] -> float32 scalar
    """
    _, batch, experts = probs.shape
    picks = chosen.transpose(0, 1).flatten(1)  # [b, s · k]
    counts = probs.new_zeros(batch, experts).scatter_add_(1, picks, probs.new_ones(picks.shape))
    load = counts * experts / picks.shape[1]  # 1 for each expert when even
    return (load * probs.mean(0)).sum(1).mean()


# config.json of deepseek-ai/DeepSeek-V2-Lite
V2_LITE = DeepseekShape(
    layers=27, hidden=2048, ffn=10944, heads=16, vocab=102400, max_sequence=163840, norm_eps=1e-6, tied_embedding=False,
    qk_nope=128, qk_rope=64, v_head=128, kv_lora_rank=512, q_lora_rank=None,
    dense_layers=1, routed_experts=64, experts_per_token=6, shared_experts=2, expert_ffn=1408,
    routed_scale=1.0, balance_alpha=0.001, rope_theta=10000.0,
    rope_scaling=YarnScaling(
        40.0, beta_fast=32.0, beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707, original_max_position_embeddings=4096
    ),
)  # fmt: skip

MODELS = {
    "deepseek2_lite": {
        "full": V2_LITE,
        "tiny": replace(
            V2_LITE, layers=2, hidden=256, ffn=1376, heads=8, vocab=384,
            qk_nope=32, qk_rope=16, v_head=32, kv_lora_rank=64,
            routed_experts=16, experts_per_token=2, shared_experts=1, expert_ffn=192,
        ),
    },
}  # fmt: skip
