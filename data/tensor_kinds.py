"""The tensors that a collection records, as one table: capture, `--tensors`, estimates, the index and the app read it.

To record another tensor of a product, add an entry to TENSOR_KINDS; nothing else changes. What is not in the table can
be recorded by any name with `Recorder.record`, and is shown under that name in NEUTRAL.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

NEUTRAL = "#737b91"  # the colour of names that are not in the table


class Product(StrEnum):
    """The matrix products that capture observes."""

    LINEAR = "linear"  # a linear layer: input · weightᵀ
    QK = "qk"  # attention: query · keyᵀ
    PV = "pv"  # attention: probabilities · value


class Gemm(StrEnum):
    """The three GEMMs of a product."""

    FORWARD = "forward"
    DGRAD = "dgrad"  # the gradient of its first operand
    WGRAD = "wgrad"  # the gradient of its second operand


class Measure(StrEnum):
    """What is measured of a GEMM beside the error of its operands, at a cost."""

    RESULT = "result"  # the error of its result, for which it runs a second time on operands that are not rounded
    LOSS = "loss"  # what the error of each forward operand does to the loss, by its gradient
    BLOCKS = "blocks"  # scales, errors and crest factors by block
    TRACE = "trace"  # hot channels, and a few weights before and after rounding, to follow them over iterations


class Operation(StrEnum):
    """When a tensor is computed or used."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"  # a forward pass that does not train


class Phase(StrEnum):
    """The side of the operation on which a tensor stands."""

    PRE = "pre"  # its input
    POST = "post"  # its output


@dataclass(frozen=True)
class TensorKind:
    """A tensor of a product.

    name             tensor_name in the index
    observed         its name in the product, see quant.gemm.Observed; "scores" are the scaled scores of attention
    operand          the field of GemmFormats that holds its format; for a result, that of its GEMM's first operand
    contracted_axis  the axis that this GEMM contracts, from the end; None for a result
    size             the tensor whose number of elements it has: input, weight or output of a linear layer; query, key,
                     value, scores or output of attention
    color, label     how charts draw it and texts call it; a name that occurs in two products has the same in both
    """

    name: str
    product: Product
    observed: str
    operation: Operation
    phase: Phase
    operand: str
    contracted_axis: int | None
    size: str
    color: str
    label: str

    @property
    def gemm(self) -> Gemm:
        """The GEMM that takes or gives it; a tensor that is an operand of two is of the first."""
        return Gemm(self.operand.partition("_")[0])

    @property
    def layer_type(self) -> str:
        return "linear" if self.product is Product.LINEAR else "attention"

    @property
    def component(self) -> str:
        return "linear" if self.product is Product.LINEAR else "FA"


LINEAR, QK, PV = Product
FORWARD, BACKWARD, OPTIMIZER, EVALUATION = Operation
PRE, POST = Phase
TENSOR_KINDS: list[TensorKind] = [
    # name, product, observed, operation, phase, operand, contracted_axis, size, color, label
    TensorKind("input", LINEAR, "a", FORWARD, PRE, "forward_a", -1, "input", "#6366f1", "input"),
    TensorKind("weight", LINEAR, "b", FORWARD, PRE, "forward_b", -1, "weight", "#c2850c", "weight"),
    TensorKind("output", LINEAR, "y", FORWARD, POST, "forward_a", None, "output", "#0d9488", "output"),
    TensorKind(
        "grad_output", LINEAR, "grad", BACKWARD, PRE, "dgrad_grad", -1, "output", "#db2777", "gradient of output"
    ),
    TensorKind(
        "grad_input", LINEAR, "grad_a", BACKWARD, POST, "dgrad_grad", None, "input", "#a855c7", "gradient of input"
    ),
    TensorKind(
        "grad_weight", LINEAR, "grad_b", BACKWARD, POST, "wgrad_grad", None, "weight", "#b4633a", "gradient of weight"
    ),
    TensorKind("query", QK, "a", FORWARD, PRE, "forward_a", -1, "query", "#0284c7", "query"),
    TensorKind("key", QK, "b", FORWARD, PRE, "forward_b", -1, "key", "#4d8f2a", "key"),
    TensorKind("value", PV, "b", FORWARD, PRE, "forward_b", -2, "value", "#9a7b0a", "value"),
    TensorKind("attention_scores", QK, "scores", FORWARD, POST, "forward_a", None, "scores", "#e0455f", "scores"),
    TensorKind("attention_probs", PV, "a", FORWARD, POST, "forward_a", -1, "scores", "#8b6fd6", "probabilities"),
    TensorKind("output", PV, "y", FORWARD, POST, "forward_a", None, "output", "#0d9488", "output"),
    TensorKind("grad_output", PV, "grad", BACKWARD, PRE, "dgrad_grad", -1, "output", "#db2777", "gradient of output"),
    TensorKind(
        "grad_scores", QK, "grad", BACKWARD, PRE, "dgrad_grad", -1, "scores", "#e06008", "gradient of unscaled scores"
    ),
    TensorKind("grad_query", QK, "grad_a", BACKWARD, POST, "dgrad_grad", None, "query", "#3b8ea5", "gradient of query"),
    TensorKind("grad_key", QK, "grad_b", BACKWARD, POST, "wgrad_grad", None, "key", "#2f9e6e", "gradient of key"),
    TensorKind("grad_value", PV, "grad_b", BACKWARD, POST, "wgrad_grad", None, "value", "#b0578d", "gradient of value"),
]


# What a product shows an operand as in a later GEMM, and what it showed it as before.
LATER = {"dgrad_b": "b", "wgrad_grad": "grad", "wgrad_a": "a"}


# Attention maps: their last axis is no channel.
MAPS = frozenset(kind.name for kind in TENSOR_KINDS if kind.size == "scores")


def tensor_names(layer_type: str | None = None) -> tuple[str, ...]:
    """The names of all kinds, or of those of "linear" or "attention" layers, in the order of the table."""
    return tuple(dict.fromkeys(kind.name for kind in TENSOR_KINDS if layer_type in (None, kind.layer_type)))


def kind_of(product: Product, observed: str) -> TensorKind | None:
    """The kind of what a product shows by that name; None if it is not recorded."""
    return next((kind for kind in TENSOR_KINDS if (kind.product, kind.observed) == (product, observed)), None)


def color_of(name: str) -> str:
    """NEUTRAL for a name that is not in the table."""
    return next((kind.color for kind in TENSOR_KINDS if kind.name == name), NEUTRAL)


def label_of(name: str) -> str:
    """The name itself if it is not in the table."""
    return next((kind.label for kind in TENSOR_KINDS if kind.name == name), name)
