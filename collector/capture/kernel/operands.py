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

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from binade.collector.capture.kernel.weights import MatchedWeight, ModelWeights, memory
from binade.data.run.tensor_kinds import Gemm

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

    def backward_alike(self, given: KernelOperands, batched: bool) -> Orientation | None:
        """The same by the sizes of the operands alone: a saved tensor that was computed again, or copied, has another
        memory. batched: whether torch's own node multiplies batches."""
        contracted, outer = given.left.shape[-1], (given.left.shape[-2], given.right.shape[-1])
        if contracted == self.m and sorted(outer) == sorted((self.n, self.k)):
            by_torch = not self.second_left if batched else self.second_left is self.column_major
            return Orientation(Gemm.WGRAD, by_torch if self.n == self.k else outer[0] == self.k)
        if contracted == self.n and sorted(outer) == sorted((self.m, self.k)):
            return Orientation(Gemm.DGRAD, self.second_left if self.m == self.k else outer[0] == self.k)
        return None

    def _is_weight(self, operand: Tensor, weights: ModelWeights) -> bool:
        if memory(operand) == self.weight_storage.cdata:
            return True
        match = weights.of(operand) if self.weight else None
        return bool(match and self.weight and match.held.owners == self.weight.held.owners)
