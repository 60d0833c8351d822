"""The cheapest choice of formats under a budget: an integer linear program, solved by SciPy's HiGHS.

x[group, format] is 1 for the format that the operands of a group take.

    minimize    Σ cost[group, format] · x[group, format]
    subject to  Σ over formats of x[group, format] = 1                       for each group
                Σ share[group, format] · x[group, format] ≤ budget

The share is of the bits that all groups take in bf16.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from binade.collector.errors import AdviceError
from binade.collector.recipes.recipe import BF16

BF16_BITS = 16.0


def choose(
    options: pd.DataFrame,
    *,
    share: float | None = None,
    cost: float | None = None,
    most_bf16: int | None = None,
) -> pd.DataFrame:
    """The rows that cost least with at most this share in total, or that have the smallest share and cost at most
    `cost`: one for each group. most_bf16: how many layers may have a product in bf16.

    options: group, layer, format, cost and share, a row for each format that a group can take

    Raises AdviceError if nothing is within the limit.
    """
    groups, group = np.unique(options["group"], return_inverse=True)
    bf16 = options.index[options["format"] == BF16] if most_bf16 is not None else options.index[:0]
    layers, layer = np.unique(options.loc[bf16, "layer"], return_inverse=True)
    number, size = len(options), len(options) + len(layers)  # one more variable for each layer: 1 if it uses bf16
    unit = options["cost"].max() or 1.0  # HiGHS compares with a tolerance of 1e-6, so costs are scaled
    costs, shares = (
        np.concatenate([column, np.zeros(len(layers))]) for column in (options["cost"] / unit, options["share"])
    )
    one_each = csr_array((np.ones(number), (group, np.arange(number))), shape=(len(groups), size))
    limits = [LinearConstraint(one_each, 1, 1)]
    if share is not None:
        limits.append(LinearConstraint(shares[None], -np.inf, share))
    if cost is not None:
        limits.append(LinearConstraint(costs[None], -np.inf, cost / unit))
    if most_bf16 is not None:
        row = np.arange(len(bf16))
        places = np.concatenate([row, row]), np.concatenate([bf16, number + layer])
        ties = csr_array((np.repeat([1.0, -1.0], len(bf16)), places), shape=(len(bf16), size))
        total = (np.arange(size) >= number).astype(float)
        limits += [LinearConstraint(ties, -np.inf, 0), LinearConstraint(total[None], -np.inf, most_bf16)]
    objective, whole = costs if share is not None else shares, np.ones(size, dtype=int)
    solved = milp(objective, integrality=whole, bounds=Bounds(0, 1), constraints=limits, options={"mip_rel_gap": 1e-4})
    if solved.status == 2:
        if share is not None and share < (least := least_share(options)):
            raise AdviceError(
                f"a budget of {_bits(share)} cannot be met: what was measured takes at least {_bits(least)}; give more "
                "bits, or measure narrower formats and the groups that were not measured"
            )
        limit = _bits(share) if share is not None else f"a measured cost of {cost:g}"
        also = f" with at most {most_bf16} layers in bf16" if most_bf16 is not None else ""
        raise AdviceError(f"no choice satisfies {limit}{also}: raise the limit")
    if solved.x is None:
        raise AdviceError(f"no choice was found: {solved.message}")
    choice: pd.DataFrame = options[solved.x[:number] > 0.5]
    return choice


def least_share(options: pd.DataFrame) -> float:
    """The smallest share that any choice takes."""
    return float(options.groupby("group")["share"].min().sum())


def _bits(share: float) -> str:
    return f"{BF16_BITS * share:.4g} bits"
