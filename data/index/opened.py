"""The opened index of a root: synchronization, cache, and the selection that a filter makes.

`<root>/index.duckdb` belongs to one process at a time. If it is locked, the root is read-only or the disk is full, the
segments are indexed into memory instead, which is slower to open and gives the same answers. The run directories are
the source of truth: `sync` updates the index from them, adding each segment once and dropping runs that are gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import duckdb
import pandas as pd

from binade.data.index.cache import Done, ResultCache
from binade.data.index.database import Index, is_unavailable
from binade.data.run.access import read_only
from binade.data.run.directory import check_usable, resolve_root
from binade.data.run.segment import SegmentError
from binade.data.run.store import sweep
from binade.data.words.filter import FIELDS, Filter
from binade.data.words.text import describe

C = TypeVar("C", bound="OpenIndex")
P = ParamSpec("P")
T = TypeVar("T")
GROUPABLE = (*FIELDS, "format", "tensor_id")
HIDDEN = "key, sketch_start, sketch_stop"  # columns of `tensor` that exist only in the index
EFFECTS = "SELECT count(*), bit_xor(hash(run_id, format, part, layer_index, module, sequences)) FROM effect"
IN_LIST = "tensor.tensor_id IN (SELECT unnest(?::VARCHAR[]))"


class CatalogError(ValueError):
    """The index does not have the requested data. The message says what is missing."""


class DamagedIndexError(CatalogError):
    """The index is damaged, even after it was rebuilt."""

    exit_status = 1


class OutdatedError(Exception):
    """Files that belong to the snapshot are gone. A new snapshot has the runs that exist."""


def repairing(query: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Decorates a query: it is tried once more if the index is out of date, or damaged and then rebuilt."""

    @wraps(query)
    def ask(catalog: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        generation = catalog._index.generation
        try:
            return query(catalog, *args, **kwargs)
        except duckdb.Error as error:
            catalog._repair(error, generation)
        except SegmentError as error:  # merged, or deleted with its run, since the last synchronization
            catalog.sync()
            if catalog.in_snapshot:  # what was read before may be gone
                raise OutdatedError(f"the runs of {catalog.root} have changed meanwhile") from error
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


class OpenIndex:
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
        self.cache: ResultCache | None = None
        self.reads: Callable[[str], None] = lambda tensor_id: None

    @classmethod
    def open(cls, root: str | Path | None = None) -> Self:
        """Open the index of a root and bring it up to date; a directory that does not exist is treated as empty.

        Raises RootError if the root is a file, RunError if it is not a path.
        """
        path = resolve_root(root)
        check_usable(path)
        if not read_only():
            sweep(path)
        catalog = cls(path, Index(path))
        catalog.sync()
        return catalog

    @property
    def version(self) -> int:
        return self._index.versions[0]

    @property
    def progress(self) -> int:
        return self._index.versions[1]

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cursor(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        return self._index.cursor()

    def snapshot(self) -> AbstractContextManager[None]:
        """Within this context, all queries of this thread see the index as it is at the first of them. They raise
        OutdatedError if a file of that state is gone."""
        return self._index.snapshot()

    @property
    def in_snapshot(self) -> bool:
        return self._index.current is not None

    def _repair(self, error: duckdb.Error, generation: int) -> None:
        """Rebuild the index after a query has found it damaged, unless another query already has. Raises the error if
        it has another cause."""
        if not self._index.is_damage(error) and generation == self._index.generation:
            raise error
        with self._updating():
            if generation == self._index.generation:
                self._index.replace(in_memory=False)
                self._synchronize()

    def kept(
        self, request: Hashable, compute: Callable[[], T], pool: Executor | None = None, step: Done | None = None
    ) -> T:
        """Return the result of compute at this version, for these runs, from the cache if there is one. pool: its
        threads compute what is in no cache yet, at the state of this one. step: called while this thread waits."""

        def compute_at_this_state(done: Done) -> T:
            with self.snapshot() if pool else nullcontext():
                return compute()

        return (
            self.cache.get(self.version, (self._only, request), compute_at_this_state, pool, step)
            if self.cache
            else compute()
        )

    @repairing
    def ask(self, sql: str, parameters: list[Any] | None = None, of: Hashable = None) -> pd.DataFrame:
        """Return the rows of a query. of: what they depend on besides the version."""

        def rows() -> pd.DataFrame:
            with self._cursor() as cursor:
                return cursor.execute(sql, parameters or []).df()

        return self.kept((sql, repr(parameters), of), rows).copy(deep=False)  # pandas 3 copies on write

    @repairing
    def _rows(self, sql: str, parameters: list[Any] | None = None) -> list[tuple[Any, ...]]:
        def ask() -> list[tuple[Any, ...]]:
            with self._cursor() as cursor:
                return cursor.execute(sql, parameters or []).fetchall()

        return list(self.kept(("rows", sql, repr(parameters)), ask))

    # Synchronization with the disk

    def sync(self) -> int:
        """Add new segments, update run states and remove deleted runs; returns the number of segments added.

        A segment that cannot be read is skipped, listed in `refused` and tried again next time. If the index can no
        longer be written (for example because the disk is full), it is left unchanged and the segments are loaded into
        memory instead.
        """
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
        with self._index.cursor(newest=True) as cursor:
            added = self._index.intake.catch_up(cursor, self._index.changing)
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
        effects = cursor.execute(EFFECTS).fetchone()
        records = cursor.execute("SELECT count(*), bit_xor(hash(run_id, file, line, record)) FROM record").fetchone()
        return (tensors, ids, effects), (runs, records)

    # Which runs and tensors a query is about

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
        names += self._rows(EFFECTS)
        return tuple(names), {str(run): tuple(counted) for run, *counted in rows}

    def restricted(self, run_ids: Iterable[str]) -> Self:
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

    def condition(self, where: Filter | None = None, tensor_ids: list[str] | None = None) -> tuple[str, list[Any]]:
        """Return the filter as a condition on the table `tensor`, with its parameters, for `ask`."""
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
