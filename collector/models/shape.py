"""The description of a family of models. No torch at import.

A family is one module: a Shape, which describes every layer, norm and parameter as data and builds what differs from
the defaults, and MODELS, its published and tiny sizes. Adding a family is that module and its line in `registry`.
Sites, estimates, memory, checkpoints and the model itself use only this description.

A full model has the published numbers. A tiny one keeps the architecture and the ratios of its widths, these rounded to
whole blocks of 32 where the published ones are, has fewer experts, and a vocabulary large enough for the byte
tokenizer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

from binade.collector.models.rope_scaling import RopeScaling, read_scaling, rope_settings
from binade.collector.models.site import HEAD, Site
from binade.collector.models.specs import LinearSpec, NormSpec, OtherSpec, Spec, Split, WeightSpec
from binade.data.run.tensor_kinds import Other, named_places

if TYPE_CHECKING:
    from torch import Tensor, nn

    from binade.collector.ranks import RankGroup


@dataclass(frozen=True, kw_only=True)
class Shape(ABC):
    """The dimensions of a model. Layers are counted from 1. Its norms are RMSNorms unless the family says otherwise.

    ffn           width of a dense feed-forward layer (of one branch, where it is gated)
    model_type    the family's name at Hugging Face
    fixed         settings of a Hugging Face configuration that the family has no switch for, with the only values that
                  it can read
    defaults      what transformers takes for the settings of a Hugging Face configuration that it leaves out; aliases,
                  other names of settings that it reads
    modules       Hugging Face's modules for our embeddings, final norm, LM head and, without their numbers, layers
    unused        ends of the names of tensors that a checkpoint may hold and no model uses
    transposed    whether a checkpoint has the weights of linear layers as [inputs, outputs]
    norm_bias     whether norms have a bias
    norm_bytes    bytes that a norm keeps for each of its values until the backward pass
    """

    model_type: ClassVar[str]
    fixed: ClassVar[Mapping[str, object]]
    defaults: ClassVar[Mapping[str, object]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}
    modules: ClassVar[Mapping[str, str]]
    unused: ClassVar[tuple[str, ...]] = ()
    transposed: ClassVar[bool] = False
    norm_bias: ClassVar[bool] = False
    norm_bytes: ClassVar[int] = 12  # three float32 tensors

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    max_sequence: int
    norm_eps: float
    tied_embedding: bool

    @abstractmethod
    def attention(self, layer: int) -> tuple[Spec, ...]:
        """The linear layers and the core of a layer's attention, in order of computation."""

    @abstractmethod
    def feed_forward(self, layer: int) -> tuple[LinearSpec, ...]:
        """The linear layers of a layer's feed-forward, in order of computation."""

    @abstractmethod
    def build_positions(self) -> nn.Module:
        """The position encoding: x [s, b, hidden] -> the same, and the rotation of queries and keys, see `positions`"""

    def build_attention(self, layer: int, group: RankGroup) -> nn.Module:
        """(x [s, b, hidden], rotation) -> [s, b, hidden]; by default grouped-query attention"""
        from binade.collector.models.attention import SelfAttention

        return SelfAttention(self.attention(layer), group)

    def build_feed_forward(self, layer: int, group: RankGroup) -> nn.Module:
        """x [s, b, hidden] -> the same, or a tuple of it and a loss to be added to the training loss; by default an MLP
        with `activation`"""
        from binade.collector.models.feedforward import MLP

        fc1, fc2 = self.feed_forward(layer)
        return MLP(fc1, fc2, self.activation, group)

    def build_norm(self, width: int, *, sequence_parallel: bool = False) -> nn.Module:
        from binade.collector.models.norm import RMSNorm

        return RMSNorm(width, self.norm_eps, sequence_parallel=sequence_parallel)

    @staticmethod
    def activation(x: Tensor) -> Tensor:
        from binade.collector.models.feedforward import swiglu

        return swiglu(x)

    @abstractmethod
    def activation_bytes(self, layer: int) -> int:
        """Bytes per token that a layer's linear layers keep until the backward pass, without norms and the core."""

    @property
    @abstractmethod
    def divided(self) -> dict[str, int]:
        """The dimensions that tensor parallelism divides, with their sizes."""

    @abstractmethod
    def describe(self) -> str: ...

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """The dimensions in a Hugging Face config.json. Raises KeyError, TypeError or ValueError."""

    def norms(self, layer: int) -> tuple[NormSpec, ...]:
        return (
            NormSpec("input_layernorm", self.hidden, "input_layernorm"),
            NormSpec("pre_mlp_layernorm", self.hidden, "post_attention_layernorm"),
        )

    @property
    def tables(self) -> dict[str, int]:
        """The embeddings and the LM head, whole on every tensor-parallel rank, with their rows of `hidden` weights."""
        return {"embedding": self.vocab} | ({} if self.tied_embedding else {"output_layer": self.vocab})

    def linears(self, layer: int) -> tuple[LinearSpec, ...]:
        return tuple(
            spec for spec in (*self.attention(layer), *self.feed_forward(layer)) if isinstance(spec, LinearSpec)
        )

    def specs(self) -> tuple[Spec, ...]:
        """The products that can be quantized and recorded, layer by layer."""
        return _specs(self)

    def sites(self) -> tuple[Site, ...]:
        return tuple(spec.site for spec in self.specs())

    def weights(self) -> tuple[WeightSpec, ...]:
        """The parameters of GPTModel(self)."""
        return _weights(self)

    def others(self) -> tuple[OtherSpec, ...]:
        """The other parts that can be recorded."""
        return _others(self)

    def recordable(self, tensors: Collection[str] = ()) -> tuple[Spec | OtherSpec, ...]:
        """The parts that can be recorded, and selected by layer and module, if these tensors are named."""
        named = named_places(tensors)
        return (*self.specs(), *(spec for spec in self.others() if spec.layer_type in named))

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(weight.size) for weight in self.weights())


