"""The tensors that a collection records, as one table: capture, `--tensors`, estimates, the index and the app read it.

To record another tensor of a product, or of another part of a step, add an entry to TENSOR_KINDS; nothing else changes.
Tensors of products are recorded by default, other tensors of a step only if they are named. Any other tensor can be
recorded under any name with `Recorder.record`, and is shown under that name in the color NEUTRAL.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

NEUTRAL = "#737b91"  # the color of names that are not in the table


class Product(StrEnum):
    """The matrix products that capture observes."""

    LINEAR = "linear"  # a linear layer: input · weightᵀ
    QK = "qk"  # attention: query · keyᵀ
    PV = "pv"  # attention: probabilities · value
    EINSUM = "product"  # declared by an equation: left · rightᵀ

    @property
    def place(self) -> str:
        """See `TensorKind.place`."""
        return "attention" if self in (Product.QK, Product.PV) else self.value


class Other(StrEnum):
    """Other parts of a step that capture observes, for tensors that are named."""

    NORM = "norm"  # a LayerNorm or RMSNorm
    EXPERTS = "experts"  # a mixture of experts
    HEAD = "head"  # the LM head
    PARAMETER = "parameter"  # a parameter of the model, in the step of its optimizer
    NEWTON_SCHULZ = "newton_schulz"  # the matrix products of torch.optim.Muon, for a parameter of the model


OF_ROUNDED = "the rounded forward operand in "  # before a spec in a line of a recipe, as run.json has it


class Gemm(StrEnum):
    """The three GEMMs of a product."""

    FORWARD = "forward"
    DGRAD = "dgrad"  # the gradient of its first operand
    WGRAD = "wgrad"  # the gradient of its second operand


class Measure(StrEnum):
    """Optional measurements of a GEMM besides the error of its operands. They take time."""

    RESULT = "result"  # the error of its result, for which it runs a second time on operands that are not rounded
    BLOCKS = "blocks"  # scales, errors and crest factors by block
    TRACE = "trace"  # hot channels, and a few weights before and after rounding, to follow them over iterations
    ACCUMULATED = "accumulated"  # whether the optimizer sees the sum of the weight gradients of all micro-batches


DEFAULT_MEASURES = tuple(measure for measure in Measure if measure is not Measure.ACCUMULATED)


class Operation(StrEnum):
    """When a tensor is computed or used."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"  # a forward pass that does not train


class Phase(StrEnum):
    """Whether a tensor is an input or an output of the operation."""

    PRE = "pre"  # its input
    POST = "post"  # its output


@dataclass(frozen=True)
class TensorKind:
    """A tensor of a product, or of another part of a step.

    name             tensor_name in the index
    observed         its name in the product, see quant.gemm.Observed; "scores" are the scaled scores of attention. Of
                     a module outside of products: its input "a", weight "b" and result "y", the gradients "grad" of
                     the result and "grad_b" of the weight. Of a parameter: "weight", one of capture.step.CHANGES, or
                     its name in the state of the optimizer. Of Newton–Schulz: see capture.optimizer_updates.Products
    operand          the field of GemmFormats that holds its format; for a result, that of its GEMM's first operand; ""
                     of a tensor that no GEMM takes
    contracted_axis  the axis that this GEMM contracts, from the end; None for a result. Outside of products, the axis
                     of its scores, None for none
    size             the tensor whose number of elements it has: input, weight or output of a linear layer; query, key,
                     value, scores or output of attention; left, right or product; outside of products, see
                     collector.models.specs.OtherSpec
    color, label its color and name in charts and texts; the same for a name that occurs in two products
    """

    name: str
    product: Product | Other
    observed: str
    operation: Operation
    phase: Phase
    operand: str
    contracted_axis: int | None
    size: str
    color: str
    label: str

    @property
    def gemm(self) -> Gemm | None:
        """The GEMM that uses or computes it, if any; for an operand of two GEMMs, the first."""
        return Gemm(self.operand.partition("_")[0]) if self.operand else None

    @property
    def place(self) -> str:
        """Where the tensor belongs: "linear", "attention" or "product", or one of Other."""
        return self.product.place if isinstance(self.product, Product) else self.product.value

    @property
    def layer_type(self) -> str | None:
        return None if isinstance(self.product, Other) else self.place

    @property
    def component(self) -> str | None:
        return "FA" if self.place == "attention" else self.layer_type


