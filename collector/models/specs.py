"""What a model consists of, as data: linear layers, attention cores, norms and other parts that can be recorded.
No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import ClassVar

from binade.collector.models.site import Site

WHOLE = Fraction(1)


class Split(StrEnum):
    """How tensor-parallel ranks divide a linear layer, in Megatron's terms."""

    COLUMN = "column"  # each rank computes a part of the outputs
    ROW = "row"  # each rank takes a part of the inputs, and the results are summed
    REPLICATED = "replicated"  # each rank computes all of it


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer [outputs, inputs].

    path     of its module within our TransformerLayer
    tensors  the modules of a Hugging Face layer that its weight is joined from, with their rows
    groups   rows of `tensors` are taken in turns, this many times the next of each, as Megatron lays out a group's
             queries, key and value; with one group, one tensor after the other
    fused    each of `tensors` is that many of them, one after the other (3 for GPT-2's queries, keys and values)
    stride   the weight is that many matrices, one after the other, each divided among the ranks (2 for SwiGLU's gate
             and up)
    share    of a micro-batch's tokens, how many reach it on average: less than 1 for a routed expert
    """

    layer_type: ClassVar = "linear"

    site: Site
    inputs: int
    outputs: int
    split: Split
    path: str
    tensors: Mapping[str, int]
    groups: int = 1
    stride: int = 1
    share: Fraction = WHOLE
    bias: bool = False
    fused: int = 1

    def elements(self, batch: int, length: int, ranks: int) -> dict[str, int]:
        """The elements of its tensors, by `TensorKind.size`, on all tensor-parallel ranks together: tensors that are
        not divided are recorded by every rank."""
        tokens = max(1, int(batch * length * self.share))
        weight = self.inputs * self.outputs * (ranks if self.split == Split.REPLICATED else 1)
        taken = tokens * self.inputs * (1 if self.split == Split.ROW else ranks)
        given = tokens * self.outputs * (1 if self.split == Split.COLUMN else ranks)
        return {"input": taken, "weight": weight, "output": given}


@dataclass(frozen=True)
class CoreSpec:
    """An attention core: softmax(QKᵀ) V. head_dim is the width of a query or key head, value_dim of a value head."""

    layer_type: ClassVar = "attention"

    site: Site
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    def elements(self, batch: int, length: int, ranks: int) -> dict[str, int]:
        """As for LinearSpec. All are divided by heads."""
        tokens = batch * length
        return {
            "query": tokens * self.heads * self.head_dim,
            "key": tokens * self.kv_heads * self.head_dim,
            "value": tokens * self.kv_heads * self.value_dim,
            "output": tokens * self.heads * self.value_dim,
            "scores": tokens * self.heads * length,
        }


@dataclass(frozen=True)
class NormSpec:
    """A norm of a layer. path is that of our module, tensor that of Hugging Face's, both within the layer."""

    path: str
    width: int
    tensor: str


@dataclass(frozen=True)
class WeightSpec:
    """A parameter of GPTModel, whole.

    name        in GPTModel
    site        where the optimizer's step records it
    rows        the tensors of a Hugging Face checkpoint that it is joined from, with their rows; groups and fused as in
                LinearSpec
    divided     whether the tensor-parallel ranks divide it
    transposed  whether the checkpoint has it as [inputs, outputs]
    """

    name: str
    site: Site
    size: tuple[int, ...]
    rows: Mapping[str, int]
    divided: bool = False
    groups: int = 1
    fused: int = 1
    transposed: bool = False

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the checkpoint with their sizes there."""
        sizes = {name: (rows, *self.size[1:]) for name, rows in self.rows.items()}
        return {name: size[::-1] if self.transposed else size for name, size in sizes.items()}

    def bias(self, *, divided: bool = False) -> WeightSpec:
        """The bias of this weight's outputs."""

        def renamed(name: str) -> str:
            return f"{name.removesuffix('weight')}bias"

        return replace(
            self,
            name=renamed(self.name),
            site=replace(self.site, module=f"{self.site.module}.bias"),
            size=self.size[:1],
            rows={renamed(name): rows for name, rows in self.rows.items()},
            divided=divided,
        )


@dataclass(frozen=True)
class OtherSpec:
    """A part of the model that is recorded besides products, if it is named. layer_type is its place, see
    data.tensor_kinds.TensorKind.

    width    of a norm; for experts, their number; for the LM head, the vocabulary; for a parameter, its last axis
    rows     of a parameter: its values are rows · width
    divided  whether the tensor-parallel ranks divide it
    tokens   whether sequence parallelism divides its tokens
    """

    site: Site
    layer_type: str
    width: int
    rows: int = 1
    divided: bool = False
    tokens: bool = False

    def elements(self, batch: int, length: int, ranks: int, sequence_parallel: bool = False) -> dict[str, int]:
        """As for LinearSpec."""
        copies = 1 if self.divided else ranks
        weight = self.rows * self.width * copies
        whole = batch * length * self.width * (1 if self.tokens and sequence_parallel else copies)
        return {"input": whole, "output": whole, "weight": weight, "rows": self.rows * copies}


Spec = LinearSpec | CoreSpec


def mlp_linears(
    layer: int,
    hidden: int,
    ffn: int,
    *,
    gated: bool = True,
    path: str = "mlp",
    prefix: str = "",
    expert: int | None = None,
    share: Fraction = WHOLE,
) -> tuple[LinearSpec, LinearSpec]:
    """fc1 and fc2 of `feedforward.MLP`. gated: fc1 holds gate and up. path is the same here and at Hugging Face, prefix
    is put before the sites' modules."""
    rows = {f"{path}.{name}_proj": ffn for name in (("gate", "up") if gated else ("up",))}
    fc1, fc2 = (Site(layer, f"{prefix}{module}", expert) for module in ("fc1", "fc2"))
    return (
        LinearSpec(
            fc1, hidden, len(rows) * ffn, Split.COLUMN, f"{path}.linear_fc1", rows, stride=len(rows), share=share
        ),
        LinearSpec(fc2, ffn, hidden, Split.ROW, f"{path}.linear_fc2", {f"{path}.down_proj": hidden}, share=share),
    )
