"""The queries of an index: runs, tensors, sketches and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pandas as pd
import pyarrow as pa

from binade.data.index.cubes import CUBES, SUMS, same
from binade.data.index.opened import GROUPABLE, HIDDEN, IN_LIST, CatalogError, DamagedIndexError, repairing
from binade.data.index.score_queries import MICRO_BATCH, USED, ScoreQueries, format_condition, part, quantiles
from binade.data.index.sketches import PLACED, sketch_file, sketches
from binade.data.index.tables import INDEX_TABLES
from binade.data.index.tensor_values import SAME_IN_SHARDS, TensorValues
from binade.data.run.directory import DONE
from binade.data.run.experiment import EXPERIMENT
from binade.data.run.json_files import parse_json
from binade.data.run.records import RecordKind
from binade.data.run.segment import TENSOR_SCHEMA
from binade.data.words.fields import ERRORS as SHOWN_ERRORS
from binade.data.words.fields import STATISTICS
from binade.data.words.filter import FIELDS, Filter
from binade.data.words.text import describe
from binade.quant.sketch import bin_edges

__all__ = [
    "GROUPABLE", "MICRO_BATCH", "PUBLIC_TABLES", "SAME_IN_ITERATIONS", "SHOWN_ERRORS", "STATISTICS", "TWIN_FIELDS",
    "USED", "Catalog", "CatalogError", "DamagedIndexError", "Totals", "format_condition", "part", "quantiles",
]  # fmt: skip
T = TypeVar("T")
# The fields that identify a tensor across iterations; weights are the same in all micro-batches.
SAME_IN_ITERATIONS = ("rank", *(name for name in SAME_IN_SHARDS if name != "iteration"))
# The fields that identify a tensor across runs.
TWIN_FIELDS = tuple(name for name in FIELDS if name not in ("run_id", "recipe", "quant_type"))
SOUND_RUNS = "run WHERE damage IS NULL"
PUBLIC_TABLES = tuple(INDEX_TABLES)


@dataclass(frozen=True)
class Totals:
    """Totals of a selection: tensors, elements, bytes of values, tensors with values on disk, runs."""

    tensors: int
    elements: int
    nbytes: int
    with_values: int
    runs: int


class Catalog(ScoreQueries, TensorValues):
    """An `OpenIndex` with all queries: of runs, tensors, sketches and statistics, and those of its bases."""

    def runs(self, *, damaged: bool = False) -> pd.DataFrame:
        """Return every run, newest first: the columns of the table `run`. Runs that are damaged on disk are left out,
        as in every other table, unless `damaged` is true."""
        chosen = "run" if damaged else SOUND_RUNS
        runs = self.ask(f"SELECT * FROM {chosen} ORDER BY started DESC, run_id DESC", of=self.progress)
        return runs if self._only is None else runs[runs["run_id"].isin(self._only)].reset_index(drop=True)

    def tensors(
        self, where: Filter | None = None, *, order_by: str = "run_id, tensor_id", limit: int | None = None
    ) -> pd.DataFrame:
        """Return one row per tensor that the filter selects: the columns of the table `tensor`.

        order_by is a column of the table, or "-column" for descending. Raises CatalogError for an unknown column.
        """
        condition, parameters = self.condition(where)
        if order_by != "run_id, tensor_id":
            column, descending = order_by.lstrip("-"), order_by.startswith("-")
            if column not in TENSOR_SCHEMA.names:
                raise CatalogError(f"there is no column {column!r}: expected one of {', '.join(TENSOR_SCHEMA.names)}")
            order_by = f"{column} {'DESC' if descending else 'ASC'} NULLS LAST"
        sql = f"SELECT * EXCLUDE ({HIDDEN}) FROM tensor WHERE {condition} ORDER BY {order_by}"
        if limit is not None:
            sql, parameters = f"{sql} LIMIT ?", [*parameters, limit]
        return self.ask(sql, parameters)

    def totals(self, where: Filter | None = None) -> Totals:
        condition, parameters = self.condition(where)
        row = self._rows(
            "SELECT count(*), coalesce(sum(numel), 0)::BIGINT, coalesce(sum(nbytes), 0)::BIGINT, count(path),"
            f" count(DISTINCT run_id) FROM tensor WHERE {condition}",
            parameters,
        )[0]
        return Totals(*row)

    @repairing
    def facets(self, where: Filter | None = None) -> dict[str, list[Any]]:
        """Return, for each field, the values that occur among the tensors that match every *other* field of the filter,
        so that each choice selects something. Sorted; fields without a value are left out."""
        where = where or Filter()
        return dict(self.kept(("facets", where), lambda: self._facets(where)))

    def _facets(self, where: Filter) -> dict[str, list[Any]]:
        queries: dict[tuple[Any, ...], list[str]] = {}
        facets: dict[str, list[Any]] = {}
        with self.snapshot(), self._cursor() as cursor:
            cubes = _cubes(cursor)
            for name in FIELDS:
                others = self.narrowed(where.without(name))
                queries.setdefault((others, *_smallest(cubes, others, (name,))), []).append(name)
            for (others, cube, upto), names in queries.items():
                condition, parameters = others.sql()
                sources = (f"{cube} AS tensor WHERE {condition}", f"tensor WHERE {condition} AND key >= {upto}")
                lists = ", ".join(f"list(DISTINCT {name}) FILTER ({name} IS NOT NULL)" for name in names)
                rows = _union(f"SELECT {', '.join(names)} FROM", sources[not cube :])
                (values,) = cursor.execute(f"SELECT {lists} FROM ({rows})", parameters * (2 if cube else 1)).fetchall()
                facets |= dict(zip(names, values, strict=True))
        return {name: sorted(facets[name]) for name in FIELDS if facets[name]}

    def counts(self, where: Filter | None = None) -> dict[str, dict[Any, int]]:
        """Return `facets` with the number of tensors of each value that match every other field of the filter."""
        where = where or Filter()
        return dict(self.kept(("counts", where), lambda: self._counts(where)))

    def _counts(self, where: Filter) -> dict[str, dict[Any, int]]:
        queries: dict[Filter, list[str]] = {}
        for name in FIELDS:
            queries.setdefault(where.without(name), []).append(name)
        counts: dict[str, dict[Any, int]] = {}
        for others, names in queries.items():
            condition, parameters = self.condition(others)
            sets, columns = ", ".join(f"({name})" for name in names), ", ".join(names)
            sql = (
                f"SELECT {columns}, count(*) FROM tensor WHERE {condition} GROUP BY GROUPING SETS ({sets}) ORDER BY ALL"
            )
            for *values, count in self._rows(sql, parameters):
                for name, value in zip(names, values, strict=True):
                    if value is not None:
                        counts.setdefault(name, {})[value] = count
        return {name: counts[name] for name in FIELDS if name in counts}

    def distribution(
        self, where: Filter | None = None, by: str | None = None, tensor_ids: list[str] | None = None
    ) -> pd.DataFrame:
        """Return the merged binade sketch: columns group, bin, count, low, high (the bin's edges, float64), sorted by
        the values of the bins.

        by splits it by a column of `tensor` (a filter field, format or tensor_id), else group is "all". tensor_ids
        restricts further. Raises CatalogError for another column.
        """
        group = "'all'" if by is None else f"tensor.{self._column(by)}"
        frame = self._merged(f'{group} AS "group"', () if by is None else (by,), where, tensor_ids)
        frame["low"], frame["high"] = bin_edges(frame["bin"].to_numpy())
        return frame.sort_values(["group", "low", "high"], ignore_index=True)

    def crossed(self, where: Filter | None, by: tuple[str, ...], tensor_ids: list[str] | None = None) -> pd.DataFrame:
        """Return the merged binade sketch for every combination of these columns, in one pass: by's columns, bin,
        count. tensor_ids restricts further."""
        return self._merged(self._columns(by), by, where, tensor_ids)

    @repairing
    def _merged(
        self, columns: str, fields: Sequence[str], where: Filter | None, tensor_ids: list[str] | None = None
    ) -> pd.DataFrame:
        """The selection's merged sketch by some columns, which take these fields: from a cube if there is one, and from
        the sketches of the tensors that it has not summed up yet."""
        condition, parameters = self.condition(where, tensor_ids)

        def ask() -> pd.DataFrame:
            with self.snapshot(), self._cursor() as cursor:
                needed = fields if tensor_ids is None else ("tensor_id",)
                cube, upto = _smallest(_cubes(cursor), self.narrowed(where), needed)
                # The sketches of each group get the key of one of its tensors, which has the group's columns.
                groups = f"PARTITION BY {', '.join(fields)}" if fields else ""
                fresh = f"{condition} AND key >= {upto}"
                chosen = f"SELECT {PLACED}, min(key) OVER ({groups}) AS other FROM tensor WHERE {fresh}"
                with sketches(cursor, self.root, chosen, parameters) as sketch:
                    rows = [f"{sketch} JOIN tensor USING (key)" if fields else sketch]
                    if cube:
                        rows.append(f"{cube}_sketch JOIN {cube} AS tensor USING (key) WHERE {condition}")
                    union = _union(f"SELECT {columns}, bin, count FROM", rows)
                    sql = f"SELECT * REPLACE ({SUMS}) FROM ({union}) GROUP BY ALL"
                    return cursor.execute(sql, parameters if cube else []).df()

        return self.kept(("merged", columns, condition, repr(parameters)), ask).copy(deep=False)

    def moments(
        self,
        where: Filter | None = None,
        by: str | Sequence[str] | None = None,
        tensor_ids: list[str] | None = None,
    ) -> pd.DataFrame:
        """Return statistics of the selection, one row per group: tensors; of all values together numel, finite, mean,
        std, rms, min, max, absmax, absmin, zeros, nans, infs; and sqnr_db, flush_to_zero and saturated, the median over
        the quantized operands, each counted once, with its 10th and 90th percentile (sqnr_db_low, sqnr_db_high, …);
        lost, how many of these have no error because of NaN or Inf.

        by names one column, whose values are then in `group`, or a sequence of columns, each kept under its own name.
        Raises CatalogError for a column that cannot be grouped by.
        """
        condition, parameters = self.condition(where, tensor_ids)
        if by is None or isinstance(by, str):
            group = "'all'" if by is None else f"tensor.{self._column(by)}"
            named, keys = f'{group} AS "group", ', '"group"'
        else:
            named, keys = "", ", ".join(f'"{self._column(name)}"' for name in by)
            if not keys:
                raise CatalogError(f"no column to group by was given: expected one of {', '.join(GROUPABLE)}")
        some = "finite IS DISTINCT FROM 0"  # null: another tool logged statistics without the number of values
        return self.ask(
            f"""
            WITH chosen AS (
                SELECT {named}*, (numel - nans - infs) AS finite FROM tensor WHERE {condition}
            ), totals AS (
                SELECT {keys}, count(*) AS tensors, sum(numel)::BIGINT AS numel, sum(finite)::BIGINT AS finite,
                       sum(mean * finite) FILTER (finite > 0) / sum(finite) FILTER (mean IS NOT NULL) AS mean,
                       sqrt(sum(rms * rms * finite) FILTER (finite > 0) / sum(finite) FILTER (rms IS NOT NULL)) AS rms,
                       min(min) FILTER ({some}) AS min, max(max) FILTER ({some}) AS max,
                       max(absmax) FILTER ({some}) AS absmax,
                       min(absmin) FILTER (NOT isnan(absmin)) AS absmin,
                       sum(zeros)::BIGINT AS zeros, sum(nans)::BIGINT AS nans, sum(infs)::BIGINT AS infs,
                       {", ".join(map(quantiles, SHOWN_ERRORS))},
                       count(*) FILTER (format IS NOT NULL AND isnan(mse) AND NOT rms = 0) AS lost
                FROM chosen GROUP BY {keys}
            )
            SELECT *, CASE WHEN finite > 0 THEN sqrt(greatest(rms * rms - mean * mean, 0)) END AS std
            FROM totals ORDER BY {keys}
            """,
            parameters,
        )

    def operands(self, where: Filter | None = None) -> pd.DataFrame:
        """Return the selection's GEMM operands, one row per component, operation and format (null if not quantized):
        tensors, numel, nbytes (before quantization)."""
        condition, parameters = self.condition(where)
        return self.ask(
            "SELECT component, operation, format, count(*) AS tensors, sum(numel)::BIGINT AS numel,"
            f" sum(nbytes)::BIGINT AS nbytes FROM tensor WHERE contracted_axis IS NOT NULL AND {condition}"
            " GROUP BY component, operation, format ORDER BY component, operation, format",
            parameters,
        )

    def records(self, kind: RecordKind[T], run_ids: Iterable[str]) -> dict[str, list[T]]:
        """Return the records of a kind by run_id, in the order of their lines, rank 0's first; [] for a run without
        one."""
        found: dict[str, list[T]] = {run_id: [] for run_id in run_ids}
        rows = self.ask(
            "SELECT run_id, record FROM record WHERE kind = ? AND run_id IN (SELECT unnest(?::VARCHAR[]))"
            " ORDER BY starts_with(file, 'ranks/'), file, line",
            [kind.name, [*found]],
            of=self.progress,
        )
        for run_id, record in zip(rows["run_id"], rows["record"], strict=True):
            found[run_id].append(parse_json(kind.type, record))
        return found

    def effects(self, run_ids: Iterable[str]) -> pd.DataFrame:
        """Return the measured effects of the models of these runs against no rounding: rows of the table `effect`, the
        measurements with the most sequences first. See `_same_model`."""
        runs = list(run_ids)
        return self.ask(
            f"""
            SELECT effect.* FROM effect JOIN ({_same_model()}) USING (run_id)
            WHERE base IS NULL AND operand IS NULL AND NOT replays AND iteration IS NULL
            ORDER BY sequences DESC, run_id DESC, format, part, layer_index, module
            """,
            [runs, runs],
        )

    def parities(self, run_ids: Iterable[str] | None = None) -> list[str]:
        """Return the experiments that compare two policies, newest first; with run_ids, those of the models of these
        runs. See `_same_model`."""
        runs = [] if run_ids is None else list(run_ids)
        chosen = SOUND_RUNS if run_ids is None else f"({_same_model()}) JOIN run USING (run_id) WHERE true"
        rows = self._rows(
            f"SELECT run_id FROM {chosen} AND json_extract_string(config, '$.kind') = ? AND state = ?"
            " AND json_extract_string(config, '$.compares') IS NOT NULL ORDER BY started DESC, run_id DESC",
            [*([] if run_ids is None else [runs, runs]), EXPERIMENT, DONE],
        )
        return [str(run_id) for (run_id,) in rows]

    def of_same_models(self, run_ids: Iterable[str]) -> set[str]:
        """Return these runs and all others of their models, with the experiments on these. See `_same_model`."""
        runs = list(run_ids)
        return {*runs, *(str(run_id) for (run_id,) in self._rows(_same_model(), [runs, runs]))}

    def hot_channels(self, where: Filter | None = None) -> pd.DataFrame:
        """Return the selection's tensors with hot channels, one row each: those of SAME_IN_ITERATIONS, iteration,
        tensor_id, channels (how many), hot_channels (lists) and hot_ratio; those of one tensor together, by iteration.
        Tensors without an iteration or without hot channels are left out."""
        condition, parameters = self.condition(where)
        columns = ", ".join(f"tensor.{name}" for name in SAME_IN_ITERATIONS)
        return self.ask(
            f"SELECT {columns}, iteration, tensor_id, shape[-1] AS channels, hot_channels, hot_ratio"
            f" FROM trace JOIN tensor USING (key) WHERE {condition} AND iteration IS NOT NULL"
            f" AND len(hot_channels) > 0 ORDER BY {columns}, iteration, tensor_id",
            parameters,
        )

    def sampled_weights(self, where: Filter | None = None, most: int = 1 << 24) -> pd.DataFrame:
        """Return the selection's samples of rounded weights, one row per weight and iteration: the columns of
        SAME_IN_ITERATIONS, iteration, tensor_id, format, dtype, numel, std, absmax, columns (the length of the axis
        that it was rounded along), sampled and sampled_rounded (lists), at_bin_edge; those of one weight together, by
        iteration. Only the first of several micro-batches and data-parallel replicas is returned, since they have the
        same weights. If there are many rows, the lists are thinned evenly, to about `most` values in all."""
        condition, parameters = self.condition(where)
        columns = ", ".join(f"tensor.{name}" for name in SAME_IN_ITERATIONS)
        weight = ", ".join(f"tensor.{name}" for name in SAME_IN_ITERATIONS if name != "micro_batch")
        return self.ask(
            f"""
            WITH chosen AS (
                SELECT {columns}, iteration, tensor_id, tensor.format, dtype, numel, std, absmax,
                       shape[coalesce(contracted_axis, -1)] AS columns, sampled, sampled_rounded, at_bin_edge
                FROM trace JOIN tensor USING (key)
                WHERE {condition} AND iteration IS NOT NULL AND len(sampled) > 0
                QUALIFY row_number() OVER (PARTITION BY {weight}, iteration ORDER BY micro_batch, tensor_id) = 1
                    AND coalesce(dp_rank, 0) = min(coalesce(dp_rank, 0)) OVER (PARTITION BY run_id, iteration)
            ), thinned AS (SELECT greatest(ceil(sum(2 * len(sampled)) / ?), 1)::BIGINT AS step FROM chosen)
            SELECT chosen.* REPLACE (sampled[:-:step] AS sampled, sampled_rounded[:-:step] AS sampled_rounded)
            FROM chosen, thinned ORDER BY {weight.replace("tensor.", "")}, iteration
            """,
            [*parameters, most],
        )

    def distinct(self, columns: Sequence[str], where: Filter | None = None, scored: bool = False) -> pd.DataFrame:
        """Return the combinations of these columns that the selection has, sorted; scored: that its scored operands
        have. Raises CatalogError for another column."""
        condition, parameters = self.condition(where)
        names = ", ".join(map(self._column, columns))
        source = "tensor SEMI JOIN score USING (key)" if scored else "tensor"
        return self.ask(f"SELECT DISTINCT {names} FROM {source} WHERE {condition} ORDER BY ALL", parameters)

    def twins(self, tensor_id: str) -> pd.DataFrame:
        """Return the same tensor in every run, itself included: the rows of `tensor` with the same TWIN_FIELDS, newest
        run first. Empty if the id is unknown. Whether the runs saw the same data follows from their configurations."""
        return self.ask(
            f"SELECT a.* EXCLUDE ({HIDDEN}) FROM tensor a JOIN tensor b ON {same('a', 'b', TWIN_FIELDS)}"
            " JOIN run ON a.run_id = run.run_id WHERE b.tensor_id = ? ORDER BY run.started DESC, a.tensor_id",
            [tensor_id],
        )

    def pairs(self, run_id: str, reference: str, where: Filter | None = None) -> pd.DataFrame:
        """Return the tensors of one run next to their counterparts in another: tensor_id, reference_id, layer_index,
        module, operation, tensor_name, iteration, numel, reference_power (the sum of its squares). Matched by identity
        (see `twins`); both must have values on disk."""
        condition, parameters = self.condition(where)
        return self.ask(
            "SELECT tensor.tensor_id, b.tensor_id AS reference_id, tensor.layer_index, tensor.module,"
            " tensor.operation, tensor.tensor_name, tensor.iteration, tensor.numel,"
            " b.rms * b.rms * (b.numel - b.nans - b.infs) AS reference_power"
            f" FROM tensor JOIN tensor b ON {same('tensor', 'b', TWIN_FIELDS)}"
            f" WHERE {condition} AND tensor.run_id = ? AND b.run_id = ?"
            " AND tensor.path IS NOT NULL AND b.path IS NOT NULL"
            " ORDER BY tensor.iteration, tensor.layer_index, tensor.module, tensor.tensor_name, tensor.tensor_id",
            [*parameters, run_id, reference],
        )

    def parts(self) -> pd.DataFrame:
        """Return the formats that the operands of each run's GEMMs were rounded to, as recorded: run_id, part (linear,
        QK, PV, router, product), format (forward operands), gradient_format. A part that was not quantized has no
        row."""
        return self.ask(
            f"""
            SELECT run_id, {part()} AS part,
                   min(format) FILTER (operation = 'forward') AS format,
                   min(format) FILTER (operation = 'backward') AS gradient_format
            FROM tensor WHERE format IS NOT NULL GROUP BY ALL ORDER BY ALL
            """
        )

    def rows_of(self, tensor_ids: list[str]) -> pd.DataFrame:
        """Return the rows of `tensor` for these ids, in the order of the ids; unknown ids are left out."""
        return self.ask(
            f"SELECT * EXCLUDE ({HIDDEN}) FROM tensor WHERE {IN_LIST} ORDER BY list_position(?, tensor_id)",
            [tensor_ids, tensor_ids],
        )

    @repairing
    def table(self, name: str) -> pa.Table:
        """Return a whole table of the index (see PUBLIC_TABLES), for `sandbox`. Raises CatalogError for another."""
        if name not in PUBLIC_TABLES:
            raise CatalogError(f"there is no table {name!r}: expected one of {', '.join(PUBLIC_TABLES)}")
        with self.snapshot(), self._cursor() as cursor, self._sketches(cursor, name, "true", []):
            return cursor.sql(_public(name, "tensor_id")).to_arrow_table()

    def sketch_files(self) -> list[str]:
        """Return the files with the sketches of all tensors."""
        rows = self._rows("SELECT DISTINCT run_id, name FROM segment WHERE sketch_rows > 0 ORDER BY ALL")
        return [sketch_file(self.root.absolute(), *row) for row in rows]

    @repairing
    def write_tables(self, directory: Path, where: Filter | None = None) -> None:
        """Write the PUBLIC_TABLES as directory/<table>/run_id=<run>/*.parquet, of the tensors that the filter selects,
        their runs, and the measured effects of their models. A table without rows is left out. Raises OSError."""
        condition, parameters = self.condition(where)
        models = f"SELECT run_id FROM run WHERE model IN (SELECT model FROM tensor WHERE {condition})"
        runs = f"run_id IN (SELECT run_id FROM tensor WHERE {condition})"
        chosen = {"run": runs, "record": runs, "effect": f"run_id IN ({models})"}
        with self.snapshot(), self._cursor() as cursor:
            for name in PUBLIC_TABLES:
                sql = f"{_public(name, 'tensor.run_id, tensor_id')} AND {chosen.get(name, condition)}"
                with self._sketches(cursor, name, condition, parameters):
                    rows = cursor.sql(sql, params=parameters)
                    try:
                        rows.write_parquet(str(directory / name), partition_by=["run_id"], compression="zstd")
                    except duckdb.IOException as error:
                        if str(directory) not in str(error):
                            raise
                        raise OSError(describe(error)) from error  # of what is written, not of the index

    def _sketches(
        self, cursor: duckdb.DuckDBPyConnection, name: str, condition: str, parameters: list[Any]
    ) -> AbstractContextManager[object]:
        """The context in which a statement may read one of PUBLIC_TABLES: the sketches are not in the index."""
        if name != "sketch":
            return nullcontext()
        return sketches(cursor, self.root, f"SELECT {PLACED}, key AS other FROM tensor WHERE {condition}", parameters)


def _same_model() -> str:
    """SQL for the runs of the same models as these runs: two parameters, the runs twice. A model is the same if its
    name, its size and its weights are: those of a checkpoint, those that the same seed draws before training, or those
    of one of the runs."""
    weights = ", ".join(
        f"json_extract_string({text})"
        for text in ("config, '$.weights.sha256'", "first_step, '$.weights_sha256'", "config, '$.seed'")
    )
    same = f"(model, coalesce(size, ''), coalesce({weights}))"
    chosen = "run_id IN (SELECT unnest(?::VARCHAR[]))"
    of_run = chosen.replace("run_id", "json_extract_string(config, '$.measured_run')", 1)
    return f"SELECT run_id FROM {SOUND_RUNS} AND ({same} IN (SELECT {same} FROM run WHERE {chosen}) OR {of_run})"


def _public(name: str, ids: str) -> str:
    """SQL for the rows of one of PUBLIC_TABLES, to which a condition can be added; ids: columns of `tensor` that
    replace its key."""
    if name == "run":
        return f"SELECT * EXCLUDE (damage) FROM {SOUND_RUNS}"
    if name in ("effect", "record"):
        return f"SELECT * FROM {name} WHERE true"
    if name == "tensor":
        return f"SELECT * EXCLUDE ({HIDDEN}) FROM tensor WHERE true"
    return f"SELECT {ids}, {name}.* EXCLUDE (key) FROM {name} JOIN tensor USING (key) WHERE true"


def _cubes(cursor: duckdb.DuckDBPyConnection) -> list[tuple[str, int]]:
    """The filled CUBES, smallest first, each with the key of the first tensor that is not in it."""
    return cursor.execute("SELECT name, upto FROM cube WHERE upto > 0 ORDER BY size").fetchall()


def _smallest(cubes: list[tuple[str, int]], where: Filter, fields: Sequence[str]) -> tuple[str | None, int]:
    """The smallest cube that keeps the filter's fields and these fields apart; None and 0 if there is none."""
    needed = {*fields, *(name for name, _ in where.items())}
    return next((cube for cube in cubes if needed <= set(CUBES[cube[0]])), (None, 0))


def _union(select: str, sources: Sequence[str]) -> str:
    return " UNION ALL ".join(f"{select} {source}" for source in sources)
