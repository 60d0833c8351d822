"""Queries about the formats that operands were scored in: their errors."""

from __future__ import annotations

import pandas as pd

from binade.data.index.cubes import same
from binade.data.index.opened import CatalogError, OpenIndex
from binade.data.run.columns import ERROR_COLUMNS
from binade.data.run.tensor_kinds import OF_ROUTER, TENSOR_KINDS, Product
from binade.data.words.fields import ERRORS as SHOWN_ERRORS
from binade.data.words.filter import Filter
from binade.quant.specs import Spec, known_specs

# The score along the axis of the tensor's own GEMM, not of another GEMM that also uses it.
OWN_SCORE = "score.gemm IS NOT DISTINCT FROM tensor.gemm"
USED = "used"  # in place of a format: the one that each GEMM rounded its operand to
MICRO_BATCH = ("run_id", "iteration", "micro_batch", "dp_rank")


def format_condition(fmt: str) -> tuple[str, list[str]]:
    """The condition that a row of `score` is of a format, or USED, and its parameters."""
    return ("score.used", []) if fmt == USED else ("score.format = ?", [str(Spec.of(fmt))])


class ScoreQueries(OpenIndex):
    """The part of a Catalog about scores."""

    def scores(self, where: Filter | None = None, tensor_ids: list[str] | None = None) -> pd.DataFrame:
        """Return the error of each format in the tensor's own GEMM: the score rows of the selection with the tensor's
        layer, names, numel, finite (their number), zeros and rms."""
        condition, parameters = self.condition(where, tensor_ids)
        metrics = ", ".join(f"score.{name}" for name in ERROR_COLUMNS)
        return self.ask(
            "SELECT tensor.tensor_id, score.format, layer_index, module, operation, tensor_name, quant_type,"
            f" numel, numel - nans - infs AS finite, zeros, rms, {metrics}"
            f" FROM score JOIN tensor USING (key) WHERE {condition} AND {OWN_SCORE}"
            " ORDER BY tensor_id, score.format",
            parameters,
        )

    def scores_of(self, tensor_ids: list[str]) -> pd.DataFrame:
        """Return all scores of some tensors: tensor_id, gemm, format, used, sqnr_db, and the shares of the squared
        error that are flushed and saturated."""
        return self.ask(
            "SELECT tensor_id, score.gemm, score.format, score.used, score.sqnr_db, score.flushed_error_share,"
            " score.saturated_error_share FROM score JOIN tensor USING (key)"
            " WHERE list_contains(?::VARCHAR[], tensor_id) ORDER BY ALL",
            [tensor_ids],
        )

    def compared(self, where: Filter | None = None, tensor_ids: list[str] | None = None) -> pd.DataFrame:
        """Return the error of each format on the selection's operands: columns format, operands (scored in it), tensors
        (those with an error), and the median, 10th and 90th percentile of each of SHOWN_ERRORS over these, each tensor
        counted once: sqnr_db, sqnr_db_low, sqnr_db_high, …. A format that only some of the operands were scored in is
        left out: it would be compared on a different set of tensors."""
        condition, parameters = self.condition(where, tensor_ids)
        return self.ask(
            f"""
            WITH scored AS (
                SELECT score.format, isnan(score.mse) OR isnan(rms) AS bad, {_scored(sound=True)}
                FROM score JOIN tensor USING (key) WHERE {condition} AND {OWN_SCORE}
            )
            SELECT format, count(*) AS operands, count(*) FILTER (NOT bad) AS tensors,
                   {", ".join(map(quantiles, SHOWN_ERRORS))}
            FROM scored GROUP BY format QUALIFY operands = max(operands) OVER () ORDER BY format
            """,
            parameters,
        )

    def formats_used(self, where: Filter | None = None) -> list[str]:
        """The formats that the GEMMs of the selection rounded operands to, by name."""
        condition, parameters = self.condition(where)
        used = self.ask(
            f"SELECT DISTINCT score.format FROM score JOIN tensor USING (key) WHERE {condition} AND score.used",
            parameters,
        )
        return known_specs(used["format"])

    def errors(
        self, fmt: str, by: tuple[str, ...], where: Filter | None = None, worst: str = "sqnr_db"
    ) -> pd.DataFrame:
        """Return the error of a format, or USED, on the selection's operands, one row per group: by's columns, tensors,
        the median, 10th and 90th percentile of each of SHOWN_ERRORS over the operands, each counted once (sqnr_db,
        sqnr_db_low, sqnr_db_high, …), and the tensor_id of the worst operand in the group. `worst` names the metric
        that decides. Operands without a finite value are left out.

        Raises CatalogError for another column or metric.
        """
        if worst not in SHOWN_ERRORS:
            raise CatalogError(f"operands cannot be ranked by {worst!r}: expected one of {', '.join(SHOWN_ERRORS)}")
        condition, parameters = self.condition(where)
        bad = f"-{worst}" if worst == "sqnr_db" else worst
        only, of_format = format_condition(fmt)
        return self.ask(
            f"""
            WITH scored AS (
                SELECT {self._columns(by)}, tensor.key, {_scored()}
                FROM score JOIN tensor USING (key)
                WHERE {condition} AND {OWN_SCORE} AND {only} AND NOT (isnan(score.mse) OR isnan(rms))
            ), found AS (
                SELECT {", ".join(by)}, count(*) AS tensors, {", ".join(map(quantiles, SHOWN_ERRORS))},
                       coalesce(arg_max(key, {bad}) FILTER (NOT isnan({worst})), min(key)) AS key
                FROM scored GROUP BY ALL
            )
            SELECT found.* EXCLUDE (key), tensor_id FROM found JOIN tensor USING (key) ORDER BY ALL
            """,
            [*parameters, *of_format],
        )

    def results(self, where: Filter | None = None) -> pd.DataFrame:
        """Return the selection's GEMM results whose error was measured, one row each: tensor_id, run_id, layer_index,
        module, part (linear, QK, PV), gemm, iteration, result_sqnr_db, and operand_noise, the sum of its operands'
        noise ratios 10^(-sqnr_db/10) as they entered this GEMM: null unless both operands were recorded and scored."""
        condition, parameters = self.condition(where)
        place = ("layer_index", "module", "expert", "rank", *MICRO_BATCH)
        columns = ", ".join(f"tensor.{name}" for name in place)
        return self.ask(
            f"""
            WITH operand AS (
                SELECT {columns}, {part()} AS part, score.gemm, tensor.tensor_id,
                       sum(pow(10, -score.sqnr_db / 10)) FILTER (score.used) AS noise
                FROM score JOIN tensor USING (key) GROUP BY ALL
            ), result AS (
                SELECT {columns}, {part()} AS part, gemm, tensor_id, result_sqnr_db
                FROM tensor WHERE result_sqnr_db IS NOT NULL AND {condition}
            )
            SELECT result.tensor_id, result.run_id, result.layer_index, result.module, result.part, result.gemm,
                   result.iteration, result_sqnr_db,
                   CASE WHEN count(operand.tensor_id) = 2 THEN sum(noise) END AS operand_noise
            FROM result LEFT JOIN operand
                 ON {same("operand", "result", place)} AND operand.part = result.part AND operand.gemm = result.gemm
            GROUP BY ALL ORDER BY ALL
            """,
            parameters,
        )

    def scored_formats(self, where: Filter | None = None) -> list[str]:
        """Return the formats that the selection's operands were scored with, as texts of specs, in the order of
        FORMATS."""
        condition, parameters = self.condition(where)
        rows = self._rows(
            f"SELECT DISTINCT score.format FROM score JOIN tensor USING (key) WHERE {condition}", parameters
        )
        return known_specs(name for (name,) in rows)


def _scored(sound: bool = False) -> str:
    """SQL for SHOWN_ERRORS of the table `score`; sound: null where the error is not finite."""
    condition = "NOT (isnan(score.mse) OR isnan(rms))"
    return ", ".join(
        f"CASE WHEN {condition} THEN score.{name} END AS {name}" if sound else f"score.{name}" for name in SHOWN_ERRORS
    )


def part() -> str:
    """SQL for the product that a tensor belongs to."""
    qk = ", ".join(f"'{kind.name}'" for kind in TENSOR_KINDS if kind.product is Product.QK)
    return f"""CASE WHEN tensor.layer_type = 'attention' THEN if(tensor.tensor_name IN ({qk}), 'QK', 'PV')
                    WHEN tensor.layer_type = 'product' THEN 'product'
                    WHEN regexp_matches(tensor.module, '{OF_ROUTER}') THEN 'router' ELSE 'linear' END"""


def quantiles(column: str) -> str:
    """SQL for the median, the 10th and the 90th percentile of a column: COLUMN, COLUMN_low and COLUMN_high."""
    parts = ((2, column), (1, f"{column}_low"), (3, f"{column}_high"))
    return ", ".join(f"unbounded(deciles_of({column})[{index}]) AS {name}" for index, name in parts)
