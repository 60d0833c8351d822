"""A product as a kernel gets it, left · right, as one of the three GEMMs of a linear layer.

    GEMM      of a linear layer               the kernel has
    forward   x [m, k] · weightᵀ [k, n]       x, weightᵀ     or weight, xᵀ and the result transposed
    dgrad     grad [m, n] · weight [n, k]     grad, weight   or weightᵀ, gradᵀ
    wgrad     gradᵀ [n, m] · x [m, k]         gradᵀ, x       or xᵀ, grad

All may have an axis of a batch in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from binade.collector.capture.kernel.weights import MatchedWeight, ModelWeights, memory
from binade.data.run.tensor_kinds import Gemm

# torch's nodes of these kernels, which compute nothing again.
OWN_NODES = frozenset(f"{name}Backward0" for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "GroupedMm"))
BATCHED_NODES = frozenset(("BmmBackward0", "BaddbmmBackward0"))
ADDED = frozenset(("addmm", "baddbmm"))  # kernels that add a tensor, their first argument


class BatchAxis(Enum):
    """What the axis of a batch is, if there is one."""

    NONE = "none"
    REPEATED = "the same weight for all"
    EXPERTS = "a weight for each, of a stack"
    TOKENS = "as EXPERTS, and the tokens of all experts lie one after the other"
    GROUPS = "a part of one weight for each"


@dataclass(frozen=True)
class KernelOperands:
    """The two operands of a kernel, and what it adds: scale · left · right + factor · added."""

    left: Tensor
    right: Tensor
    ends: Tensor | None = None  # of each expert's tokens
    added: Tensor | None = None
    factor: float = 1
    scale: float = 1

    @classmethod
    def of(cls, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> KernelOperands:
        if name in ADDED:
            factor, scale = kwargs.get("beta", 1), kwargs.get("alpha", 1)
            return cls(args[1], args[2], added=args[0], factor=factor, scale=scale)
        ends = args[2] if len(args) > 2 else kwargs.get("offs")
        return cls(args[0], args[1], ends if name == "_grouped_mm" else None)


@dataclass(frozen=True)
class Orientation:
    """How the operands of a kernel are those of a GEMM.

    second_left   whether the second operand, the weight or the x of wgrad, is on the left
    """

    gemm: Gemm
    second_left: bool

    def canonical(self, given: KernelOperands) -> tuple[Tensor, Tensor]:
        """(x, weight [n, k]), (grad, weight [n, k]) or (grad, x), as `quant.gemm` takes them."""
        left, right = given.left, given.right
        if self.gemm is Gemm.FORWARD:
            return (right.mT, left) if self.second_left else (left, right.mT)
        if self.gemm is Gemm.DGRAD:
            return (right.mT, left.mT) if self.second_left else (left, right)
        return (right, left.mT) if self.second_left else (left.mT, right)

    def result(self, y: Tensor) -> Tensor:
        """Of the canonical operands, the kernel's; and of the kernel's, the canonical one."""
        return y.mT if self.second_left else y


@dataclass(frozen=True)
class AutogradNode:
    """What calls a backward GEMM: whether it is one of torch's own nodes, and whether that multiplies batches."""

    of_torch: bool
    batched: bool

    @classmethod
    def of(cls, name: str) -> AutogradNode:
        return cls(name in OWN_NODES, name in BATCHED_NODES)


