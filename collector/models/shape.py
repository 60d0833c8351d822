"""The description of a family of models. No torch at import.

A family is one module: a Shape, which describes every layer as data and builds it, and MODELS, its published and tiny
sizes. Adding a family is that module and its line in `registry`. Sites, estimates, memory, checkpoints and the model
itself use only this description.

A full model has the published numbers. A tiny one keeps the architecture and the ratios of its widths, these rounded to
whole blocks of 32 where the published ones are, has fewer experts, and a vocabulary large enough for the byte
tokenizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

from binade.collector.models.rope_scaling import RopeScaling, read_scaling, rope_settings
from binade.collector.models.site import HEAD, Site
from binade.collector.models.specs import LinearSpec, NormSpec, OtherSpec, Spec, Split
from binade.data.tensor_kinds import Other, named_places

if TYPE_CHECKING:
    from torch import nn

    from binade.collector.ranks import Group


@dataclass(frozen=True, kw_only=True)
class Shape(ABC):
    """The dimensions of a model. Layers are counted from 1.

    ffn           width of a dense feed-forward layer (of one branch, where it is gated)
    family        the family's name for people, and its model_type at Hugging Face
    fixed         settings of a Hugging Face configuration that the family has no switch for, with the only values that
                  it can read
    """

    family: ClassVar[str]
    model_type: ClassVar[str]
    fixed: ClassVar[Mapping[str, object]] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "attention_dropout": 0.0,
        "sliding_window": None,
    }

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    max_sequence: int
    rope_theta: float
    norm_eps: float
    tied_embedding: bool
    rope_scaling: RopeScaling | None = None

    @abstractmethod
    def attention(self, layer: int) -> tuple[Spec, ...]:
        """The linear layers and the core of a layer's attention, in order of computation."""

    @abstractmethod
    def feed_forward(self, layer: int) -> tuple[LinearSpec, ...]:
        """The linear layers of a layer's feed-forward, in order of computation."""

    @abstractmethod
    def build_attention(self, layer: int, group: Group) -> nn.Module:
        """(x [s, b, hidden], cos, sin [s, 1, 1, rotary_dim]) -> [s, b, hidden]"""

    @abstractmethod
    def build_feed_forward(self, layer: int, group: Group) -> nn.Module:
        """x [s, b, hidden] -> the same, or a tuple of it and a loss to be added to the training loss"""

    @abstractmethod
    def activation_bytes(self, layer: int) -> int:
        """Bytes per token that a layer's linear layers keep until the backward pass, without norms and the core."""

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """The size of the part of a head that is rotated by position."""

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

    @staticmethod
    def common_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of every family, read from a Hugging Face config.json."""
        return {
            "layers": settings["num_hidden_layers"],
            "hidden": settings["hidden_size"],
            "ffn": settings["intermediate_size"],
            "heads": settings["num_attention_heads"],
            "vocab": settings["vocab_size"],
            "max_sequence": settings["max_position_embeddings"],
            "rope_theta": rope_settings(settings)["rope_theta"],
            "norm_eps": settings["rms_norm_eps"],
            "tied_embedding": settings.get("tie_word_embeddings", False),
            "rope_scaling": read_scaling(settings),
        }

    def norms(self, layer: int) -> tuple[NormSpec, ...]:
        return (
            NormSpec("input_layernorm", self.hidden, "input_layernorm"),
            NormSpec("pre_mlp_layernorm", self.hidden, "post_attention_layernorm"),
        )

    def linears(self, layer: int) -> tuple[LinearSpec, ...]:
        return tuple(
            spec for spec in (*self.attention(layer), *self.feed_forward(layer)) if isinstance(spec, LinearSpec)
        )

    def specs(self) -> tuple[Spec, ...]:
        """The products that can be quantized and recorded, layer by layer."""
        return _specs(self)

    def sites(self) -> tuple[Site, ...]:
        return tuple(spec.site for spec in self.specs())

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
        layers = range(1, self.layers + 1)
        linears = sum(spec.inputs * spec.outputs for spec in self.specs() if isinstance(spec, LinearSpec))
        norms = sum(norm.width for layer in layers for norm in self.norms(layer))
        return linears + norms + self.hidden + self.vocab * self.hidden * (1 if self.tied_embedding else 2)


@lru_cache(maxsize=32)
def _others(shape: Shape) -> tuple[OtherSpec, ...]:
    linears = [spec for spec in shape.specs() if isinstance(spec, LinearSpec)]
    norms = [
        (Site(layer, norm.path.rpartition(".")[2]), norm.width)
        for layer in range(1, shape.layers + 1)
        for norm in shape.norms(layer)
    ]
    norms.append((Site(0, "final_layernorm"), shape.hidden))
    tables = ["embedding"] if shape.tied_embedding else ["embedding", "output_layer"]
    return (
        *(OtherSpec(site, Other.NORM, width, tokens=width == shape.hidden) for site, width in norms),
        *(OtherSpec(spec.site, Other.EXPERTS, spec.outputs) for spec in linears if spec.site.module == "router"),
        OtherSpec(HEAD, Other.HEAD, shape.vocab),
        *(
            OtherSpec(spec.site, Other.PARAMETER, spec.inputs, spec.outputs, spec.split != Split.REPLICATED)
            for spec in linears
        ),
        *(OtherSpec(site, Other.PARAMETER, width) for site, width in norms),
        *(OtherSpec(Site(0, table), Other.PARAMETER, shape.hidden, shape.vocab) for table in tables),
    )


@lru_cache(maxsize=32)
def _specs(shape: Shape) -> tuple[Spec, ...]:
    layers = range(1, shape.layers + 1)
    return tuple(spec for layer in layers for spec in (*shape.attention(layer), *shape.feed_forward(layer)))
