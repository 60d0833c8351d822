"""The index of a root, and its queries.

`<root>/index.duckdb` belongs to one process at a time. If it is locked, the root is read-only or the disk is full, the
segments are indexed into memory instead, which is slower to open and gives the same answers. The run directories are
the source of truth: `sync` updates the index from them, adding each segment once and dropping runs that are gone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import duckdb
import pandas as pd
import pyarrow as pa

from binade.data.cache import Cache
from binade.data.difference import joined
from binade.data.filter import FIELDS, Filter
from binade.data.index import Index, is_unavailable
from binade.data.intake import CUBES, SUMS, same, transaction
from binade.data.remote import fetched, readable_root, refresh
from binade.data.runs import IMPORT, RunError, unusable_root
from binade.data.segment import ERROR_COLUMNS, TENSOR_SCHEMA, Identity, SegmentError
from binade.data.sketches import PLACED, sketch_file, sketches
from binade.data.store import load
from binade.data.tensor_kinds import TENSOR_KINDS, Product
from binade.data.text import describe
from binade.quant.sketch import bin_edges
from binade.quant.specs import Spec, known_specs

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
# The fields that identify a tensor within a rank, and that its parts on tensor-parallel ranks share.
SAME_IN_SHARDS = ("run_id", "dp_rank", *(f.name for f in fields(Identity) if f.name != "rank"))
GROUPABLE = (*FIELDS, "format", "tensor_id")
SHOWN_ERRORS = ("sqnr_db", "flush_to_zero", "saturated")
# Statistics of a tensor's own values, each as SQL over the table `tensor`; the names are those of quant.METRICS.
STATISTICS = {
    "absmax": "absmax",
    "std": "std",
    "rms": "rms",
    "kurtosis": "kurtosis",
    "crest_factor": "absmax / nullif(rms, 0)",
    "dynamic_range": "CASE WHEN absmax > 0 THEN log2(absmax / absmin) END",
    "zero_share": "zeros / nullif(numel, 0)",
    "non_finite": "(nans + infs) / nullif(numel, 0)",
}
# The score along the axis of the tensor's own GEMM, not of another GEMM that also uses it.
OWN_SCORE = "score.gemm IS NOT DISTINCT FROM tensor.gemm"
MICRO_BATCH = ("run_id", "iteration", "micro_batch", "dp_rank")
# The fields that identify a tensor across iterations; weights are the same in all micro-batches.
SAME_IN_ITERATIONS = ("rank", *(name for name in SAME_IN_SHARDS if name != "iteration"))
# The fields that identify a tensor across runs.
TWIN_FIELDS = tuple(name for name in FIELDS if name not in ("run_id", "recipe", "quant_type"))
IN_LIST = "tensor.tensor_id IN (SELECT unnest(?::VARCHAR[]))"
SIGNIFICANT = 2.0  # standard errors
SOUND_RUNS = "run WHERE damage IS NULL"
HIDDEN = "key, sketch_start, sketch_stop"  # columns of `tensor` that exist only in the index
PUBLIC_TABLES = ("run", "tensor", "score", "sketch", "block", "trace")


# The sums over operands of a term's orders; NaN if an operand lacks its second order.
_ADDED = """sum(first) AS first, CASE WHEN count(second) = count(*) THEN sum(second) ELSE 'nan'::DOUBLE END AS second"""
_ERROR = "CASE WHEN count(first) > 1 THEN stddev_samp({0}) / sqrt(count(first)) ELSE 'nan'::DOUBLE END"


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


class CatalogError(ValueError):
    """The index does not have the requested data. The message says what is missing."""


@dataclass(frozen=True)
class Totals:
    """Totals of a selection: tensors, elements, bytes of values, tensors with values on disk, runs."""

    tensors: int
    elements: int
    nbytes: int
    with_values: int
    runs: int


class DamagedIndexError(CatalogError):
    """The index is damaged, even after it was rebuilt."""

    exit_status = 1


def _repairing(query: Callable[Concatenate[Catalog, P], T]) -> Callable[Concatenate[Catalog, P], T]:
    """Decorates a query: it is tried once more if the index is out of date, or damaged and then rebuilt."""

    @wraps(query)
    def ask(catalog: Catalog, /, *args: P.args, **kwargs: P.kwargs) -> T:
        generation = catalog._index.generation
        try:
            return query(catalog, *args, **kwargs)
        except duckdb.Error as error:
            catalog._repair(error, generation)
        except SegmentError:  # merged, or deleted with its run, since the last synchronization
            catalog.sync()
        try:
            return query(catalog, *args, **kwargs)
        except SegmentError as error:
            raise CatalogError(f"{error}: `binade verify` says what is damaged") from error
        except duckdb.Error as error:
            if not catalog._index.is_damage(error):
                raise
            raise DamagedIndexError(
                f"{catalog._index.path} cannot be read even after a rebuild: check the disk ({describe(error)})"
            ) from error

    return ask


class Catalog:
    """The index over one root. Safe to use from several threads: each call has a cursor of its own.

    version   changes when tensors or runs are added or removed, and with the name or color of a run
    progress  changes when anything changes: also when a run proceeds or ends
    cache     if there is one, results come from it while the version stays the same
    reads     called with the id of each tensor whose values are read
    """

    def __init__(self, root: Path, index: Index) -> None:
        self.root = root
        self._index = index
        self._only: tuple[str, ...] | None = None
        self._lock = threading.Lock()
        self.cache: Cache | None = None
        self.reads: Callable[[str], None] = lambda tensor_id: None

    @classmethod
    def open(cls, root: str | Path | None = None) -> Catalog:
        """Open the index of a root, a directory or s3://BUCKET/FOLDER, and bring it up to date; a directory that does
        not exist is treated as empty.

        Raises RunError if the root is a file, or an object store that cannot be read.
        """
        path = readable_root(root)
        if problem := unusable_root(path):
            raise RunError(problem)
        catalog = cls(path, Index(path))
        catalog.sync()
        return catalog

    @property
    def version(self) -> int:
        return self._index.version

    @property
    def progress(self) -> int:
        return self._index.progress

    @property
    def in_memory(self) -> bool:
        return self._index.in_memory

    @property
    def refused(self) -> list[str]:
        """What the last synchronization skipped, one line each, including the runs that are left out as damaged."""
        return self._index.intake.refused

    @property
    def notices(self) -> list[str]:
        """Problems with the index, one sentence each, oldest first. They do not affect the answers."""
        return self._index.notices

    def close(self) -> None:
        self._index.close()

    def trim_memory(self) -> None:
        """Return to the system what the index has freed."""
        self._index.trim_memory()

    def release_memory(self) -> None:
        """Free the memory that the index holds for later queries."""
        self._index.release_memory()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cursor(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        return self._index.cursor()

    def _repair(self, error: duckdb.Error, generation: int) -> None:
        """Rebuild the index after a query has found it damaged, unless another query already has. Raises the error if
        it has another cause."""
        if not self._index.is_damage(error) and generation == self._index.generation:
            raise error
        with self._updating():
            if generation == self._index.generation:
                self._index.replace(in_memory=False)
                self._synchronize()

    def kept(self, request: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of compute at this version, for these runs, from the cache if there is one."""
        key = self._only, request
        return self.cache.get(self.version, key, lambda done: compute()) if self.cache else compute()

    @_repairing
    def _frame(self, sql: str, parameters: list[Any] | None = None, of: Hashable = None) -> pd.DataFrame:
        """of: what the answer depends on besides the version."""

        def ask() -> pd.DataFrame:
            with self._cursor() as cursor:
                return cursor.execute(sql, parameters or []).df()

        return self.kept((sql, repr(parameters), of), ask).copy(deep=False)  # pandas 3 copies on write

    @_repairing
    def _rows(self, sql: str, parameters: list[Any] | None = None) -> list[tuple[Any, ...]]:
        def ask() -> list[tuple[Any, ...]]:
            with self._cursor() as cursor:
                return cursor.execute(sql, parameters or []).fetchall()

        return list(self.kept(("rows", sql, repr(parameters)), ask))

    def ask(self, sql: str, parameters: list[Any]) -> pd.DataFrame:
        """Return the rows of a query with one caller, which is defined with its question."""
        return self._frame(sql, parameters)

    def condition(self, where: Filter | None = None) -> tuple[str, list[Any]]:
        """Return the filter as a condition on the table `tensor`, with its parameters, for `ask`."""
        return self._selection(where)

    # Synchronization with the disk

    def sync(self) -> int:
        """Add new segments, update run states and remove deleted runs; returns the number of segments added.

        A segment that cannot be read is skipped, listed in `refused` and tried again next time. If the index can no
        longer be written (for example because the disk is full), it is left unchanged and the segments are loaded into
        memory instead.
        """
        refresh(self.root)
        with self._updating():
            return self._synchronize()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Only one thread updates at a time; if it replaces the index, the others wait until the new one is up to
        date."""
        with self._lock:
            try:
                yield
            finally:
                self._index.release()

    def _synchronize(self) -> int:
        for attempt in ("as it is", "rebuilt"):
            try:
                return self._catch_up()
            except duckdb.Error as error:
                if self.in_memory:
                    raise
                rebuild = attempt == "as it is" and self._index.is_damage(error)
                if not (rebuild or is_unavailable(error)):
                    self.notices.append(
                        f"{self._index.path} cannot be used: {describe(error)}. Until the next start the index is kept"
                        " in memory. If this happens again, delete the file: it is rebuilt from the runs."
                    )
                self._index.replace(in_memory=not rebuild)
        return self._catch_up()

    def _catch_up(self) -> int:
        with self._cursor() as cursor:
            added = self._index.intake.catch_up(cursor)
            if not self._index.intake.idle:
                self._index.counted = self._count_rows(cursor)
        content, course = self._index.counted
        self._index.mark(content, (course, tuple(self.refused)))
        return added

    def _count_rows(self, cursor: duckdb.DuckDBPyConnection) -> tuple[object, object]:
        """Values that show whether the version is the same, and whether anything of a run has changed."""
        tensors, runs = (
            cursor.execute(f"SELECT count(*), bit_xor(hash({columns})) FROM {table}").fetchone()
            for columns, table in (("run_id, name, mtime_ns", "segment"), ("run", "run"))
        )
        ids = cursor.execute("SELECT count(*), bit_xor(hash(run_id, name, color)) FROM run").fetchone()
        return (tensors, ids), runs

    # Queries

    def runs(self, *, damaged: bool = False) -> pd.DataFrame:
        """Return every run, newest first: the columns of the table `run`. Runs that are damaged on disk are left out,
        as in every other table, unless `damaged` is true."""
        chosen = "run" if damaged else SOUND_RUNS
        runs = self._frame(f"SELECT * FROM {chosen} ORDER BY started DESC, run_id DESC", of=self.progress)
        return runs if self._only is None else runs[runs["run_id"].isin(self._only)].reset_index(drop=True)

    def state(self) -> Hashable:
        """Return the root and the progress of each of its runs. Results from the catalog remain valid while this stays
        the same."""
        return str(self.root), self._only, self.progress

    @property
    def part(self) -> tuple[str, ...] | None:
        """The runs that `restricted` has left; None for all of the root."""
        return self._only

    def versions(self, run_ids: Iterable[str] = ()) -> Hashable:
        """Return what changes when rows of these runs are added or removed, or the name or color of any run; () for all
        runs of this catalog. Results that depend on these runs alone remain valid while this stays the same."""
        counted = self.kept("versions", self._versions)
        names, rows = counted
        chosen = tuple(run_ids) or self._only
        return str(self.root), names, tuple((run, rows.get(run)) for run in chosen) if chosen else self.version

    def _versions(self) -> tuple[Hashable, dict[str, Hashable]]:
        names = self._rows("SELECT count(*), bit_xor(hash(run_id, name, color)) FROM run")
        rows = self._rows("SELECT run_id, count(*), bit_xor(hash(name, mtime_ns)) FROM segment GROUP BY run_id")
        return tuple(names), {str(run): tuple(counted) for run, *counted in rows}

    def restricted(self, run_ids: Iterable[str]) -> Catalog:
        """Return a view of this catalog that contains only these runs. It affects `runs` and every method that takes a
        filter."""
        part = copy(self)
        part._only = tuple(run_ids)
        return part

    def narrowed(self, where: Filter | None) -> Filter:
        """Return the filter that this catalog applies: the given filter, restricted to the runs of this view."""
        where = where or Filter()
        if self._only is None:
            return where
        kept = tuple(run for run in self._only if not where.run_id or run in where.run_id)
        return replace(where, run_id=kept or ("",))  # no run has this name: nothing is selected

    def tensors(
        self, where: Filter | None = None, *, order_by: str = "run_id, tensor_id", limit: int | None = None
    ) -> pd.DataFrame:
        """Return one row per tensor that the filter selects: the columns of the table `tensor`.

        order_by is a column of the table, or "-column" for descending. Raises CatalogError for an unknown column.
        """
        condition, parameters = self._selection(where)
        if order_by != "run_id, tensor_id":
            column, descending = order_by.lstrip("-"), order_by.startswith("-")
            if column not in TENSOR_SCHEMA.names:
                raise CatalogError(f"there is no column {column!r}: expected one of {', '.join(TENSOR_SCHEMA.names)}")
            order_by = f"{column} {'DESC' if descending else 'ASC'} NULLS LAST"
        sql = f"SELECT * EXCLUDE ({HIDDEN}) FROM tensor WHERE {condition} ORDER BY {order_by}"
        if limit is not None:
            sql, parameters = f"{sql} LIMIT ?", [*parameters, limit]
        return self._frame(sql, parameters)

    def totals(self, where: Filter | None = None) -> Totals:
        condition, parameters = self._selection(where)
        row = self._rows(
            "SELECT count(*), coalesce(sum(numel), 0)::BIGINT, coalesce(sum(nbytes), 0)::BIGINT, count(path),"
            f" count(DISTINCT run_id) FROM tensor WHERE {condition}",
            parameters,
        )[0]
        return Totals(*row)

    @_repairing
    def facets(self, where: Filter | None = None) -> dict[str, list[Any]]:
        """Return, for each field, the values that occur among the tensors that match every *other* field of the filter,
        so that each choice selects something. Sorted; fields without a value are left out."""
        where = where or Filter()
        return dict(self.kept(("facets", where), lambda: self._facets(where)))

    def _facets(self, where: Filter) -> dict[str, list[Any]]:
        queries: dict[tuple[Any, ...], list[str]] = {}
        found: dict[str, list[Any]] = {}
        with self._cursor() as cursor, transaction(cursor):
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
                found |= dict(zip(names, values, strict=True))
        return {name: sorted(found[name]) for name in FIELDS if found[name]}

    def counts(self, where: Filter | None = None) -> dict[str, dict[Any, int]]:
        """Return `facets` with the number of tensors of each value that match every other field of the filter."""
        where = where or Filter()
        return dict(self.kept(("counts", where), lambda: self._counts(where)))

    def _counts(self, where: Filter) -> dict[str, dict[Any, int]]:
        queries: dict[Filter, list[str]] = {}
        for name in FIELDS:
            queries.setdefault(where.without(name), []).append(name)
        found: dict[str, dict[Any, int]] = {}
        for others, names in queries.items():
            condition, parameters = self._selection(others)
            sets, columns = ", ".join(f"({name})" for name in names), ", ".join(names)
            sql = (
                f"SELECT {columns}, count(*) FROM tensor WHERE {condition} GROUP BY GROUPING SETS ({sets}) ORDER BY ALL"
            )
            for *values, count in self._rows(sql, parameters):
                for name, value in zip(names, values, strict=True):
                    if value is not None:
                        found.setdefault(name, {})[value] = count
        return {name: found[name] for name in FIELDS if name in found}

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

    def crossed(self, where: Filter | None, by: tuple[str, ...]) -> pd.DataFrame:
        """Return the merged binade sketch for every combination of these columns, in one pass: by's columns, bin,
        count."""
        return self._merged(self._columns(by), by, where)

    @_repairing
    def _merged(
        self, columns: str, fields: Sequence[str], where: Filter | None, tensor_ids: list[str] | None = None
    ) -> pd.DataFrame:
        """The selection's merged sketch by some columns, which take these fields: from a cube if there is one, and from
        the sketches of the tensors that it has not summed up yet."""
        condition, parameters = self._selection(where, tensor_ids)

        def ask() -> pd.DataFrame:
            with self._cursor() as cursor, transaction(cursor):
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
        condition, parameters = self._selection(where, tensor_ids)
        if by is None or isinstance(by, str):
            group = "'all'" if by is None else f"tensor.{self._column(by)}"
            named, keys = f'{group} AS "group", ', '"group"'
        else:
            named, keys = "", ", ".join(f'"{self._column(name)}"' for name in by)
            if not keys:
                raise CatalogError(f"no column to group by was given: expected one of {', '.join(GROUPABLE)}")
        return self._frame(
            f"""
            WITH chosen AS (
                SELECT {named}*, (numel - nans - infs) AS finite FROM tensor WHERE {condition}
            ), totals AS (
                SELECT {keys}, count(*) AS tensors, sum(numel)::BIGINT AS numel, sum(finite)::BIGINT AS finite,
                       sum(mean * finite) FILTER (finite > 0) / sum(finite) AS mean,
                       sqrt(sum(rms * rms * finite) FILTER (finite > 0) / sum(finite)) AS rms,
                       min(min) FILTER (finite > 0) AS min, max(max) FILTER (finite > 0) AS max,
                       max(absmax) FILTER (finite > 0) AS absmax,
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
        condition, parameters = self._selection(where)
        return self._frame(
            "SELECT component, operation, format, count(*) AS tensors, sum(numel)::BIGINT AS numel,"
            f" sum(nbytes)::BIGINT AS nbytes FROM tensor WHERE contracted_axis IS NOT NULL AND {condition}"
            " GROUP BY component, operation, format ORDER BY component, operation, format",
            parameters,
        )

    def scores(self, where: Filter | None = None, tensor_ids: list[str] | None = None) -> pd.DataFrame:
        """Return the error of each format in the tensor's own GEMM: the score rows of the selection with the tensor's
        layer, names, numel, finite (their number), zeros and rms."""
        condition, parameters = self._selection(where, tensor_ids)
        metrics = ", ".join(f"score.{name}" for name in ERROR_COLUMNS)
        return self._frame(
            "SELECT tensor.tensor_id, score.format, layer_index, module, operation, tensor_name, quant_type,"
            f" numel, numel - nans - infs AS finite, zeros, rms, {metrics}"
            f" FROM score JOIN tensor USING (key) WHERE {condition} AND {OWN_SCORE}"
            " ORDER BY tensor_id, score.format",
            parameters,
        )

    def compared(self, where: Filter | None = None, tensor_ids: list[str] | None = None) -> pd.DataFrame:
        """Return the error of each format on the selection's operands: columns format, operands (scored in it), tensors
        (those with an error), and the median, 10th and 90th percentile of each of SHOWN_ERRORS over these, each tensor
        counted once: sqnr_db, sqnr_db_low, sqnr_db_high, …. A format that only some of the operands were scored in is
        left out: it would be compared on a different set of tensors."""
        condition, parameters = self._selection(where, tensor_ids)
        return self._frame(
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

    def errors(
        self, fmt: str, by: tuple[str, ...], where: Filter | None = None, worst: str = "sqnr_db"
    ) -> pd.DataFrame:
        """Return the error of a format on the selection's operands, one row per group: by's columns, tensors, the
        median, 10th and 90th percentile of each of SHOWN_ERRORS over the operands, each counted once (sqnr_db,
        sqnr_db_low, sqnr_db_high, …), and the tensor_id of the worst operand in the group. `worst` names the metric
        that decides. Operands without a finite value are left out.

        Raises CatalogError for another column or metric.
        """
        if worst not in SHOWN_ERRORS:
            raise CatalogError(f"operands cannot be ranked by {worst!r}: expected one of {', '.join(SHOWN_ERRORS)}")
        condition, parameters = self._selection(where)
        bad = f"-{worst}" if worst == "sqnr_db" else worst
        return self._frame(
            f"""
            WITH scored AS (
                SELECT {self._columns(by)}, tensor.key, {_scored()}
                FROM score JOIN tensor USING (key)
                WHERE {condition} AND {OWN_SCORE} AND score.format = ? AND NOT (isnan(score.mse) OR isnan(rms))
            ), found AS (
                SELECT {", ".join(by)}, count(*) AS tensors, {", ".join(map(quantiles, SHOWN_ERRORS))},
                       coalesce(arg_max(key, {bad}) FILTER (NOT isnan({worst})), min(key)) AS key
                FROM scored GROUP BY ALL
            )
            SELECT found.* EXCLUDE (key), tensor_id FROM found JOIN tensor USING (key) ORDER BY ALL
            """,
            [*parameters, str(Spec.of(fmt))],
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
        condition, parameters = self._selection(where)
        groups = dict.fromkeys((*map(self._column, by), *MICRO_BATCH))
        columns = ", ".join(f"tensor.{name}" for name in groups)
        names = ", ".join(groups)
        condition = f"{condition} AND score.gemm = 'forward' AND score.format = ?"
        return self._frame(
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
        measured. change: second, and first where it exceeds SIGNIFICANT standard errors, of either sign; cost: the same
        without first terms that lower the loss, by which a choice among many would pick chance; half, other: cost of
        two halves of the sequences. first_error, second_error, change_error: standard errors over sequences.
        by_sequence: the change of each sequence, in the same order for all operands. tensor_id: the operand with the
        largest noise. Experts and tensor-parallel ranks add up.
        """
        condition, parameters = self._selection(where)
        place = f"tensor.layer_index, tensor.module, {part()} AS part, score.gemm, tensor.tensor_name, score.format"
        names = "layer_index, module, part, gemm, tensor_name, format"
        batch = ", ".join(f"tensor.{name}" for name in MICRO_BATCH)
        order = ", ".join((*MICRO_BATCH, "sequence"))

        def cost(of: str) -> str:
            error = f"stddev_samp(first) {of} / sqrt(count(first) {of})"
            first = f"CASE WHEN avg(first) {of} > {SIGNIFICANT} * {error} THEN avg(first) {of} ELSE 0 END"
            return f"avg(second) {of} + {first}"

        return self._frame(
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
            ), halves AS (
                SELECT *, dense_rank() OVER (ORDER BY {order}) % 2 AS half FROM sequence
            ), summed AS (
                SELECT {names}, count(first) AS sequences, avg(first) AS first, avg(second) AS second,
                       {_ERROR.format("first")} AS first_error, {_ERROR.format("second")} AS second_error,
                       abs(avg(first)) > {SIGNIFICANT} * first_error AS counts,
                       avg(second) + CASE WHEN counts THEN avg(first) ELSE 0 END AS change, {cost("")} AS cost,
                       {cost("FILTER (half = 0)")} AS half, {cost("FILTER (half = 1)")} AS other,
                       list(first ORDER BY {order}) AS firsts, list(second ORDER BY {order}) AS seconds
                FROM halves GROUP BY ALL
            ), listed AS (
                SELECT * EXCLUDE (firsts, seconds, counts),
                       CASE WHEN counts THEN list_transform(list_zip(firsts, seconds), lambda pair: pair[1] + pair[2])
                            ELSE seconds END AS by_sequence
                FROM summed
            )
            SELECT {names}, micro_batches, sequences, values, noise, first, second, first_error, second_error, change,
                   cost,
                   CASE WHEN sequences > 1 THEN list_stddev_samp(by_sequence) / sqrt(sequences) ELSE 'nan'::DOUBLE END
                       AS change_error, half, other, by_sequence, tensor_id
            FROM operand JOIN listed USING ({names}) ORDER BY ALL
            """,
            parameters * 2,
        )

    def results(self, where: Filter | None = None) -> pd.DataFrame:
        """Return the selection's GEMM results whose error was measured, one row each: tensor_id, run_id, layer_index,
        module, part (linear, QK, PV), gemm, iteration, result_sqnr_db, and operand_noise, the sum of its operands'
        noise ratios 10^(-sqnr_db/10) as they entered this GEMM: null unless both operands were recorded and scored."""
        condition, parameters = self._selection(where)
        place = ("layer_index", "module", "expert", "rank", *MICRO_BATCH)
        columns = ", ".join(f"tensor.{name}" for name in place)
        return self._frame(
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
        condition, parameters = self._selection(where)
        columns = self._columns(by)
        return self._frame(
            f"SELECT {columns}, bin, sum(count)::BIGINT AS count FROM block JOIN tensor USING (key)"
            f" WHERE {condition} AND block.format = ? AND measure = ? GROUP BY ALL ORDER BY ALL",
            [*parameters, str(Spec.of(fmt)), measure],
        )

    def overflowing(self, fmt: str, where: Filter | None = None) -> int:
        """Return how many of the selection's operands hold NaN or Inf, before or after rounding to a format: `blocks`
        has none of their blocks that do."""
        condition, parameters = self._selection(where)
        found = self._frame(
            "SELECT count(DISTINCT tensor_id) AS count FROM score JOIN tensor USING (key)"
            f" WHERE {condition} AND score.format = ? AND (nans + infs > 0 OR NOT isfinite(score.mse))",
            [*parameters, str(Spec.of(fmt))],
        )
        return int(found["count"].iloc[0])

    def hot_channels(self, where: Filter | None = None) -> pd.DataFrame:
        """Return the selection's tensors with hot channels, one row each: those of SAME_IN_ITERATIONS, iteration,
        tensor_id, channels (how many), hot_channels (lists) and hot_ratio; those of one tensor together, by iteration.
        Tensors without an iteration or without hot channels are left out."""
        condition, parameters = self._selection(where)
        columns = ", ".join(f"tensor.{name}" for name in SAME_IN_ITERATIONS)
        return self._frame(
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
        condition, parameters = self._selection(where)
        columns = ", ".join(f"tensor.{name}" for name in SAME_IN_ITERATIONS)
        weight = ", ".join(f"tensor.{name}" for name in SAME_IN_ITERATIONS if name != "micro_batch")
        return self._frame(
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

    def extremes(self, metric: str, by: tuple[str, ...], where: Filter | None = None) -> pd.DataFrame:
        """Return the maximum of a statistic over the selection's tensors, one row per group: by's columns, tensors,
        `metric` and the tensor_id of the maximum. metric: a key of STATISTICS. Tensors without a value are left out.

        Raises CatalogError for another column or metric.
        """
        if metric not in STATISTICS:
            raise CatalogError(f"there is no statistic {metric!r}: expected one of {', '.join(STATISTICS)}")
        condition, parameters = self._selection(where)
        columns = self._columns(by)
        return self._frame(
            f"""
            WITH chosen AS (SELECT {columns}, tensor_id, {STATISTICS[metric]} AS value FROM tensor WHERE {condition})
            SELECT {", ".join(by)}, count(*) AS tensors, max(value) AS "{metric}",
                   arg_max(tensor_id, value) AS tensor_id
            FROM chosen WHERE NOT isnan(value) GROUP BY ALL ORDER BY ALL
            """,
            parameters,
        )

    def distinct(self, columns: Sequence[str], where: Filter | None = None, scored: bool = False) -> pd.DataFrame:
        """Return the combinations of these columns that the selection has, sorted; scored: that its scored operands
        have. Raises CatalogError for another column."""
        condition, parameters = self._selection(where)
        names = ", ".join(map(self._column, columns))
        source = "tensor SEMI JOIN score USING (key)" if scored else "tensor"
        return self._frame(f"SELECT DISTINCT {names} FROM {source} WHERE {condition} ORDER BY ALL", parameters)

    def scored_formats(self, where: Filter | None = None) -> list[str]:
        """Return the formats that the selection's operands were scored with, as texts of specs, in the order of
        FORMATS."""
        condition, parameters = self._selection(where)
        rows = self._rows(
            f"SELECT DISTINCT score.format FROM score JOIN tensor USING (key) WHERE {condition}", parameters
        )
        return known_specs(name for (name,) in rows)

    def twins(self, tensor_id: str) -> pd.DataFrame:
        """Return the same tensor in every run, itself included: the rows of `tensor` with the same TWIN_FIELDS, newest
        run first. Empty if the id is unknown. Whether the runs saw the same data follows from their configurations."""
        return self._frame(
            f"SELECT a.* EXCLUDE ({HIDDEN}) FROM tensor a JOIN tensor b ON {same('a', 'b', TWIN_FIELDS)}"
            " JOIN run ON a.run_id = run.run_id WHERE b.tensor_id = ? ORDER BY run.started DESC, a.tensor_id",
            [tensor_id],
        )

    def pairs(self, run_id: str, reference: str, where: Filter | None = None) -> pd.DataFrame:
        """Return the tensors of one run next to their counterparts in another: tensor_id, reference_id, layer_index,
        module, operation, tensor_name, iteration, numel, reference_power (the sum of its squares). Matched by identity
        (see `twins`); both must have values on disk."""
        condition, parameters = self._selection(where)
        return self._frame(
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
        QK, PV, router), format (forward operands), gradient_format. A part that was not quantized has no row."""
        return self._frame(
            f"""
            SELECT run_id, {part()} AS part,
                   min(format) FILTER (operation = 'forward') AS format,
                   min(format) FILTER (operation = 'backward') AS gradient_format
            FROM tensor WHERE format IS NOT NULL GROUP BY ALL ORDER BY ALL
            """
        )

    def rows_of(self, tensor_ids: list[str]) -> pd.DataFrame:
        """Return the rows of `tensor` for these ids, in the order of the ids; unknown ids are left out."""
        return self._frame(
            f"SELECT * EXCLUDE ({HIDDEN}) FROM tensor WHERE {IN_LIST} ORDER BY list_position(?, tensor_id)",
            [tensor_ids, tensor_ids],
        )

    @_repairing
    def table(self, name: str) -> pa.Table:
        """Return a whole table of the index (see PUBLIC_TABLES), for `sandbox`. Raises CatalogError for another."""
        if name not in PUBLIC_TABLES:
            raise CatalogError(f"there is no table {name!r}: expected one of {', '.join(PUBLIC_TABLES)}")
        with self._cursor() as cursor, transaction(cursor), self._sketches(cursor, name, "true", []):
            return cursor.sql(_public(name, "tensor_id")).to_arrow_table()

    def sketch_files(self) -> list[str]:
        """Return the files with the sketches of all tensors."""
        rows = self._rows("SELECT DISTINCT run_id, name FROM segment WHERE sketch_rows > 0 ORDER BY ALL")
        return [sketch_file(self.root.absolute(), *row) for row in rows]

    @_repairing
    def write_tables(self, directory: Path, where: Filter | None = None) -> None:
        """Write the PUBLIC_TABLES as directory/<table>/run_id=<run>/*.parquet, of the tensors that the filter selects
        and their runs. A table without rows is left out. Raises OSError."""
        condition, parameters = self._selection(where)
        chosen = {"run": f"run_id IN (SELECT run_id FROM tensor WHERE {condition})"}
        with self._cursor() as cursor, transaction(cursor):
            for name in PUBLIC_TABLES:
                sql = f"{_public(name, 'tensor.run_id, tensor_id')} AND {chosen.get(name, condition)}"
                with self._sketches(cursor, name, condition, parameters):
                    rows = cursor.sql(sql, params=parameters)
                    rows.write_parquet(str(directory / name), partition_by=["run_id"], compression="zstd")

    def _sketches(
        self, cursor: duckdb.DuckDBPyConnection, name: str, condition: str, parameters: list[Any]
    ) -> AbstractContextManager[object]:
        """The context in which a statement may read one of PUBLIC_TABLES: the sketches are not in the index."""
        if name != "sketch":
            return nullcontext()
        return sketches(cursor, self.root, f"SELECT {PLACED}, key AS other FROM tensor WHERE {condition}", parameters)

    def path(self, tensor_id: str) -> Path:
        """Return the path of the tensor's file. Raises CatalogError if the id is unknown, its values were not kept, or
        a recorded tensor refers to a file outside its run's directory."""
        return self._file(tensor_id)[0]

    def _file(self, tensor_id: str) -> tuple[Path, bool, str | None, str | None]:
        """The tensor's file, whether another tool wrote it, the tensor's key in it, and its SHA-256 if Binade wrote
        it."""
        rows = self._rows(
            "SELECT run_id, path, file_key, sha256, config FROM tensor LEFT JOIN run USING (run_id)"
            " WHERE tensor_id = ?",
            [tensor_id],
        )
        if not rows:
            raise CatalogError(f"there is no tensor {tensor_id!r} in {self.root}")
        run_id, given, key, digest, config = rows[0]
        if given is None:
            raise CatalogError(f"the values of {tensor_id} were not kept: only its statistics and sketch are available")
        if not Path(given).is_absolute():
            return self.root / run_id / given, False, None, digest
        if json.loads(config or "{}").get("kind") != IMPORT:
            raise CatalogError(
                f"{tensor_id} refers to a file outside its run's directory, which is allowed only for imported tensors"
            )
        return Path(given), True, key, None

    def load(self, tensor_id: str) -> Tensor:
        """Return the tensor's values, memory-mapped where the file allows it. Raises CatalogError as `path`,
        TensorFileError for a file that is damaged or not what the run wrote."""
        self.reads(tensor_id)
        return self.kept(("values", tensor_id), lambda: self._read(tensor_id))

    def _read(self, tensor_id: str) -> Tensor:
        path, foreign, key, digest = self._file(tensor_id)
        if not foreign:
            return load(fetched(path), digest)
        from binade.data.foreign import load_foreign  # imports torch

        return load_foreign(path, key)

    def unsharded(self, tensor_id: str) -> Tensor:
        """Return the whole tensor, assembled from the shards of the tensor-parallel ranks; `load` if it is not sharded.

        Slices are concatenated, partial results summed in float32 and returned in their dtype. Raises CatalogError if a
        shard was not recorded or its values not kept, TensorFileError for a damaged file.
        """
        parts = self.shards(tensor_id)
        first = parts.iloc[0]
        if first["shard"] not in ("slice", "partial"):
            return self.load(tensor_id)
        missing = set(range(first["tp_size"])) - set(parts["tp_rank"])
        if missing:
            raise CatalogError(
                f"{tensor_id} is a shard: the shard of tensor-parallel rank {min(missing)} was not recorded"
            )
        tensors = [self.load(part) for part in parts["tensor_id"]]
        axis = None if pd.isna(first["shard_axis"]) else int(first["shard_axis"])
        return joined(tensors, first["shard"], axis, int(first["shard_stride"]))

    def shards(self, tensor_id: str) -> pd.DataFrame:
        """Return the shards of the tensor that this one is a shard of, by tp_rank: columns tensor_id, rank, tp_rank,
        tp_size, shard, shard_axis, shard_stride, path. Raises CatalogError if the id is unknown."""
        frame = self._frame(
            "SELECT part.tensor_id, part.rank, part.tp_rank, part.tp_size, part.shard, part.shard_axis,"
            " part.shard_stride, part.path FROM tensor AS given JOIN tensor AS part"
            f" ON {same('part', 'given', SAME_IN_SHARDS)} WHERE given.tensor_id = ? ORDER BY part.tp_rank",
            [tensor_id],
        )
        if frame.empty:
            raise CatalogError(f"there is no tensor {tensor_id!r} in {self.root}")
        return frame

    def _selection(self, where: Filter | None, tensor_ids: list[str] | None = None) -> tuple[str, list[Any]]:
        condition, parameters = self.narrowed(where).sql()
        if tensor_ids is not None:
            condition, parameters = f"{condition} AND {IN_LIST}", [*parameters, tensor_ids]
        return condition, parameters

    @staticmethod
    def _column(name: str) -> str:
        if name not in GROUPABLE:
            raise CatalogError(f"values cannot be grouped by {name!r}: expected one of {', '.join(GROUPABLE)}")
        return name

    def _columns(self, names: Sequence[str]) -> str:
        return ", ".join(f"tensor.{self._column(name)}" for name in names)


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
                    WHEN tensor.module = 'router' THEN 'router' ELSE 'linear' END"""


def _public(name: str, ids: str) -> str:
    """SQL for the rows of one of PUBLIC_TABLES, to which a condition can be added; ids: columns of `tensor` that
    replace its key."""
    if name == "run":
        return f"SELECT * EXCLUDE (damage) FROM {SOUND_RUNS}"
    if name == "tensor":
        return f"SELECT * EXCLUDE ({HIDDEN}) FROM tensor WHERE true"
    return f"SELECT {ids}, {name}.* EXCLUDE (key) FROM {name} JOIN tensor USING (key) WHERE true"


def _cubes(cursor: duckdb.DuckDBPyConnection) -> list[tuple[str, int]]:
    """The filled CUBES, smallest first, each with the key of the first tensor that is not in it."""
    return cursor.execute("SELECT name, upto FROM cube WHERE upto > 0 ORDER BY size").fetchall()


def quantiles(column: str) -> str:
    """SQL for the median, the 10th and the 90th percentile of a column: COLUMN, COLUMN_low and COLUMN_high."""
    parts = ((2, column), (1, f"{column}_low"), (3, f"{column}_high"))
    return ", ".join(f"unbounded(deciles_of({column})[{index}]) AS {each}" for index, each in parts)


def _smallest(cubes: list[tuple[str, int]], where: Filter, fields: Sequence[str]) -> tuple[str | None, int]:
    """The smallest cube that keeps the filter's fields and these fields apart; None and 0 if there is none."""
    needed = {*fields, *(name for name, _ in where.items())}
    return next((cube for cube in cubes if needed <= set(CUBES[cube[0]])), (None, 0))


def _union(select: str, sources: Sequence[str]) -> str:
    return " UNION ALL ".join(f"{select} {source}" for source in sources)
