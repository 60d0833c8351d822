"""Further families of models, as the docs say that one is added: one file, and one line in the registry.

Arcee's AFM: a Llama whose feed-forward has no gate and a squared ReLU. Mixtral: a Llama with a mixture of experts.
Chosen because transformers has them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Self

from binade.collector.models.llama import LlamaShape
from binade.collector.models.site import Site
from binade.collector.models.specs import LinearSpec, Split, mlp_linears

if TYPE_CHECKING:
    from torch import Tensor, nn

    from binade.collector.ranks import RankGroup


def squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


@dataclass(frozen=True, kw_only=True)
class ArceeShape(LlamaShape):
    model_type = "arcee"
    fixed: ClassVar = {**LlamaShape.fixed, "hidden_act": "relu2"}
    activation = staticmethod(squared_relu)

    def feed_forward(self, layer: int) -> tuple[LinearSpec, LinearSpec]:
        return mlp_linears(layer, self.hidden, self.ffn, gated=False)

    def activation_bytes(self, layer: int) -> int:
        return super().activation_bytes(layer) - 4 * self.ffn  # two bfloat16 tensors, SwiGLU keeps four


TINY = ArceeShape(
    layers=2,
    hidden=128,
    ffn=384,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=320,
    max_sequence=4096,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tied_embedding=False,
)
# The defaults of transformers' ArceeConfig
FULL = replace(TINY, layers=32, hidden=2560, ffn=18432, heads=32, kv_heads=32, head_dim=80, vocab=32000)

MODELS = {"arcee": {"full": FULL, "tiny": TINY}}


@dataclass(frozen=True, kw_only=True)
class MixtralShape(LlamaShape):
    """A Llama with a mixture of experts in every layer: the chosen experts' weights sum to 1, and none is shared."""

    model_type = "mixtral"
    experts: int
    experts_per_token: int

    def feed_forward(self, layer: int) -> tuple[LinearSpec, ...]:
        moe, share = "block_sparse_moe", Fraction(self.experts_per_token, self.experts)
        gate = {f"{moe}.gate": self.experts}
        router = LinearSpec(Site(layer, "router"), self.hidden, self.experts, Split.REPLICATED, "mlp.router", gate)
        linears = [router]
        for index in range(self.experts):
            fc1, fc2 = mlp_linears(layer, self.hidden, self.ffn, path=f"mlp.experts.{index}", expert=index, share=share)
            names = [f"{moe}.experts.{index}.{name}" for name in ("w1", "w3", "w2")]
            gate_up, down = dict.fromkeys(names[:2], self.ffn), {names[2]: self.hidden}
            linears += [replace(fc1, tensors=gate_up), replace(fc2, tensors=down)]
        return tuple(linears)

    def build_feed_forward(self, layer: int, group: RankGroup) -> nn.Module:
        from binade.collector.models.feedforward import MixtureOfExperts

        return MixtureOfExperts(self.feed_forward(layer), self.route, self.activation, group)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, chosen = logits.softmax(-1).topk(self.experts_per_token, -1)
        return weights / weights.sum(-1, keepdim=True), chosen, logits.new_zeros(())

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        kv_heads, head_dim = settings["num_key_value_heads"], settings["head_dim"]
        experts, chosen = settings["num_local_experts"], settings["num_experts_per_tok"]
        common = cls.common_settings(settings)
        return cls(**common, kv_heads=kv_heads, head_dim=head_dim, experts=experts, experts_per_token=chosen)


MIXTRAL = MixtralShape(**vars(TINY) | {"experts": 4, "experts_per_token": 2})
