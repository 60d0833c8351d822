"""Queries about the formats that operands were scored in: their errors, and the loss changes that these predict."""

from __future__ import annotations

import pandas as pd

from binade.data.columns import ERROR_COLUMNS
from binade.data.fields import ERRORS as SHOWN_ERRORS
from binade.data.filter import Filter
from binade.data.intake import same
from binade.data.open_index import CatalogError, OpenIndex
from binade.data.student import quantile
from binade.data.tensor_kinds import OF_ROUTER, TENSOR_KINDS, Product
from binade.quant.specs import Spec, known_specs

# The score along the axis of the tensor's own GEMM, not of another GEMM that also uses it.
OWN_SCORE = "score.gemm IS NOT DISTINCT FROM tensor.gemm"
USED = "used"  # in place of a format: the one that each GEMM rounded its operand to
MICRO_BATCH = ("run_id", "iteration", "micro_batch", "dp_rank")
MOST_DEGREES = 100  # of freedom, beyond which Student's t is taken as for so many
# The sums over operands of a term's orders; NaN if an operand lacks its second order.
_ADDED = """sum(first) AS first, CASE WHEN count(second) = count(*) THEN sum(second) ELSE 'nan'::DOUBLE END AS second"""
_ERROR = "CASE WHEN count(first) > 1 THEN stddev_samp({0}) / sqrt(count(first)) ELSE 'nan'::DOUBLE END"


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

    def loss_changes(self, fmt: str, by: tuple[str, ...], where: Filter | None = None) -> pd.DataFrame:
        """Return the predicted change of each micro-batch's loss from rounding the selection's forward operands to a
        format: by's columns and those of MICRO_BATCH, tensors, first and second (the terms of first and second order,
        in nats per token), first_error, second_error and error (the standard errors over sequences of first, second and
        their sum; NaN for one sequence), by_sequence (the changes of the sequences, both orders), and the tensor_id of
        the largest change.

        Several operands add up, sequence by sequence; if those of one operand of the micro-batch are not known, it
        counts as one sequence. A term is NaN if that of any operand is NaN or was not recorded. Operands whose gradient
        was not recorded are left out. Raises CatalogError for another column.
        """
        condition, parameters = self.condition(where)
        groups = dict.fromkeys((*map(self._column, by), *MICRO_BATCH))
        columns = ", ".join(f"tensor.{name}" for name in groups)
        names = ", ".join(groups)
        condition = f"{condition} AND score.gemm = 'forward' AND score.format = ?"
        return self.ask(
            f"""
            WITH {_terms(f"{columns}, tensor.tensor_id", condition)},
            sequence AS (
                SELECT {names}, sequence, count(DISTINCT tensor_id) AS tensors, {_ADDED},
                       arg_max(tensor_id, first + second) AS tensor_id, max(first + second) AS largest
                FROM term WHERE first IS NOT NULL GROUP BY ALL
            )
            SELECT {names}, max(tensors) AS tensors, avg(first) AS first, avg(second) AS second,
                   {_ERROR.format("first")} AS first_error, {_ERROR.format("second")} AS second_error,
                   {_ERROR.format("first + second")} AS error,
                   list(first + second ORDER BY sequence) AS by_sequence, arg_max(tensor_id, largest) AS tensor_id
            FROM sequence GROUP BY ALL ORDER BY ALL
            """,
            [*parameters, str(Spec.of(fmt))],
        )

    def operand_costs(self, where: Filter | None = None) -> pd.DataFrame:
        """Return the cost of each scored format for each operand of each GEMM of the selection, one row per
        layer_index, module, part (linear, QK, PV, router), gemm, tensor_name and format, with means over sequences.

        values: how many the operand has in a micro-batch. noise: ‖e‖² / ‖x‖². first, second: the terms of
        `loss_changes`, null where no gradient was recorded, NaN where one is not finite or second order was not
        measured. change: second, and first where its 95% interval over sequences (Student's t) leaves out 0; cost: the
        same without first terms that lower the loss, by which a choice among many would pick chance. first_error,
        second_error, change_error: standard errors over sequences. by_sequence: the change of each sequence, in the
        same order for all operands. tensor_id: the operand with the largest noise. Experts and tensor-parallel ranks
        add up.
        """
        condition, parameters = self.condition(where)
        place = f"tensor.layer_index, tensor.module, {part()} AS part, score.gemm, tensor.tensor_name, score.format"
        names = "layer_index, module, part, gemm, tensor_name, format"
        batch = ", ".join(f"tensor.{name}" for name in MICRO_BATCH)
        order = ", ".join((*MICRO_BATCH, "sequence"))

        return self.ask(
            f"""
            WITH {_terms(f"{place}, {batch}", f"{condition} AND score.gemm IS NOT NULL")}, each AS (
                SELECT {place}, {batch}, sum(numel) AS values,
                       sum(rms * rms * (numel - nans - infs)) AS signal,
                       sum(score.mse * (numel - nans - infs)) AS noise,
                       arg_max(tensor_id, score.mse / nullif(rms * rms, 0)) AS tensor_id
                FROM score JOIN tensor USING (key)
                WHERE {condition} AND score.gemm IS NOT NULL GROUP BY ALL
            ), operand AS (
                SELECT {names}, count(*) AS micro_batches, avg(values) AS values,
                       sum(noise) / nullif(sum(signal), 0) AS noise,
                       arg_max(tensor_id, noise / nullif(signal, 0)) AS tensor_id
                FROM each GROUP BY ALL
            ), sequence AS (
                SELECT {names}, {", ".join(MICRO_BATCH)}, sequence,
                       {_ADDED.replace("CASE WHEN", "CASE WHEN count(first) < count(*) THEN NULL WHEN")}
                FROM term GROUP BY ALL
            ), summed AS (
                SELECT {names}, count(first) AS sequences, avg(first) AS first, avg(second) AS second,
                       {_ERROR.format("first")} AS first_error, {_ERROR.format("second")} AS second_error,
                       abs(avg(first)) > first_error * {_student("count(first)")} AS counts,
                       avg(second) + CASE WHEN counts THEN avg(first) ELSE 0 END AS change,
                       avg(second) + CASE WHEN counts THEN greatest(avg(first), 0) ELSE 0 END AS cost,
                       list(first ORDER BY {order}) AS firsts, list(second ORDER BY {order}) AS seconds
                FROM sequence GROUP BY ALL
            ), listed AS (
                SELECT * EXCLUDE (firsts, seconds, counts),
                       CASE WHEN counts THEN list_transform(list_zip(firsts, seconds), lambda pair: pair[1] + pair[2])
                            ELSE seconds END AS by_sequence
                FROM summed
            )
            SELECT {names}, micro_batches, sequences, values, noise, first, second, first_error, second_error, change,
                   cost,
                   CASE WHEN sequences > 1 THEN list_stddev_samp(by_sequence) / sqrt(sequences) ELSE 'nan'::DOUBLE END
                       AS change_error, by_sequence, tensor_id
            FROM operand JOIN listed USING ({names}) ORDER BY ALL
            """,
            parameters * 2,
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

    def blocks(self, fmt: str, measure: str, by: tuple[str, ...], where: Filter | None = None) -> pd.DataFrame:
        """Return the merged histogram of a quantity of blocks over the selection's operands in a format, one row per
        group and bin: by's columns, bin, count. measure: a key of quant.block_histograms.BLOCK_MEASURES. Empty for a
        format without block scales. Raises CatalogError for another column.
        """
        condition, parameters = self.condition(where)
        columns = self._columns(by)
        return self.ask(
            f"SELECT {columns}, bin, sum(count)::BIGINT AS count FROM block JOIN tensor USING (key)"
            f" WHERE {condition} AND block.format = ? AND measure = ? GROUP BY ALL ORDER BY ALL",
            [*parameters, str(Spec.of(fmt)), measure],
        )

    def overflowing(self, fmt: str, where: Filter | None = None) -> int:
        """Return how many of the selection's operands hold NaN or Inf, before or after rounding to a format: `blocks`
        has none of their blocks that do."""
        condition, parameters = self.condition(where)
        answer = self.ask(
            "SELECT count(DISTINCT tensor_id) AS count FROM score JOIN tensor USING (key)"
            f" WHERE {condition} AND score.format = ? AND (nans + infs > 0 OR NOT isfinite(score.mse))",
            [*parameters, str(Spec.of(fmt))],
        )
        return int(answer["count"].iloc[0])

    def scored_formats(self, where: Filter | None = None) -> list[str]:
        """Return the formats that the selection's operands were scored with, as texts of specs, in the order of
        FORMATS."""
        condition, parameters = self.condition(where)
        rows = self._rows(
            f"SELECT DISTINCT score.format FROM score JOIN tensor USING (key) WHERE {condition}", parameters
        )
        return known_specs(name for (name,) in rows)


def _student(count: str) -> str:
    """SQL of Student's t for a 95% interval of a mean of so many values."""
    limits = [quantile(degrees) for degrees in range(1, MOST_DEGREES + 1)]
    return f"list_extract({limits}, least({count} - 1, {MOST_DEGREES}))"


def _terms(columns: str, condition: str) -> str:
    """SQL of the table `term`: columns, and for each sequence its number and the predicted changes of first and second
    order. A micro-batch counts as one sequence if the numbers of sequences of its operands differ."""
    batch = ", ".join(f"tensor.{name}" for name in MICRO_BATCH)
    mixed = f"min(len(a)) OVER (PARTITION BY {batch}) < max(len(a)) OVER (PARTITION BY {batch})"
    return f"""term AS (
        SELECT * EXCLUDE (a, b, mixed),
               unnest(CASE WHEN mixed THEN [list_avg(a)] WHEN a IS NULL THEN [NULL] ELSE a END) AS first,
               unnest(CASE WHEN mixed THEN [list_avg(b)] WHEN b IS NULL THEN [NULL] ELSE b END) AS second,
               generate_subscripts(CASE WHEN mixed OR a IS NULL THEN [0] ELSE a END, 1) AS sequence
        FROM (
            SELECT {columns}, loss_first_by_sequence AS a, loss_second_by_sequence AS b, {mixed} AS mixed
            FROM score JOIN tensor USING (key) WHERE {condition}
        )
    )"""


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
