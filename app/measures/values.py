"""The errors of operands in a format, the scale of a whole tensor, and the statistics of their values."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pandas as pd

from binade.app.measures.cells import HUGE, PLACE, deciles, product
from binade.app.measures.map_measure import CellQuery, MapMeasure, if_any
from binade.app.questions.shared.operands import OTHER, along
from binade.app.view.budget import SCORE, RoundingCost, check
from binade.data.index.catalog import SHOWN_ERRORS, STATISTICS, USED, Catalog, CatalogError, format_condition, quantiles
from binade.data.run.store import TensorFileError
from binade.data.run.tensor_kinds import has_tokens
from binade.data.words.fields import MEASURES
from binade.data.words.filter import Filter
from binade.data.words.text import counted
from binade.quant.metrics import score
from binade.quant.normal import VS_NORMAL, normal_sqnr
from binade.quant.specs import Spec

TENSOR_SCALE = "tensor_scale"
ERRORS = (VS_NORMAL, *SHOWN_ERRORS)
SHARES = ("flush_to_zero", "saturated", "flushed_error_share", "saturated_error_share")
WITHOUT_SPEC = """
    SELECT key, gemm, used, mse, {metric} FROM score UNION ALL
    SELECT key, gemm, true, mse, {metric} FROM tensor WHERE format IS NULL AND mse IS NOT NULL
"""
"""The scores, and the errors of tensors whose format is no spec, such as the weights of AWQ in an audit."""
ENDS = {"sqnr_db": (0.0, 40.0), VS_NORMAL: (-6.0, 6.0)} | dict.fromkeys(SHARES, (0.0, 1.0))


def cells(metric: str, query: CellQuery) -> pd.DataFrame:
    """The median of the tensors' own values, and their 10th and 90th percentile."""
    catalog, across, fmt = query.opened, query.across, query.format
    condition, parameters = catalog.condition(query.where)
    worst = "arg_min" if metric in ("sqnr_db", VS_NORMAL) else "arg_max"
    of_value: list[Any] = []
    broken = "false"
    if metric in ERRORS:
        value, source = f"score.{metric}", "score JOIN tensor USING (key)"
        if fmt == USED and metric != VS_NORMAL:
            source = f"({WITHOUT_SPEC.format(metric=metric)}) AS {source}"
        if metric == VS_NORMAL:
            value = "score.sqnr_db - map_extract(map(?::VARCHAR[], ?::DOUBLE[]), score.format)[1]"
            formats = catalog.scored_formats(query.where) if fmt == USED else [str(Spec.of(fmt))]
            of_value = [formats, [normal_sqnr(name) for name in formats]]
        broken = "(isnan(score.mse) OR isnan(rms))"
        value = f"CASE WHEN NOT {broken} THEN {value} END"
        only, chosen = format_condition(fmt)
        parameters = [*parameters, *chosen]
    elif metric == TENSOR_SCALE:
        value, source = "score.tensor_scale", "score JOIN tensor USING (key)"
        only = "score.used AND score.tensor_scale IS NOT NULL"
    else:  # a tensor has one value in all GEMMs that take it, whatever the format
        value = STATISTICS[metric]
        broken = f"(nans + infs > 0 AND isnan({value}))"
        source = "tensor LEFT JOIN (SELECT DISTINCT key, gemm, true AS scored FROM score) AS score USING (key)"
        only = "(tensor.contracted_axis IS NOT NULL OR scored)"
    return catalog.ask(
        f"""
        WITH operand AS (
            SELECT coalesce(score.gemm, tensor.gemm, '{OTHER}') AS gemm, {product()} AS product,
                   coalesce(tensor.tensor_name, 'unnamed') AS tensor,
                   CASE WHEN tensor.module = ? THEN tensor.expert END AS expert, tensor.{across}, key, {value} AS value,
                   {broken} AS broken
            FROM {source} WHERE {condition} AND {only} AND tensor.layer_index IS NOT NULL
        ), found AS (
            SELECT gemm, product, tensor, expert, {across}, {quantiles("value")}, count(*) AS tensors,
                   count(*) FILTER (broken) AS broken,
                   coalesce(min(key) FILTER (broken), {worst}(key, value) FILTER (NOT isnan(value)), min(key)) AS key
            FROM operand GROUP BY ALL
        )
        SELECT found.* EXCLUDE (key) RENAME (value_low AS low, value_high AS high), tensor_id
        FROM found JOIN tensor USING (key) ORDER BY ALL
        """,
        [query.expanded, *of_value, *parameters],
    )