LINEAR, QK, PV, EINSUM = Product
NORM, EXPERTS, HEAD, PARAMETER, NEWTON_SCHULZ = Other
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
    TensorKind("left", EINSUM, "a", FORWARD, PRE, "forward_a", -1, "left", "#4860a8", "left operand"),
    TensorKind("right", EINSUM, "b", FORWARD, PRE, "forward_b", -1, "right", "#909048", "right operand"),
    TensorKind("product", EINSUM, "y", FORWARD, POST, "forward_a", None, "product", "#a84848", "product"),
    TensorKind(
        "grad_product", EINSUM, "grad", BACKWARD, PRE, "dgrad_grad", -1, "product", "#7848f0", "gradient of product"
    ),
    TensorKind(
        "grad_left", EINSUM, "grad_a", BACKWARD, POST, "dgrad_grad", None, "left", "#606078", "gradient of left"
    ),
    TensorKind(
        "grad_right", EINSUM, "grad_b", BACKWARD, POST, "wgrad_grad", None, "right", "#789000", "gradient of right"
    ),
    TensorKind("norm_input", NORM, "a", FORWARD, PRE, "", -1, "input", "#686840", "input of norm"),
    TensorKind("norm_gain", NORM, "b", FORWARD, PRE, "", -1, "weight", "#00a800", "gain of norm"),
    TensorKind("grad_norm_gain", NORM, "grad_b", BACKWARD, POST, "", None, "weight", "#b08080", "gradient of gain"),
    TensorKind("router_load", EXPERTS, "y", FORWARD, POST, "", None, "weight", "#f800d0", "tokens of each expert"),
    TensorKind("logits", HEAD, "y", FORWARD, POST, "", None, "output", "#a800f8", "logits"),
    TensorKind("master_weight", PARAMETER, "weight", OPTIMIZER, POST, "", -1, "weight", "#8f6200", "updated weight"),
    TensorKind("exp_avg", PARAMETER, "exp_avg", OPTIMIZER, POST, "", -1, "weight", "#0888f8", "first moment"),
    TensorKind("exp_avg_sq", PARAMETER, "exp_avg_sq", OPTIMIZER, POST, "", -1, "weight", "#b80890", "second moment"),
    TensorKind("update", PARAMETER, "update", OPTIMIZER, POST, "", -1, "weight", "#f83838", "update of weight"),
    TensorKind("update_ratio", PARAMETER, "ratio", OPTIMIZER, POST, "", None, "rows", "#d050f8", "update ÷ weight"),
    TensorKind("ns_x", NEWTON_SCHULZ, "x", OPTIMIZER, PRE, "forward_a", -1, "weight", "#c078c0", "X in XXᵀ"),
    TensorKind("ns_gram", NEWTON_SCHULZ, "gram", OPTIMIZER, PRE, "forward_a", -1, "weight", "#007848", "A in AA"),
    TensorKind("ns_left", NEWTON_SCHULZ, "left", OPTIMIZER, PRE, "forward_a", -1, "weight", "#d80000", "B in BX"),
    TensorKind("ns_right", NEWTON_SCHULZ, "right", OPTIMIZER, PRE, "forward_b", -2, "weight", "#a800c0", "X in BX"),
]


PRODUCT_KINDS = {(kind.layer_type, kind.name): kind for kind in TENSOR_KINDS if isinstance(kind.product, Product)}


# The name of an operand in a later GEMM, and its name in the forward product.
LATER = {"dgrad_b": "b", "wgrad_grad": "grad", "wgrad_a": "a"}
# What a product multiplies to get a result.
OPERANDS = {"y": ("a", "b"), "scores": ("a", "b"), "grad_a": ("grad", "b"), "grad_b": ("grad", "a")}


ROUTER, SCALAR_GATE = "router", "scalar_gate"
# Modules of the part `router` of a recipe: linear layers that choose experts, and those with a single output, such as
# the gate of shared experts in Qwen2-MoE.
OF_ROUTER = rf"(?:^|[.])(?:{ROUTER}|{SCALAR_GATE})$"  # a regular expression: in a tower, other words precede


def has_tokens(layer_type: str | None, name: str | None) -> bool:
    """Whether all axes of a tensor but the last are tokens, and an operand's mean over them can be subtracted before it
    is rounded (`center=tokens`): the input and the gradient of the output of a linear layer."""
    return layer_type == LINEAR.place and name in ("input", "grad_output")


# Attention maps, whose last axis is not a channel.
MAPS = frozenset(kind.name for kind in TENSOR_KINDS if kind.size == "scores")


def tensor_names(place: str | None = None) -> tuple[str, ...]:
    """The names of all kinds, or of those of a place (see TensorKind), in the order of the table."""
    return tuple(dict.fromkeys(kind.name for kind in TENSOR_KINDS if place in (None, kind.place)))


def named_places(names: Collection[str]) -> frozenset[str]:
    """The places of the tensors to record: those of products if none is named."""
    return frozenset(k.place for k in TENSOR_KINDS if (k.name in names if names else isinstance(k.product, Product)))


def color_of(name: str) -> str:
    """NEUTRAL for a name that is not in the table."""
    return next((kind.color for kind in TENSOR_KINDS if kind.name == name), NEUTRAL)


def label_of(name: str) -> str:
    """The name itself if it is not in the table."""
    return next((kind.label for kind in TENSOR_KINDS if kind.name == name), name)
