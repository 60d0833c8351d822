"""Operands: a tensor in one of the GEMMs that take it, each of which contracts its own axis and rounds along it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from torch import Tensor

from binade.app.view.params import Interval
from binade.data.index.catalog import USED, Catalog, format_condition
from binade.data.run.tensor_kinds import OPERANDS, PRODUCT_KINDS, Gemm
from binade.data.words.filter import Filter
from binade.quant.normal import normal_sqnr

GEMMS = tuple(gemm.value for gemm in Gemm)
OTHER = "other"  # where a tensor is the operand of no known GEMM
MOST_LISTED = 5000  # tensors of a ranking


def along(x: Tensor, row: Mapping[Any, Any] | pd.Series, gemm: str) -> tuple[Tensor, int]:
    """(the values, the axis that this GEMM contracts). A tensor's own GEMM contracts the recorded axis; the other GEMM
    that takes it contracts its other axis: of a linear layer the tokens of all sequences together."""
    axis = -1 if pd.isna(row["contracted_axis"]) else int(row["contracted_axis"])
    if gemm not in GEMMS or pd.isna(row["gemm"]) or gemm == row["gemm"] or x.dim() < 2:
        return x, axis
    if row["layer_type"] == "linear":
        return x.flatten(0, -2), 0
    return x, -2 if axis == -1 else -1


def role_of(row: Mapping[Any, Any] | pd.Series) -> str:
    """What a tensor is of its own GEMM, "operand" or "result"."""
    kind = PRODUCT_KINDS.get((row["layer_type"], row["tensor_name"]))
    of_result = pd.isna(row["contracted_axis"]) if kind is None else kind.observed in OPERANDS
    return "result" if of_result else "operand"


def operand(tensor_id: str | None, gemm: object) -> dict[str, str | None]:
    """A tensor in a GEMM, as parameters of a view; no GEMM if it is OTHER or unknown."""
    return {"tensor": tensor_id, "gemm": str(gemm) if gemm in GEMMS else None}


def scores_in(opened: Catalog, tensor_id: str, gemm: str) -> pd.DataFrame:
    """The errors of each format in one GEMM, and how it rounded: format, gemm, used, sqnr_db, the shares of the error,
    tensor_scale, noise_seed, sign_seed, second_sqnr_db; the highest SQNR first."""
    table = opened.ask(
        "SELECT score.format, score.gemm, score.used, score.sqnr_db, score.flushed_error_share,"
        " score.saturated_error_share, score.tensor_scale, score.noise_seed, score.sign_seed,"
        " score.second_sqnr_db"
        " FROM score JOIN tensor USING (key) WHERE tensor_id = ?",
        [tensor_id],
    )
    table = table[table["gemm"] == gemm] if gemm in GEMMS else table[table["gemm"].isna()]
    return table.sort_values("sqnr_db", ascending=False, ignore_index=True)


def gemms_of(opened: Catalog, row: pd.Series) -> tuple[str, ...]:
    """The GEMMs that take a tensor, as far as it was scored in them, or the one that computes it, its own first."""
    recorded = [] if pd.isna(row["gemm"]) else [str(row["gemm"])]
    scored = opened.scores_of([str(row["tensor_id"])])["gemm"].dropna()
    return tuple(dict.fromkeys([*recorded, *(gemm for gemm in GEMMS if gemm in set(scored))]))


NOTHING_SCORED = """scored AS (SELECT 0 AS key, '' AS gemm, '' AS format, 0.0 AS sqnr_db, 0.0 AS flush_to_zero,
                                   0.0 AS saturated, 0.0 AS delta WHERE false)"""


def _scored(catalog: Catalog, where: Filter, fmt: str) -> tuple[str, list[Any]]:
    """SQL of the table `scored`, one row per operand: key, gemm, format, sqnr_db, delta (SQNR minus that of normal
    values), shares flushed and saturated; and its parameters. An operand with NaN or Inf has a delta of -inf, one that
    is all zero has none."""
    condition, parameters = catalog.condition(where)
    formats = catalog.scored_formats(where) if fmt == USED else [fmt]
    of_format, chosen = format_condition(fmt)
    sql = f"""scored AS (
        SELECT key, coalesce(score.gemm, '{OTHER}') AS gemm, score.format, score.sqnr_db, score.flush_to_zero,
               score.saturated,
               CASE WHEN isnan(score.mse) OR isnan(rms) THEN '-inf'::DOUBLE WHEN isnan(score.sqnr_db) THEN NULL
                    ELSE score.sqnr_db - map_extract(map(?::VARCHAR[], ?::DOUBLE[]), score.format)[1] END AS delta
        FROM score JOIN tensor USING (key) WHERE {of_format} AND {condition}
    )"""
    return sql, [formats, [normal_sqnr(spec) for spec in formats], *chosen, *parameters]


def ranked_tensors(
    catalog: Catalog, where: Filter, fmt: str, within: Interval | None = None, most: int = MOST_LISTED, after: int = 0
) -> pd.DataFrame:
    """The tensors of the selection, the one that loses most in a format, or USED, first; then those that it was not
    scored in. Columns tensor_id, the fields of a place, gemm (in which it loses most), format, sqnr_db, delta (SQNR
    minus that of normal values in that format; -inf for NaN or Inf among the values), flush_to_zero, saturated,
    operands (in how many GEMMs it was scored).

    within  only tensors with an operand whose delta is in this range
    after   how many that come first are left out"""
    condition, parameters = catalog.condition(where)
    scored, scored_parameters = _scored(catalog, where, fmt) if fmt else (NOTHING_SCORED, [])
    inside, ends = ("WHERE delta >= ? AND delta < ?", [within.low, within.high]) if within else ("", [])
    return catalog.ask(
        f"""
        WITH {scored}, worst AS (
            SELECT key, count(*) AS operands, min(delta) AS delta, arg_min(gemm, coalesce(delta, 'inf')) AS gemm,
                   arg_min(format, coalesce(delta, 'inf')) AS format,
                   arg_min(sqnr_db, coalesce(delta, 'inf')) AS sqnr_db,
                   arg_min(flush_to_zero, coalesce(delta, 'inf')) AS flush_to_zero,
                   arg_min(saturated, coalesce(delta, 'inf')) AS saturated
            FROM scored {inside} GROUP BY key
        )
        SELECT tensor.tensor_id, layer_index, module, layer_type, operation, phase, tensor_name, iteration, micro_batch,
               rank, expert, recipe, quant_type, stage, run_id, numel, absmax, std,
               worst.gemm, worst.format, worst.sqnr_db, worst.delta, worst.flush_to_zero, worst.saturated,
               coalesce(worst.operands, 0) AS operands
        FROM tensor {"" if within else "LEFT"} JOIN worst USING (key) WHERE {condition}
        ORDER BY worst.delta NULLS LAST, worst.operands IS NULL, layer_index, module, tensor_name, tensor_id
        LIMIT ? OFFSET ?
        """,
        [*scored_parameters, *ends, *parameters, most, after],
    )