def computed(metric: str, query: CellQuery) -> tuple[pd.DataFrame, int]:
    """`cells` of an error in a format that nothing was scored in, from the values on disk: (the cells, tensors with
    values). Raises BudgetError."""
    if metric == VS_NORMAL:
        table, tensors = computed("sqnr_db", query)
        less = normal_sqnr(query.format)
        return table.assign(**{name: table[name] - less for name in ("value", "low", "high") if name in table}), tensors
    catalog, across = query.opened, query.across
    condition, parameters = catalog.condition(query.where)
    operands = catalog.ask(
        f"""
        SELECT coalesce(scored.gemm, tensor.gemm, '{OTHER}') AS gemm, {product()} AS product,
               coalesce(tensor_name, 'unnamed') AS tensor, CASE WHEN module = ? THEN expert END AS expert, {across},
               tensor_id, shape, contracted_axis, layer_type, tensor.gemm AS own_gemm
        FROM tensor LEFT JOIN (SELECT DISTINCT key, gemm FROM score) AS scored USING (key)
        WHERE {condition} AND path IS NOT NULL AND numel > 0 AND layer_index IS NOT NULL
              AND (contracted_axis IS NOT NULL OR scored.key IS NOT NULL)
        ORDER BY ALL
        """,
        [query.expanded, *parameters],
    )
    spec = Spec.of(query.format)
    if spec.centered:
        operands = operands.loc[[*map(has_tokens, operands["layer_type"], operands["tensor"])]]
    if operands.empty:
        return operands, 0
    check((RoundingCost(spec, tuple(shape), -1) for shape in operands["shape"]), SCORE)
    rows = []
    for tensor_id, gemms in operands.groupby("tensor_id"):
        try:
            x = catalog.load(str(tensor_id))
        except (CatalogError, TensorFileError):
            continue
        for operand in gemms.to_dict("records"):
            part, dim = along(x, operand | {"gemm": operand["own_gemm"]}, operand["gemm"])
            errors = score(part, spec, dim)
            rows.append(operand | {"value": getattr(errors, metric), "broken": math.isnan(errors.mse)})
    by = [*PLACE, across]
    values = pd.DataFrame(rows, columns=[*operands, "value", "broken"]).astype({"value": float})
    if values.empty:
        return values, 0
    values = values.assign(value=values["value"].clip(-HUGE, HUGE).mask(values["broken"]))
    groups = values.sort_values("value", ascending=metric == "sqnr_db", kind="stable").groupby(by, dropna=False)
    table = deciles(groups["value"])
    table["tensors"], table["tensor_id"] = groups.size(), groups["tensor_id"].first()
    table["broken"] = groups["broken"].sum().astype(int)
    return table.reset_index().astype({across: int}), values["tensor_id"].nunique()


def no_error(opened: Catalog, where: Filter, fmt: str) -> str:
    if fmt == USED:
        return _nothing_used(opened, where)
    if not fmt:
        return _without_spec(opened, where) or (
            "No operand is scored in any format. Choose a statistic of the values, such as absmax, as metric."
        )
    if formats := ", ".join(opened.scored_formats(where)):
        return f"The operands are scored in {formats}, not in {fmt}, and have no values on disk to round to it."
    if operands := int(opened.operands(where)["tensors"].sum()):
        return (
            f'The {operands:,} selected operands were recorded with scores=() or --scores "": none is scored. Choose a '
            "statistic of the values, such as absmax, as metric."
        )
    return no_operand(opened, where, fmt)


def no_operand(opened: Catalog, where: Filter, fmt: str) -> str:
    return f"The filter selects no operand of a GEMM: {where.sentence()}."


def _nothing_used(opened: Catalog, where: Filter) -> str:
    """Why no operand has an error as used, by the rows of the tensors: of one with NaN or Inf there is none."""
    condition, parameters = opened.condition(where)
    known = opened.ask(
        """
        SELECT count(*) AS rounded, count(*) FILTER (isnan(sqnr_db) AND nans + infs > 0) AS broken FROM tensor"""
        f" WHERE format IS NOT NULL AND {condition}",
        parameters,
    )
    rounded, broken = (int(known[name].iloc[0]) for name in ("rounded", "broken"))
    if broken:
        return (
            f"{broken:,} of {counted(rounded, 'rounded operand')} hold NaN or Inf and have no error: choose an earlier "
            "iteration, or a statistic of the values, such as absmax, as metric."
        )
    if rounded:
        return f"{counted(rounded, 'operand')} were rounded, without a recorded error: choose a format instead."
    return _without_spec(opened, where) or (
        "None of these operands was rounded when it was recorded: choose a format instead of “as used”."
    )


def _without_spec(opened: Catalog, where: Filter) -> str:
    """How many weights have an error and no format, as an audit finds them, or ""."""
    condition, parameters = opened.condition(where)
    found = opened.ask(
        f"SELECT count(*) AS n FROM tensor WHERE format IS NULL AND mse IS NOT NULL AND {condition}", parameters
    )
    if not (count := int(found["n"].iloc[0])):
        return ""
    return (
        f"{counted(count, 'weight')} differ from the original by a measured error, but no format here has their codes, "
        "so normal values have no error to compare with: choose “as used” as format and SQNR as color."
    )


def _no_scale(opened: Catalog, where: Filter, fmt: str) -> str:
    return "No operand was rounded with one scale for the whole tensor: choose a run of a recipe that does so."


OF_ERRORS = tuple(
    MapMeasure(
        measure=MEASURES[name], cells=partial(cells, name), nothing=no_error, of_format=True, ends=ENDS.get(name),
        neutral=0.0 if name == VS_NORMAL else None, recorded=if_any("tensor WHERE contracted_axis IS NOT NULL"),
    )
    for name in ERRORS
)  # fmt: skip
OF_TENSOR_SCALE = MapMeasure(
    measure=MEASURES[TENSOR_SCALE], cells=partial(cells, TENSOR_SCALE), nothing=_no_scale,
    recorded=if_any("score WHERE used AND tensor_scale IS NOT NULL"),
)  # fmt: skip
OF_STATISTICS = tuple(
    MapMeasure(measure=MEASURES[name], cells=partial(cells, name), nothing=no_operand) for name in STATISTICS
)
