"""A metric of each operand of each GEMM, by layer or by iteration, as the cells of a map."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from binade.app.budget import SCORE, RoundingCost, check
from binade.app.questions.shared.operands import GEMMS, OTHER, along
from binade.data.catalog import SHOWN_ERRORS, STATISTICS, USED, Catalog, CatalogError, format_condition, part, quantiles
from binade.data.evidence import Measure
from binade.data.fields import MODULES
from binade.data.filter import Filter
from binade.data.names import name_of
from binade.data.parity_results import Parity, read_parity
from binade.data.runs import RunError
from binade.data.store import TensorFileError
from binade.data.student import quantile
from binade.data.tensor_kinds import TENSOR_KINDS, Gemm, has_tokens
from binade.quant.block_histograms import BLOCK_MEASURES
from binade.quant.metrics import score
from binade.quant.normal import VS_NORMAL, normal_sqnr
from binade.quant.specs import Spec

EFFECT, RESULT, SPREAD = "effect", "result_sqnr_db", "scale_spread"
TENSOR_SCALE, PARITY = "tensor_scale", "parity_change"
OVER_SEQUENCES = {
    EFFECT: "95% interval over sequences",
    PARITY: "95% interval over sequences",
}
"""The metrics whose cells are means over sequences, with what the interval of a cell is."""
# What a map can show: of a format, the errors first; then statistics of the values, which depend on no format.
ERRORS = (VS_NORMAL, *SHOWN_ERRORS)
METRICS = (*ERRORS, EFFECT, PARITY, RESULT, SPREAD, TENSOR_SCALE, *STATISTICS)
RESULTS = {"qk": "attention_scores"}  # the result of a product, where it is not called output
# The products in the order of the network: modules, and the two products of attention.
PRODUCTS = tuple(name for module in MODULES for name in (("QK", "PV") if module == "core" else (module,)))
# The operands of a GEMM: the gradient first, then the first operand of the forward product, then the second.
_OBSERVED = ("grad", "a", "b")
_OPERANDS = {kind.name: _OBSERVED.index(kind.observed) for kind in TENSOR_KINDS if kind.observed in _OBSERVED}
LAYER, ITERATION = "layer_index", "iteration"
PRODUCT = ["part", "layer_index", "module"]  # what a product is known by
HUGE = 1e300  # stands for infinity, between which and a number pandas finds no quantile
EXTREMES = 0.01  # of the blocks at each end that the spread of scales leaves out


def of(metric: str) -> str:
    """What the cells of a metric are of: operands, or the results that products are shown by."""
    return "result" if metric in (RESULT, EFFECT, PARITY) else "operand"


@dataclass(frozen=True)
class MapRow:
    """An operand of a GEMM in all layers. product: its module, or QK or PV; expert: "" for all together."""

    gemm: str
    product: str
    tensor: str
    expert: str = ""

    @property
    def key(self) -> str:
        return "/".join(filter(None, (self.gemm, self.product, self.tensor, self.expert)))

    @property
    def order(self) -> tuple[int, int, str, int, str, str]:
        known = PRODUCTS.index(self.product) if self.product in PRODUCTS else len(PRODUCTS)
        gemm = (*GEMMS, OTHER).index(self.gemm)
        return gemm, known, self.product, _OPERANDS.get(self.tensor, 3), self.tensor, self.expert.zfill(6)


def cells(catalog: Catalog, where: Filter, fmt: str, metric: str, across: str, expanded: str = "") -> pd.DataFrame:
    """The cells of a map: gemm, product, tensor, expert, `across` (layer_index or iteration), value, low, high, tensors
    (how many), broken (how many of these have no value because of NaN or Inf), tensor_id (of the worst).

    value is the median of the tensors' own values, low and high their 10th and 90th percentile; of a measured
    effect they are its 95% interval over sequences.
    expanded: the product whose experts have rows of their own. Tensors of no layer are left out.
    """
    if metric == EFFECT:
        table = _effects(catalog, where, fmt)
    elif metric == PARITY:
        table = _parity(catalog, where)
    elif metric == RESULT:
        table = _results(catalog, where, across)
    elif metric == SPREAD:
        table = _spreads(catalog, where, fmt, across)
    else:
        table = _values(catalog, where, fmt, metric, across, expanded)
    table = table if "broken" in table else table.assign(broken=0)
    return table.dropna(subset=[across]).reset_index(drop=True).astype({across: int})


def _against_normal(table: pd.DataFrame, fmt: str) -> pd.DataFrame:
    """Cells of SQNR as those of VS_NORMAL."""
    return table.assign(**{name: table[name] - normal_sqnr(fmt) for name in ("value", "low", "high") if name in table})


def _values(catalog: Catalog, where: Filter, fmt: str, metric: str, across: str, expanded: str = "") -> pd.DataFrame:
    condition, parameters = catalog.condition(where)
    worst = "arg_min" if metric in ("sqnr_db", VS_NORMAL) else "arg_max"
    of_value: list[Any] = []
    broken = "false"
    if metric in ERRORS:
        value, source = f"score.{metric}", "score JOIN tensor USING (key)"
        if metric == VS_NORMAL:
            value = "score.sqnr_db - map_extract(map(?::VARCHAR[], ?::DOUBLE[]), score.format)[1]"
            formats = catalog.scored_formats(where) if fmt == USED else [str(Spec.of(fmt))]
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
            SELECT coalesce(score.gemm, tensor.gemm, '{OTHER}') AS gemm, {_product()} AS product,
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
        [expanded, *of_value, *parameters],
    )


def computed(
    catalog: Catalog, where: Filter, fmt: str, metric: str, across: str, expanded: str = ""
) -> tuple[pd.DataFrame, int]:
    """`cells` of an error in a format that nothing was scored in, from the values on disk: (the cells, tensors with
    values). Raises BudgetError."""
    if metric == VS_NORMAL:
        table, tensors = computed(catalog, where, fmt, "sqnr_db", across, expanded)
        return _against_normal(table, fmt), tensors
    condition, parameters = catalog.condition(where)
    operands = catalog.ask(
        f"""
        SELECT coalesce(scored.gemm, tensor.gemm, '{OTHER}') AS gemm, {_product()} AS product,
               coalesce(tensor_name, 'unnamed') AS tensor, CASE WHEN module = ? THEN expert END AS expert, {across},
               tensor_id, shape, contracted_axis, layer_type, tensor.gemm AS own_gemm
        FROM tensor LEFT JOIN (SELECT DISTINCT key, gemm FROM score) AS scored USING (key)
        WHERE {condition} AND path IS NOT NULL AND numel > 0 AND layer_index IS NOT NULL
              AND (contracted_axis IS NOT NULL OR scored.key IS NOT NULL)
        ORDER BY ALL
        """,
        [expanded, *parameters],
    )
    spec = Spec.of(fmt)
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
    by = ["gemm", "product", "tensor", "expert", across]
    values = pd.DataFrame(rows, columns=[*operands, "value", "broken"]).astype({"value": float})
    if values.empty:
        return values, 0
    values = values.assign(value=values["value"].clip(-HUGE, HUGE).mask(values["broken"]))
    groups = values.sort_values("value", ascending=metric == "sqnr_db", kind="stable").groupby(by, dropna=False)
    table = _deciles(groups["value"])
    table["tensors"], table["tensor_id"] = groups.size(), groups["tensor_id"].first()
    table["broken"] = groups["broken"].sum().astype(int)
    return table.reset_index().astype({across: int}), values["tensor_id"].nunique()


def _product() -> str:
    """SQL for the product of a tensor: its module, or QK or PV."""
    return f"CASE WHEN {part()} IN ('QK', 'PV') THEN {part()} ELSE coalesce(tensor.module, 'none') END"


def _effects(catalog: Catalog, where: Filter, fmt: str) -> pd.DataFrame:
    """The measured effects of the products of the selection."""
    places = _products(catalog, where)
    effects = catalog.effects({run for runs in places["runs"] for run in runs})
    effects = effects[effects["format"] == fmt].drop_duplicates(PRODUCT)  # the longest
    margin = effects["change_error"].astype(float) * np.array([quantile(n - 1) for n in effects["sequences"]], float)
    return _of_products(places, effects.assign(value=effects["change"], margin=margin))


def _parity(catalog: Catalog, where: Filter) -> pd.DataFrame:
    """What each product of the selection changes alone, of the newest parity of the same model that has single
    products."""
    places, run_parity = parity_of(catalog, where)
    rows = [
        (gap.part, gap.layer_index, gap.module, gap.change.value, gap.change.value - gap.change.low, len(gap.changes))
        for gap in (run_parity[1].gaps if run_parity else ())
        if gap.is_product and gap.is_whole
    ]
    values = pd.DataFrame(rows, columns=[*PRODUCT, "value", "margin", "sequences"])
    return _of_products(places, values.astype({"layer_index": "Int32"}))


def parity_of(catalog: Catalog, where: Filter) -> tuple[pd.DataFrame, tuple[str, Parity] | None]:
    """(the products of the selection, the newest parity of the same model with single products and its run)."""
    places = _products(catalog, where)
    for run_id in catalog.parities({run for runs in places["runs"] for run in runs}):
        with suppress(RunError, OSError):  # the index names damaged files
            parity = read_parity(catalog.root / run_id)
            if parity and any(gap.is_product for gap in parity.gaps):
                return places, (run_id, parity)
    return places, None


def _products(catalog: Catalog, where: Filter) -> pd.DataFrame:
    """The products of the selection: PRODUCT, product, tensor_id and runs."""
    condition, parameters = catalog.condition(where)
    return catalog.ask(
        f"""
        SELECT lower({part()}) AS part, {_product()} AS product, layer_index, tensor.module,
               arg_min(tensor_id, (phase <> 'post', tensor_id)) AS tensor_id, list(DISTINCT run_id) AS runs
        FROM tensor WHERE operation = 'forward' AND layer_index IS NOT NULL AND {condition} GROUP BY ALL
        """,
        parameters,
    )


def _of_products(places: pd.DataFrame, values: pd.DataFrame) -> pd.DataFrame:
    """Cells of values of products, each in the row of its result. values: PRODUCT, value, margin, sequences."""
    table = values[[*PRODUCT, "value", "margin", "sequences"]].merge(places, on=PRODUCT)
    margin = table["margin"].astype(float).replace(math.inf, math.nan)  # of one sequence
    return table.assign(
        gemm=Gemm.FORWARD.value, tensor=table["part"].map(RESULTS).fillna("output"), expert=None,
        low=table["value"] - margin, high=table["value"] + margin, tensors=table["sequences"],
    )[["gemm", "product", "tensor", "expert", LAYER, "value", "low", "high", "tensors", "tensor_id"]]  # fmt: skip


def _results(catalog: Catalog, where: Filter, across: str) -> pd.DataFrame:
    """Of the result of each GEMM, which has a row of its own."""
    condition, parameters = catalog.condition(where)
    return catalog.ask(
        f"""
        SELECT gemm, {_product()} AS product, tensor_name AS tensor, NULL AS expert, {across},
               {quantiles("result_sqnr_db")}, count(*) AS tensors,
               count(*) FILTER (isnan(result_sqnr_db) AND nans + infs > 0) AS broken,
               arg_min(tensor_id, result_sqnr_db) AS tensor_id
        FROM tensor WHERE result_sqnr_db IS NOT NULL AND layer_index IS NOT NULL AND {condition} GROUP BY ALL
        ORDER BY ALL
        """,
        parameters,
    ).rename(columns={"result_sqnr_db": "value", "result_sqnr_db_low": "low", "result_sqnr_db_high": "high"})


def _spreads(catalog: Catalog, where: Filter, fmt: str, across: str) -> pd.DataFrame:
    """The spread of the block scales of each operand, in binades, without the lowest and highest of EXTREMES."""
    condition, parameters = catalog.condition(where)
    bins = catalog.ask(
        f"""
        SELECT coalesce(tensor.gemm, '{OTHER}') AS gemm, {_product()} AS product, tensor.tensor_name AS tensor,
               tensor.{across}, tensor.tensor_id, bin, sum(count)::BIGINT AS count
        FROM block JOIN tensor USING (key)
        WHERE {condition} AND block.format = {"tensor.format" if fmt == USED else "?"} AND measure = 'scale_exponent'
              AND layer_index IS NOT NULL
        GROUP BY ALL ORDER BY ALL
        """,
        [*parameters, *([] if fmt == USED else [str(Spec.of(fmt))])],
    )
    by = ["gemm", "product", "tensor", across]
    columns = [*by, "expert", "value", "low", "high", "tensors", "tensor_id"]
    if bins.empty:
        return pd.DataFrame(columns=columns)
    counts = bins.groupby("tensor_id")["count"]
    total, through = counts.transform("sum"), counts.cumsum()
    inside = bins[(through / total > EXTREMES) & (through / total - bins["count"] / total < 1 - EXTREMES)]
    width = BLOCK_MEASURES["scale_exponent"].width
    spreads = inside.groupby([*by, "tensor_id"])["bin"].agg(lambda indices: (indices.max() - indices.min()) * width)
    groups = spreads.reset_index(name="value").sort_values("value", ascending=False).groupby(by, dropna=False)
    table = _deciles(groups["value"])
    table["tensors"], table["tensor_id"] = groups.size(), groups["tensor_id"].first()
    return table.reset_index().assign(expert=None)[columns]


def _deciles(groups: Any) -> pd.DataFrame:
    """value, low and high of each group: its median, 10th and 90th percentile. groups: a grouped column, without
    infinite values but ±HUGE."""
    shares = [0.1, 0.5, 0.9]
    deciles: pd.DataFrame = groups.quantile(np.array(shares)).unstack().reindex(columns=shares)
    deciles = deciles.mask(deciles > HUGE / 1e9, math.inf).mask(deciles < -HUGE / 1e9, -math.inf)
    return deciles.set_axis(["low", "value", "high"], axis=1)


def difference(table: pd.DataFrame, other: pd.DataFrame, across: str, measure: Measure) -> pd.DataFrame:
    """The cells of one table minus those of another, where both have a value; of a metric with a logarithmic axis, log₂
    of their ratio. value of the two: own and other."""
    by = ["gemm", "product", "tensor", "expert", across]
    both = table.merge(other[[*by, "value"]].rename(columns={"value": "other"}), on=by)
    values, others = both["value"].to_numpy(float), both["other"].to_numpy(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.log2(values / others) if measure.log else values - others
    return both.assign(own=values, value=np.where(np.isfinite(change), change, np.nan), low=np.nan, high=np.nan)


def rows_of(table: pd.DataFrame) -> list[MapRow]:
    """The rows of a map in the order of the network."""
    names = table[["gemm", "product", "tensor", "expert"]].drop_duplicates()
    return sorted(map(row_of, names.to_dict("records")), key=lambda row: row.order)


def row_of(cell: Mapping[Any, Any]) -> MapRow:
    """The row that a cell is in."""
    expert = "" if pd.isna(cell["expert"]) else str(int(cell["expert"]))
    return MapRow(str(cell["gemm"]), str(cell["product"]), str(cell["tensor"]), expert)


def with_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The cells with the column row, the key of their MapRow."""
    return table.assign(row=[row_of(cell).key for cell in table.to_dict("records")])


def kinds(table: pd.DataFrame) -> pd.DataFrame:
    """One row per kind of operand over all cells: kind ("fc1 grad output"), product, tensor, value (the median of the
    cells), low, high (their 10th and 90th percentile), tensors (how many cells), and layers or iterations (how many of
    these have a cell, whatever the number of GEMMs and experts); the GEMMs of an operand together."""
    known = table.dropna(subset=["value"])
    kind = [name_of(None, *operand) for operand in zip(known["product"], known["tensor"], strict=True)]
    known = known.assign(kind=kind, value=known["value"].clip(-HUGE, HUGE))
    groups = known.groupby(["kind", "product", "tensor"])["value"]
    ends = _deciles(groups)
    across, of = (LAYER, "layers") if LAYER in known else (ITERATION, "iterations")
    ends[of] = known.groupby(["kind", "product", "tensor"])[across].nunique()
    return ends.assign(tensors=groups.size()).reset_index()
