"""The error of one GEMM's result from rounding its operands, and from adding their products with fewer bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from binade.data.index.catalog import Catalog, CatalogError
from binade.data.index.cubes import same
from binade.data.index.score_queries import MICRO_BATCH
from binade.data.run.store import TensorFileError
from binade.data.run.tensor_kinds import Gemm
from binade.quant.accumulation import ACCUMULATORS, coded, matmul
from binade.quant.metrics import sqnr_db
from binade.quant.reference import absmax_over
from binade.quant.specs import TENSOR, Spec, SpecError

SAMPLE = 64  # rows and columns of a result that are computed
PLACE = ("layer_index", "module", "expert", "rank", *MICRO_BATCH)
# The operands of each GEMM, and whether it contracts their first axis, which is that of tokens or outputs.
OPERANDS = {
    Gemm.FORWARD: {"input": False, "weight": False},
    Gemm.DGRAD: {"grad_output": False, "weight": True},
    Gemm.WGRAD: {"grad_output": True, "input": True},
}


class MissingError(Exception):
    """The result cannot be computed again. The message says why."""


@dataclass(frozen=True)
class OperandLines:
    """Some lines of an operand along its contracted axis: their values, and what they are rounded to. Tensors as in
    `accumulation.coded`."""

    exact: Tensor
    values: Tensor
    scales: Tensor
    run: int

    @property
    def rounded(self) -> Tensor:
        spread = self.scales.double().repeat_interleave(self.run, 1)
        return self.values.double() * spread[:, : self.values.shape[1]]


def accumulated(opened: Catalog, tensor_id: str) -> tuple[pd.DataFrame, str, list[str]]:
    """Compute a part of a linear layer's result again from its operands on disk, each rounded as the run rounded it.

    Returns (a table with a row for the recorded result, for exact addition and for each accumulator: title, result_db,
    the SQNR against the product of the unrounded operands, and sums_db, against the exact product of the rounded ones;
    what was computed; the titles of the accumulators that cannot apply the scales). Raises MissingError.
    """
    (x, spec_x), (y, spec_y) = _operands(opened, tensor_id)
    if x.shape[1] != y.shape[1]:
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise MissingError(f"The recorded operands, {shapes} with the contracted axis last, cannot be multiplied.")
    try:
        a, b = lines(x, spec_x), lines(y, spec_y)
    except SpecError as error:
        raise MissingError(f"The {error}.") from None
    if a.run != b.run:
        raise MissingError(f"The scales of the operands, {spec_x} and {spec_y}, differ along the contracted axis.")
    table, unfit = compared(a, b)
    table.loc[-1] = ["as recorded, all values", opened.rows_of([tensor_id])["result_sqnr_db"][0], math.nan]
    what = (
        f"{len(a.values):,} of {len(x):,} rows and {len(b.values):,} of {len(y):,} columns, evenly spaced; each result "
        f"is a sum of {x.shape[1]:,} products, of {spec_x} and {spec_y}"
    )
    return table.sort_index(ignore_index=True), what, unfit


def compared(a: OperandLines, b: OperandLines) -> tuple[pd.DataFrame, list[str]]:
    """The errors of a product: the rows of `accumulated` that are computed, and the accumulators that are not."""
    unrounded, rounded = a.exact.double() @ b.exact.double().T, a.rounded @ b.rounded.T
    results, unfit = {"exact": rounded}, []
    for how in ACCUMULATORS.values():
        try:
            results[how.title] = matmul(a.values, b.values.T, how, a.scales, b.scales.T, a.run).double()
        except ValueError:
            unfit.append(how.title)
    rows = [(title, _sqnr(unrounded, result), _sqnr(rounded, result)) for title, result in results.items()]
    return pd.DataFrame(rows, columns=["title", "result_db", "sums_db"]), unfit


def _operands(opened: Catalog, tensor_id: str) -> list[tuple[Tensor, Spec]]:
    """The two operands of the GEMM as [lines, contracted axis], with the specs that the run rounded them to."""
    rows = opened.ask(
        f"""
        SELECT tensor.tensor_id, tensor.tensor_name, score.format, result.gemm
        FROM tensor AS result JOIN tensor ON {same("tensor", "result", PLACE)} JOIN score
             ON score.key = tensor.key AND score.gemm = result.gemm AND score.used
        WHERE result.tensor_id = ? AND result.layer_type = 'linear' AND tensor.layer_type = 'linear'
        """,
        [tensor_id],
    )
    if len(rows) != 2:
        raise MissingError("This needs a GEMM of a linear layer of which both operands were rounded and recorded.")
    recorded = {str(row["tensor_name"]): row for row in rows.to_dict("records")}
    operands = []
    for name, contracts_first in OPERANDS[Gemm(rows["gemm"][0])].items():
        try:
            x = opened.load(str(recorded[name]["tensor_id"])).flatten(0, -2)
        except (CatalogError, TensorFileError) as error:
            raise MissingError(f"The values of the operand {name} cannot be read: {error}.") from None
        operands.append((x.T if contracts_first else x, Spec.of(str(recorded[name]["format"]))))
    return operands


def lines(x: Tensor, spec: Spec) -> OperandLines:
    """At most SAMPLE lines of x, evenly spaced, rounded with the scales of the whole tensor."""
    chosen = torch.arange(0, len(x), -(-len(x) // SAMPLE) or 1)
    absmax = absmax_over(x, -1, TENSOR) if spec.block == TENSOR else None
    height = (spec.block.rows if spec.block else None) or 1
    if height == 1:
        return OperandLines(x[chosen], *coded(x[chosen], spec, absmax))
    parts = []
    for tile in torch.unique(chosen // height).tolist():
        values, scales, run = coded(x[tile * height : (tile + 1) * height], spec)
        inside = chosen[chosen // height == tile] - tile * height
        parts.append((values[inside], scales[inside]))
    values, scales = map(torch.cat, zip(*parts, strict=True))
    return OperandLines(x[chosen], values, scales, run)


def _sqnr(x: Tensor, y: Tensor) -> float:
    return sqnr_db(float(x.square().sum()), float((y - x).square().sum()))
