"""The cheapest choice of specs under a budget: an integer linear program, solved by SciPy's HiGHS.

A choice is made once for each group of GEMMs: x[group, pair] is 1 for the pair of specs that its two operands take.

    minimize    Σ cost[group, pair] · x[group, pair]
    subject to  Σ over pairs of x[group, pair] = 1                        for each group
                Σ share[group, pair] · x[group, pair] ≤ budget

The share is of the bits that all groups take in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from binade.collector.advice.costs import BF16_BITS, GROUPS, AdviceError
from binade.collector.recipes.recipe import BF16
from binade.quant.specs import Spec


def family(spec: str) -> tuple[str, int | None]:
    """The family of a spec. A GEMM's operands need specs of one family: the same kind of scale, over equal runs."""
    if spec == BF16:
        return BF16, None
    chosen = Spec.of(spec)
    return str(chosen.format.scale_rules[0]), chosen.block.columns if chosen.block else None


def grouped(table: pd.DataFrame, by: str) -> pd.DataFrame:
    """Rows of `Costs.table` with group (the name of the GEMM that shares a choice) and first (which operand it is)."""
    is_linear = table["part"].isin(("linear", "router"))  # a recipe has one choice for the attention of all layers
    keys = [table["part"], *(table[name].where(is_linear, "") for name in GROUPS[by]), table["gemm"]]
    names = pd.concat(keys, axis=1).astype(str).agg(".".join, axis=1)
    first = table.groupby(["part", "gemm"])["field"].transform("min")
    return table.assign(group=names, first=table["field"] == first)


def pairs(table: pd.DataFrame, specs: Sequence[str], tiles: bool = False, alike: bool = False) -> pd.DataFrame:
    """The pairs of specs that each group's GEMMs can take: group, layer, a and b (the specs of the first and second
    operand), cost, bits, share (of all bits in bf16).

    table: of `grouped`. specs: those allowed besides bf16. tiles: weights are rounded in tiles only.
    alike: the two operands of a GEMM have one spec.
    """
    chosen = table[table["spec"].isin([*specs, BF16])]
    if tiles:
        fits = chosen["spec"].isin([BF16, *filter(_is_tile, specs)])
        chosen = chosen[(chosen["tensor_name"] != "weight") | fits]
    gemm = ["group", "part", "layer_index", "module", "gemm"]
    both = chosen[chosen["first"]].merge(chosen[~chosen["first"]], on=gemm)
    families = {spec: family(spec) for spec in (*specs, BF16)}
    both = both[both["spec_x"].map(families) == both["spec_y"].map(families)]
    both = both[both["spec_x"] == both["spec_y"]] if alike else both
    both = both.assign(cost=both["cost_x"] + both["cost_y"], bits=both["bits_x"] + both["bits_y"])
    summed = both.groupby(["group", "spec_x", "spec_y"], as_index=False).agg(
        layer=("layer_index", "first"), cost=("cost", "sum"), bits=("bits", "sum")
    )
    in_bf16 = summed.loc[summed["spec_x"] == BF16, "bits"].sum()
    return summed.rename(columns={"spec_x": "a", "spec_y": "b"}).assign(share=summed["bits"] / in_bf16)


def _is_tile(spec: str) -> bool:
    block = Spec.of(spec).block
    return block is not None and block.rows != 1


def choose(
    options: pd.DataFrame,
    *,
    share: float | None = None,
    cost: float | None = None,
    most_bf16: int | None = None,
) -> pd.DataFrame:
    """The rows of `pairs` that cost least with at most this share in total, or that have the smallest share and cost at
    most `cost`: one for each group. most_bf16: how many layers may have a GEMM in bf16.

    Raises AdviceError if nothing is within the limit.
    """
    groups, group = np.unique(options["group"], return_inverse=True)
    bf16 = options.index[options["a"] == BF16] if most_bf16 is not None else options.index[:0]
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
                "bits, or measure other formats and the groups that were not measured (--measure)"
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