@dataclass(frozen=True, kw_only=True)
class RotaryShape(Shape):
    """The dimensions of a model with rotary positions. Its settings and modules have Llama's names at Hugging Face."""

    fixed: ClassVar[Mapping[str, object]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "attention_dropout": 0.0,
        "sliding_window": None,
    }
    defaults: ClassVar[Mapping[str, object]] = {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    modules: ClassVar = {
        "embedding": "model.embed_tokens",
        "layers": "model.layers",
        "final_layernorm": "model.norm",
        "output_layer": "lm_head",
    }
    unused: ClassVar = (".rotary_emb.inv_freq",)  # buffers of old checkpoints

    rope_theta: float
    rope_scaling: RopeScaling | None = None

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """The size of the part of a head that is rotated by position."""

    def build_positions(self) -> nn.Module:
        from binade.collector.models.positions import RotaryPositions

        return RotaryPositions(self.rotary_dim, self.rope_theta, self.rope_scaling)

    @staticmethod
    def common_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of every such family, read from a Hugging Face config.json."""
        return {
            "layers": settings["num_hidden_layers"],
            "hidden": settings["hidden_size"],
            "ffn": settings["intermediate_size"],
            "heads": settings["num_attention_heads"],
            "vocab": settings["vocab_size"],
            "max_sequence": settings["max_position_embeddings"],
            "rope_theta": rope_settings(settings)["rope_theta"],
            "norm_eps": settings["rms_norm_eps"],
            "tied_embedding": settings["tie_word_embeddings"],
            "rope_scaling": read_scaling(settings),
        }


@lru_cache(maxsize=32)
def _specs(shape: Shape) -> tuple[Spec, ...]:
    layers = range(1, shape.layers + 1)
    return tuple(spec for layer in layers for spec in (*shape.attention(layer), *shape.feed_forward(layer)))


@lru_cache(maxsize=32)
def _norms(shape: Shape) -> tuple[tuple[Site, str, int, str], ...]:
    """Site, path, width and Hugging Face's path of every norm."""
    layers = [(layer, spec) for layer in range(shape.layers) for spec in shape.norms(layer + 1)]
    theirs = shape.modules
    return (
        *(
            (
                Site(layer + 1, spec.path.rpartition(".")[2]),
                f"layers.{layer}.{spec.path}",
                spec.width,
                f"{theirs['layers']}.{layer}.{spec.tensor}",
            )
            for layer, spec in layers
        ),
        (Site(0, "final_layernorm"), "final_layernorm", shape.hidden, theirs["final_layernorm"]),
    )


@lru_cache(maxsize=32)
def _weights(shape: Shape) -> tuple[WeightSpec, ...]:
    weights = []
    for site, path, width, tensor in _norms(shape):
        norm = WeightSpec(f"{path}.weight", site, (width,), {f"{tensor}.weight": width})
        weights += [norm, norm.bias()] if shape.norm_bias else [norm]
    for spec in (spec for spec in shape.specs() if isinstance(spec, LinearSpec)):
        layer = spec.site.layer_index - 1
        linear = WeightSpec(
            f"layers.{layer}.{spec.path}.weight",
            spec.site,
            (spec.outputs, spec.inputs),
            {f"{shape.modules['layers']}.{layer}.{name}.weight": rows for name, rows in spec.tensors.items()},
            spec.split != Split.REPLICATED,
            spec.groups,
            spec.fused,
            shape.transposed,
        )
        weights += [linear, linear.bias(divided=spec.split == Split.COLUMN)] if spec.bias else [linear]
    for table, rows in shape.tables.items():
        tensors = {f"{shape.modules[table]}.weight": rows}
        weights.append(WeightSpec(f"{table}.weight", Site(0, table), (rows, shape.hidden), tensors))
    return tuple(weights)


@lru_cache(maxsize=32)
def _others(shape: Shape) -> tuple[OtherSpec, ...]:
    return (
        *(OtherSpec(site, Other.NORM, width, tokens=width == shape.hidden) for site, _, width, _ in _norms(shape)),
        *(
            OtherSpec(spec.site, Other.EXPERTS, spec.outputs)
            for spec in shape.specs()
            if isinstance(spec, LinearSpec) and spec.site.module == "router"
        ),
        OtherSpec(HEAD, Other.HEAD, shape.vocab),
        *(
            OtherSpec(weight.site, Other.PARAMETER, weight.size[-1], math.prod(weight.size[:-1]), weight.divided)
            for weight in shape.weights()
        ),
    )
