"""What a scale scheme is: the base class of those in `scaling`, and the arithmetic that they share.

This module imports torch at its first computation, see `lazy`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from binade.quant.codes import decode_table, encode
from binade.quant.elements import Element, Overflow, RoundingMode
from binade.quant.lazy import torch
from binade.quant.options import TENSOR, Block, Options
from binade.quant.rounding import round_to_element

if TYPE_CHECKING:
    from torch import Tensor

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
VECTOR, TILE = "a vector such as 32", "a tile such as 16x16"
"""Kinds of blocks, for `Scaling.blocks`."""


class Factors(NamedTuple):
    """x · encode is rounded to v; v stands for ((v · scale) · outer) / divisor. Every step is one float32 operation;
    None stands for 1. Scalars, or [groups, 1], or [groups, block]."""

    encode: Tensor | None = None
    scale: Tensor | None = None
    outer: Tensor | None = None
    divisor: Tensor | None = None


class Kernel(IntEnum):
    """How the compiled kernels compute a block's scale by themselves. The numbers are those of `backends/cpu.cpp`; the
    Triton kernels have the first ones."""

    FLOOR = 1
    CEIL = 2
    EVEN = 3
    RCEIL = 4
    NVFP4 = 5
    HIF4 = 6
    UNCLIPPED = 7
    FOUR_OVER_SIX = 8
    QUEST = 9


class Follows(Enum):
    """What a block's scale follows from, which decides how the backends compute it, see `backends.runs`."""

    LARGEST = auto()
    """The largest magnitude: `of_largest`."""
    MOMENTS = auto()
    """The sums of the values and of their squares: `of_moments`."""
    ERRORS = auto()
    """The largest magnitude gives the scales to try, `wanted`; the first with the smallest error is used."""
    VALUES = auto()
    """All values: `block_scale` or `quantize` is overridden. `reference` computes it on every backend, unless there is
    a `kernel`."""


