"""Which weight of a model an operand of a product is.

A view of a weight (a transpose, an expert's part of a stack, an expanded matrix) is recognized by its memory. A copy,
such as autocast's casts, has memory of its own: autograd's graph leads from it to the weight, also from what is
computed of that value by value. Without gradients it is recognized by its values, in the module that holds the weight.
A linear layer that computes its weight (a parametrization, a 4-bit base that it dequantizes) is recognized by the shape
of the product.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.dtensor import is_dtensor
from binade.quant.memory import is_ordinary

# The nodes that autograd makes of views, copies, and of functions of each value, which may have numbers beside it.
UNARY = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Unsqueeze", "Squeeze"),
        *("ToCopy", "Clone", "Select", "Slice", "Unbind", "Split", "Alias", "AsStrided"),
        *("Clamp", "ClampMin", "ClampMax", "Mul", "Div", "Add", "Neg", "Exp", "Tanh", "Sigmoid", "Softplus", "Relu"),
    )
    for number in (0, 1)
)
LONGEST = 8  # of these, one after the other
Owner = tuple[nn.Module, str]  # a module, and the name that the weight has in it


@dataclass(frozen=True)
class HeldWeight:
    """A weight as the model holds it now, and the modules that own it, more than one if they share it.

    trains   whether it is the local part of a DTensor that needs a gradient, which it does not know itself
    """

    ref: weakref.ref[Tensor]
    owners: tuple[Owner, ...]
    trains: bool = False

    @property
    def needs_gradient(self) -> bool:
        """Whether it trains. A part of it that is multiplied below autograd, as in a nested tensor's product, does not
        say so."""
        weight = self.ref()
        return self.trains or (weight is not None and weight.requires_grad)

    @property
    def is_stack(self) -> bool:
        """Whether it has a matrix for each expert."""
        weight = self.ref()
        return weight is not None and weight.dim() > 2

    def contains(self, x: Tensor) -> bool:
        """Whether x, which lies in the same storage, is a part of the weight."""
        weight = self.ref()
        if weight is None or memory(weight) != memory(x):
            return False
        return 0 <= x.storage_offset() - weight.storage_offset() < max(1, weight.numel())

    def first_expert(self, x: Tensor) -> int:
        """The number of the first expert of a stacked weight whose part x is."""
        weight = self.ref()
        if weight is None or weight.dim() < 3 or not weight.stride(0):
            return 0
        return (x.storage_offset() - weight.storage_offset()) // weight.stride(0)


@dataclass(frozen=True)
class MatchedWeight:
    """The weight that an operand is, or a part of it.

    expert    the number of the first matrix of this part in a stack of them
    expanded  whether it is a copy of a weight that was expanded before
    """

    held: HeldWeight
    expert: int = 0
    expanded: bool = False


def memory(x: Tensor) -> int:
    """Names the storage of x; 0 if it has none of its own."""
    return x.untyped_storage()._cdata if torch._C._has_storage(x) else 0


class ModelWeights:
    """The weights of a model, which FSDP and optimizers may replace: `hold` looks at a module's once more."""

    def __init__(self, model: nn.Module) -> None:
        self.by_memory: dict[int, list[HeldWeight]] = {}
        self.by_parameter: dict[int, HeldWeight] = {}
        self.last: dict[Owner, tuple[HeldWeight, int]] = {}  # with the memory that it had
        for module in model.modules():
            self.hold(module)

    def hold(self, module: nn.Module) -> None:
        for name, weight in _weights_of(module):
            whole: Any = weight
            local: Tensor = whole._local_tensor if is_dtensor(weight) else weight
            known, at = self.last.get((module, name)), memory(local)
            if known is not None and known[0].ref() is local and known[1] == at:
                continue
            held = self.by_parameter.get(id(weight))
            owners = held.owners if held and held.ref() is weight else ()
            if (module, name) not in owners:
                owners = (*owners, (module, name))
                self.by_parameter[id(weight)] = HeldWeight(weakref.ref(weight), owners)
            held = HeldWeight(weakref.ref(local), owners, local is not weight and weight.requires_grad)
            self.last[module, name] = held, at
            self._hold(held)

    def _hold(self, held: HeldWeight) -> None:
        weight = held.ref()
        if weight is None or not is_ordinary(weight):
            return
        others = self.by_memory.get(memory(weight), [])
        if not any(other is held for other in others):
            others = [other for other in others if other.ref() is not None and other.ref() is not weight]
            self.by_memory[memory(weight)] = [*others, held]

    def of(self, x: Tensor) -> MatchedWeight | None:
        """The weight that x is a view of, or that autograd knows it to be computed of, value by value."""
        for held in self.by_memory.get(memory(x), ()):
            if held.contains(x):
                return MatchedWeight(held, held.first_expert(x))
        return self._of_graph(x)

    def copy_in(self, module: nn.Module, x: Tensor) -> MatchedWeight | None:
        """The weight that a module holds itself and of which x is a copy that autograd does not know: it has the same
        values, in its own dtype."""
        if x.requires_grad:
            return None
        for name, _ in _weights_of(module):
            held, weight = self.last[module, name][0], self.last[module, name][0].ref()
            for expert, matrix in enumerate(() if weight is None else weight if weight.dim() > x.dim() else (weight,)):
                for same in (matrix, matrix.mT):
                    if same.shape == x.shape and torch.equal(same.to(x.dtype), x):
                        return MatchedWeight(held, expert)
        return None

    def _of_graph(self, x: Tensor) -> MatchedWeight | None:
        node: Any = x.grad_fn
        output, expert, expanded = x.output_nr, 0, False
        for _ in range(LONGEST):
            if node is None:
                return None
            if (variable := getattr(node, "variable", None)) is not None:
                held = self.by_parameter.get(id(variable))
                return MatchedWeight(held, expert, expanded) if held and held.ref() is variable else None
            if node.name() not in UNARY or any(other for other, _ in node.next_functions[1:]):
                return None
            expanded = expanded or node.name() == "ExpandBackward0"
            if node.name() == "UnbindBackward0":
                expert = output
            elif node.name() == "SelectBackward0" and node._saved_dim == 0:
                expert = node._saved_index
            node, output = node.next_functions[0]
        return None


def _weights_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights that a module holds itself, with two axes or more; FSDP1 holds views of its flat parameter."""
    own: Mapping[str, Any] = vars(module)
    for name, x in (*own.get("_parameters", {}).items(), *own.items()):
        if isinstance(x, Tensor) and x.dim() > 1 and torch.is_floating_point(x):
            yield name, x
