"""A third family of models, as the docs say that one is added: one file, and one line in the registry.

Arcee's AFM: a Llama whose feed-forward has no gate and a squared ReLU. Chosen because transformers has it too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from binade.collector.models.llama import LlamaShape
from binade.collector.models.specs import LinearSpec, mlp_linears

if TYPE_CHECKING:
    from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


@dataclass(frozen=True, kw_only=True)
class ArceeShape(LlamaShape):
    family = "Arcee"
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