class Scaling:
    """A scale scheme. A subclass defines the facts below; its docstring describes the scheme to users. It overrides
    what differs of the methods: `wanted`, `of_largest`, `of_moments` or `block_scale`, and `factors`.

    name        as users choose it
    shares      what values share, in words; {block} is `Block.words`
    blocks      which blocks may share a scale: VECTOR, TILE, ROW, TENSOR, or certain blocks; () without a scale
    stored      how a scale is coded; None for float32
    clips       True if a scale may be too small for a block's largest value, for example because it is rounded down
    follows     what a block's scale follows from
    per_element True if the values of a block have different factors

    Optional:

    outer       the block of the float32 scale above the block scale, if there is one
    of_blocks   True if `outer_absmax` needs the largest magnitude of every block, not only of the tensor
    saturates   False if no finite value saturates, so that nobody needs to look
    roundings   how elements may be rounded; the first is the default if the format's own is not among them
    stochastic  True if scales are rounded stochastically
    options     the options of `specs.OPTIONS` that only some schemes have: their values, the default first
    kernel      how the compiled kernels compute the scale of a vector by themselves, if they do

    Finite values stay finite, unless the docstring says otherwise. Only a value that rounds to 2^128, which float32
    does not have, becomes Infinity. tests/quant/test_finite.py checks all schemes.

    Methods take values as [groups, block] float32, scales as [groups, 1] (one for all if a tensor shares it), and
    absmax as a float32 scalar or [groups, 1]: `outer_absmax` of the outer block, or the largest magnitude in the tensor
    if that shares a scale, NaN if any element is NaN; with delayed scaling the scale itself; 0 where none is needed.
    """

    name: ClassVar[str]
    shares: ClassVar[str]
    blocks: ClassVar[tuple[Block | str, ...]]
    stored: ClassVar[Element | None]
    clips: ClassVar[bool]
    follows: ClassVar[Follows]
    per_element: ClassVar[bool]

    outer: ClassVar[Block | None] = None
    of_blocks: ClassVar[bool] = False
    saturates: ClassVar[bool] = True
    roundings: ClassVar[tuple[RoundingMode, ...]] = tuple(RoundingMode)
    stochastic: ClassVar[bool] = False
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    kernel: ClassVar[Kernel | None] = None

    def __init_subclass__(cls) -> None:
        """Raises TypeError for a scheme, which is a class with a name of its own, that lacks a fact."""
        facts = ("shares", "blocks", "stored", "clips", "follows", "per_element")
        missing = [fact for fact in facts if not hasattr(cls, fact)] + ["a docstring"] * (cls.__doc__ is None)
        if "name" in vars(cls) and missing:
            raise TypeError(f"the scale scheme {cls.__name__} does not define {', '.join(missing)}")

    @property
    def about(self) -> str:
        """What the scheme is, for users: the first paragraph of the docstring."""
        return " ".join((self.__doc__ or "").split("\n\n")[0].split())

    @property
    def scale_bits(self) -> int:
        """Bits of a block's scale."""
        return self.stored.bits if self.stored else 32

    def fits(self, block: Block) -> bool:
        """Whether such a block may share a scale."""
        kind = block.columns is not None and (VECTOR if block.rows == 1 else TILE)
        return block in self.blocks or kind in self.blocks

    def outer_absmax(self, largest: Tensor) -> Tensor:
        """What the scale of the tensor follows from, given the largest magnitude of each block, any shape."""
        return largest.amax()

    def of_tensor(self, spec: Options, absmax: float) -> float | None:
        """What all values of a tensor with this largest magnitude are multiplied by; None unless one float32 number
        that follows from it scales the whole tensor."""
        if spec.block != TENSOR:
            return None
        largest = torch.tensor(absmax, dtype=torch.float32, device="cpu")
        return float(self.of_largest(largest, spec, largest))

    def wanted(self, largest: Tensor, spec: Options, absmax: Tensor) -> tuple[Tensor, ...]:
        """The scales to choose from for blocks with these largest magnitudes, same shape, before they are rounded to
        `stored`: of several, the first with the smallest error. () if they do not follow from these or are not rounded
        to nearest."""
        return ()

    def of_largest(self, largest: Tensor, spec: Options, absmax: Tensor) -> Tensor:
        """The scale of blocks with these largest magnitudes, same shape, on the grid of `stored`."""
        (scale,) = self.tried(largest, spec, absmax)
        return scale

    def tried(self, largest: Tensor, spec: Options, absmax: Tensor) -> tuple[Tensor, ...]:
        """`wanted`, on the grid of `stored`."""
        wanted = self.wanted(largest, spec, absmax)
        return tuple(nearest(scale, self.stored) for scale in wanted) if self.stored else wanted

    def of_moments(self, total: Tensor, squares: Tensor, spec: Options) -> Tensor:
        """The scale of blocks with these sums of values and of squares, float64 [groups, 1]."""
        raise NotImplementedError

    def block_scale(self, x: Tensor, spec: Options, absmax: Tensor) -> Tensor:
        """The scale of each block."""
        if spec.history:
            return absmax.reshape(1, 1)
        rows = spec.block.rows or 1 if spec.block else 1
        if self.follows is Follows.MOMENTS:
            return self.of_moments(sum_in_order(x.double(), rows), sum_in_order(x.double().square(), rows), spec)
        largest = absmax.reshape(1, 1) if spec.block == TENSOR else nan_max(x)
        if self.follows is Follows.LARGEST:
            return self.of_largest(largest, spec, absmax)
        best, *others = self.tried(largest, spec, absmax)
        error = self._error(x, best, spec, absmax, rows)
        for scale in others:
            best, error = better(best, error, scale, self._error(x, scale, spec, absmax, rows))
        return best

    def _error(self, x: Tensor, scale: Tensor, spec: Options, absmax: Tensor, rows: int) -> Tensor:
        factors = self.factors(scale, spec, absmax)
        error = (read_back(nearest(scaled(x, factors), spec.format.element), factors) - x).abs()
        return sum_in_order(error.square() if spec.error == "mse" else error, rows)

    def factors(self, scale: Tensor, spec: Options, absmax: Tensor) -> Factors:
        """The factors that values are multiplied and divided by."""
        return Factors(torch.ones((), dtype=torch.float32, device=scale.device) / scale, scale)

    def quantize(self, x: Tensor, spec: Options, absmax: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(values on the element's grid, scales, the values they represent). u: noise for stochastic rounding."""
        scale = self.block_scale(x, spec, absmax)
        factors = self.factors(scale, spec, absmax)
        values = round_to_element(scaled(x, factors), spec.format.element, spec.rounding, spec.overflow, u)
        return values, scale, read_back(values, factors)

    def multiplier(self, scale: Tensor, spec: Options, absmax: Tensor) -> Tensor:
        """float64: what a value on the element's grid is multiplied by, free of float32's rounding."""
        factors = self.factors(scale, spec, absmax)
        product = torch.ones((len(scale), 1), dtype=torch.float64, device=scale.device)
        for factor in (factors.scale, factors.outer):
            product = product if factor is None else product * factor.double()
        return product if factors.divisor is None else product / factors.divisor.double()

    def saturation(self, scale: Tensor | None, spec: Options, absmax: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """(left, right): an element saturates where |x| · left > its block's scale · right, both exact in float64.
        scale: None unless blocks have scales."""
        if spec.history:
            return absmax.double(), spec.format.max
        return 1.0, spec.format.max if self.saturates else math.inf

    def kernel_constant(self, spec: Options) -> float:
        """The number that `kernel` needs besides those of the element."""
        return 0.0

    def to_bytes(self, scale: Tensor) -> Tensor:
        """Scales [groups, n] as they are stored, uint8 [groups, bytes]."""
        if self.stored is None:
            return scale.float().contiguous().view(torch.uint8).reshape(len(scale), -1)
        return encode(scale, self.stored).to(torch.uint8)

    def from_bytes(self, stored: Tensor) -> Tensor:
        """The inverse of `to_bytes`."""
        if self.stored is None:
            return stored.view(torch.float32)
        return decode_table(self.stored).to(stored.device)[stored.long()]


def nearest(x: Tensor, element: Element) -> Tensor:
    """x on the element's grid: ties to even, saturating."""
    return round_to_element(x, element, RoundingMode.NEAREST, Overflow.SATURATE)


def better(scale: Tensor, error: Tensor, other: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The scale with the smaller error, and that error; the first one if they are equal."""
    closer = others < error
    return torch.where(closer, other, scale), torch.where(closer, others, error)


def scaled(x: Tensor, factors: Factors) -> Tensor:
    """The scaled values of x, which are then rounded."""
    return x if factors.encode is None else x * factors.encode


def read_back(values: Tensor, factors: Factors) -> Tensor:
    """The values represented by values on an element's grid, float32."""
    for factor in (factors.scale, factors.outer):
        values = values if factor is None else values * factor
    return values if factors.divisor is None else values / factors.divisor


def nan_unless_finite(x: Tensor) -> Tensor:
    """0 where x is finite, else NaN; added to a scale to make it NaN."""
    return x - x


def nan_max(x: Tensor) -> Tensor:
    """max|x| over the last axis, NaN if any is NaN; 0 for an empty axis. [groups, block] -> [groups, 1]"""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1))
    return x.abs().amax(-1, keepdim=True)


def pad_end(x: Tensor, dim: int, zeros: int) -> Tensor:
    """x with that many zeros at the end of axis `dim`; x itself for none, which torch's pad would copy."""
    return torch.cat((x, x.new_zeros(*x.shape[:dim], zeros, *x.shape[dim + 1 :])), dim) if zeros else x


def sum_in_order(x: Tensor, rows: int) -> Tensor:
    """[groups, rows · columns] -> [groups, 1]: each row added from left to right, then the rows as a binary tree."""
    columns = x.reshape(len(x), rows, -1).unbind(-1)
    total = columns[0]
    for column in columns[1:]:
        total = total + column
    while total.shape[1] > 1:
        half = (total.shape[1] + 1) // 2
        low, high = total[:, :half], total[:, half:]
        total = low + pad_end(high, 1, low.shape[1] - high.shape[1])
    return total
