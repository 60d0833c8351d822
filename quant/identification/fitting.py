"""Which elements and blocks explain a tensor, before any scale rule is tried.

In a block that was rounded with the scale s, each value q / s lies on the element's grid, and x / s lies less than a
step from it. The largest |q| of the block is s times one of the codes above a quarter of the largest, so that s is one
of a few numbers. An element whose grid is finer than the one that was used fails the second condition, a coarser one
the first. A few blocks decide, which makes this far cheaper than trying every scale rule.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from binade.quant.elements import Element
from binade.quant.reference import to_blocks
from binade.quant.specs import TENSOR, Block

GROUPS, VALUES = 12, 24
"""How many blocks of a sample are tested, and how many values of each."""
GOOD_VALUES, GOOD_GROUPS = 0.85, 0.3
"""Shares that must agree: kernels with a fault in some rows or values are not pruned."""
TOLERANCE = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative: what the dtype of q leaves of code · scale."""


@lru_cache(maxsize=64)
def magnitudes(element: Element) -> Tensor:
    """The distinct finite magnitudes of an element, ascending, float64."""
    values = sorted({abs(value) for value in element.finite_values})
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def neighbors(values: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """The largest magnitude of the grid that is at most |value|, and the next one, with the sign of the value: (lower,
    upper), values' dtype. They are equal for a value on the grid; beyond the largest, both are the largest."""
    table = magnitudes(element).to(values.device)
    size = values.abs().double()
    index = (torch.searchsorted(table, size, right=True) - 1).clamp(min=0)
    lower = table[index]
    upper = torch.where(lower == size, lower, table[(index + 1).clamp(max=len(table) - 1)])
    sign = values.double()
    return torch.copysign(lower, sign).to(values.dtype), torch.copysign(upper, sign).to(values.dtype)


def groups_of(x: Tensor, q: Tensor, block: Block | None) -> tuple[Tensor, Tensor]:
    """A few blocks of a sample [lines, axis], of each a few values, the largest |q| among them: float64 [groups,
    values]. Blocks without a finite nonzero q are left out."""
    x_groups, q_groups = (to_blocks(t, -1, block) for t in (x, q))
    if not x_groups.numel():
        return x_groups.double(), q_groups.double()
    used = (q_groups.isfinite().all(-1) & x_groups.isfinite().all(-1) & (q_groups != 0).any(-1)).nonzero().reshape(-1)
    chosen = used[torch.linspace(0, len(used) - 1, min(GROUPS, len(used))).long()]
    x_groups, q_groups = x_groups[chosen].double(), q_groups[chosen].double()
    if q_groups.shape[-1] > VALUES:
        places = torch.linspace(0, q_groups.shape[-1] - 1, VALUES - 1).long().expand(len(q_groups), -1)
        places = torch.cat((places, q_groups.abs().argmax(-1, keepdim=True)), -1)
        x_groups, q_groups = (t.gather(-1, places) for t in (x_groups, q_groups))
    return x_groups, q_groups


def fits(
    x: Tensor,
    q: Tensor,
    element: Element,
    fixed: bool,
    tolerance: float,
    *,
    absolute: float = 0.0,
    near: bool = True,
    least: float = 0.25,
) -> tuple[Tensor, Tensor]:
    """(share, scale) of each group [groups, values]: the largest share of values that one scale explains.

    fixed: the scale is 1. absolute: a further tolerance, relative to the largest value of the group. near: x / scale
    must lie less than a step from q / scale. least: the smallest code that the largest |q| may have, relative to the
    largest code.
    """
    table = magnitudes(element)
    top = q.abs().amax(-1, keepdim=True)
    scale = (
        torch.ones_like(top) if fixed else top / table[(table >= least * table[-1]) & (table > 0)]
    )  # [groups, scales]
    size = q.abs()[:, None] / scale[..., None]  # [groups, scales, values]
    index = torch.searchsorted((table[1:] + table[:-1]) / 2, size.contiguous())
    grid = table[index]
    good = (size - grid).abs() <= tolerance * grid + absolute * (top / scale)[..., None]
    if near:
        ends = torch.cat((table.new_tensor([-math.inf]), table, table.new_tensor([math.inf])))
        source = x.abs()[:, None] / scale[..., None]
        slack = 2.0**-6 * grid if fixed else tolerance * grid
        good &= (source > ends[index] - slack) & (source < ends[index + 2] + slack)
        good &= ((q.sign() == x.sign()) | (q == 0))[:, None]
    share, best = good.double().mean(-1).max(-1)
    return share, scale.gather(-1, best[:, None])[:, 0]


def explains(
    groups: tuple[Tensor, Tensor],
    element: Element,
    block: Block | None,
    dtype: torch.dtype,
    *,
    absolute: float = 0.0,
    near: bool = True,
) -> bool:
    """Whether an element with a scale for each block may have given q of this dtype from x: `groups_of` samples. block
    None: the scale is 1."""
    x, q = groups
    if not len(q):
        return True
    least = 0.0 if block == TENSOR else 0.25  # the absmax may be that of a larger tensor
    share, _ = fits(x, q, element, block is None, TOLERANCE[dtype], absolute=absolute, near=near, least=least)
    return bool((share >= GOOD_VALUES).double().mean() >= GOOD_GROUPS)