@dataclass(frozen=True)
class ProductShape:
    """What the backward pass needs to recognize the GEMMs of a product. second_left is of the forward GEMM. A storage
    that is referred to weakly keeps its name, so that no later one is taken for it."""

    m: int
    n: int
    k: int
    weight: MatchedWeight | None
    x_storage: StorageWeakRef
    weight_storage: StorageWeakRef
    contracted_stride: int
    second_left: bool
    column_major: bool

    @classmethod
    def of(cls, given: KernelOperands, second_left: bool, weight: MatchedWeight | None) -> ProductShape:
        x, w = Orientation(Gemm.FORWARD, second_left).canonical(given)
        operand = given.left if second_left else given.right
        rows, columns = operand.stride()[-2:]
        column_major = rows == 1 and columns == operand.shape[-2]
        sizes = x.shape[-2], w.shape[-2], x.shape[-1]
        referred: Any = StorageWeakRef  # which has no types
        of_x, of_weight = referred(x.untyped_storage()), referred(w.untyped_storage())
        return cls(*sizes, weight, of_x, of_weight, w.stride(-1), second_left, column_major)

    def backward(self, given: KernelOperands, weights: ModelWeights) -> Orientation | None:
        """Which GEMM of this product these are the operands of, in its backward pass; None if of none. A forward GEMM
        is one that is computed again."""
        left, right, contracted = given.left, given.right, given.left.shape[-1]
        for operand, is_left, stride in ((right, False, right.stride(-2)), (left, True, left.stride(-1))):
            if self._is_weight(operand, weights):
                again = stride == self.contracted_stride and contracted == self.k
                return Orientation(Gemm.FORWARD if again else Gemm.DGRAD, is_left)
        for operand, is_left in ((right, False), (left, True)):
            if memory(operand) == self.x_storage.cdata and contracted == self.m:
                return Orientation(Gemm.WGRAD, is_left)
        return None

    def backward_alike(self, given: KernelOperands, node: AutogradNode, gradient: int) -> Orientation | None:
        """The same by the sizes of the operands alone: a saved tensor that was computed again, or copied, has another
        memory. Of a dgrad and a wgrad of the same sizes, the dgrad multiplies by the weight's values. Of two operands
        of the same sizes, one is the gradient, whose memory may be known, or they have the order of torch's own nodes.
        None if all that does not tell."""
        contracted, outer = given.left.shape[-1], (given.left.shape[-2], given.right.shape[-1])
        wgrad = contracted == self.m and sorted(outer) == sorted((self.n, self.k))
        dgrad = contracted == self.n and sorted(outer) == sorted((self.m, self.k))
        if wgrad and dgrad:
            if self._values() is None:
                return None
            dgrad = self._has_values(given.left) or self._has_values(given.right)
            wgrad = not dgrad
        if wgrad:
            by_torch = not self.second_left if node.batched else self.second_left is self.column_major
            return self._placed(Gemm.WGRAD, given, node, gradient, by_torch if self.n == self.k else outer[0] == self.k)
        if dgrad:
            second_left = self.second_left if self.m == self.k else outer[0] == self.k
            return self._placed(Gemm.DGRAD, given, node, gradient, second_left)
        return None

    def _placed(
        self, gemm: Gemm, given: KernelOperands, node: AutogradNode, gradient: int, second_left: bool
    ) -> Orientation | None:
        outer = {given.left.shape[-2], given.right.shape[-1]}
        if len(outer) == 1 and not node.of_torch:
            sides = memory(given.left) == gradient, memory(given.right) == gradient
            return Orientation(gemm, sides[1]) if gradient and sides[0] != sides[1] else None
        return Orientation(gemm, second_left)

    def _values(self) -> Tensor | None:
        """The weight [n, k] or [k, n]; None if it is not known, or a part of it."""
        weight = self.weight.held.ref() if self.weight else None
        return weight if weight is not None and sorted(weight.shape) == sorted((self.n, self.k)) else None

    def _has_values(self, operand: Tensor) -> bool:
        weight = self._values()
        if weight is None or operand.dim() != 2:
            return False
        same = (each.to(operand.dtype) for each in (weight, weight.mT) if each.shape == operand.shape)
        return any(torch.equal(each, operand) for each in same)

    def _is_weight(self, operand: Tensor, weights: ModelWeights) -> bool:
        if memory(operand) == self.weight_storage.cdata:
            return True
        match = weights.of(operand) if self.weight else None
        return bool(match and self.weight and match.held.owners == self.weight.held.owners)
