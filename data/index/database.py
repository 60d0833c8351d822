"""The DuckDB database that a root's segments are indexed in: a file of the root, or memory if that is impossible."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from weakref import WeakSet

import duckdb

from binade.data.index.intake import Intake, schema

FILE = "index.duckdb"
# With it, DuckDB 2.0 first groups each sketch by its tensor, which does not reduce the number of rows.
SETTINGS: dict[str, str | bool | int | float | list[str]] = {"disabled_optimizers": "partial_aggregate_pushdown"}
INDEX_MEMORY = "200MB"  # DuckDB's limit; larger operations spill to disk
AT_REST = "16MB"  # DuckDB's limit while no query runs
SPILLED = ".index.duckdb.tmp"
UNAVAILABLE = ("Could not set lock", "Permission denied", "Read-only file system", "No space left", "quota exceeded")
# DuckDB's exceptions for damaged blocks of the file.
DAMAGE = (duckdb.IOException, duckdb.SerializationException, duckdb.InternalException, duckdb.FatalException)
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
INTERRUPTED = "Query interrupted"  # what DuckDB turns a KeyboardInterrupt during a query into
_versions = itertools.count()
_opened: WeakSet[Index] = WeakSet()  # those of one path share a database, and its limits
_opening = threading.Lock()


class Index:
    """The database, empty or in its last state: `intake` brings it up to date. Threads share it.

    generation  counts the databases that replaced the first one
    notices     sentences for the user, oldest first
    """

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / FILE
        self.generation = 0
        self._marks: tuple[object, object] = (None, None)
        self.counted: tuple[object, object] = (None, None)
        self._version = self._progress = next(_versions)
        self._changing = False  # whether rows differ from those that the version stands for
        self._snapshots: WeakSet[Snapshot] = WeakSet()
        self.notices: list[str] = []
        self._cursors = 0
        self._replacing: int | None = None
        self._gate = threading.Condition()
        self._open()

    @contextmanager
    def cursor(self, *, newest: bool = False) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor at the snapshot of the context; at the newest state if there is none, or if `newest`."""
        snapshot = None if newest else self.current
        with snapshot.lock if snapshot else nullcontext():
            with self._gate:
                self._gate.wait_for(lambda: self._replacing in (None, threading.get_ident()))
                cursor = self._begin(snapshot) if snapshot else self._connection.cursor()
                self._cursors += 1
            try:
                yield cursor
            except BaseException as error:
                if snapshot:  # its transaction is aborted
                    self._end(snapshot)
                if isinstance(error, RuntimeError) and str(error) == INTERRUPTED:
                    raise KeyboardInterrupt from error
                raise
            finally:
                with self._gate:
                    if not snapshot:
                        cursor.close()
                    self._cursors -= 1
                    self._gate.notify_all()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Within this context, every cursor has the state of the first one, whatever is written in the meantime. Nested
        contexts, and threads that run in a copy of the context, share it."""
        snapshot = self.current or Snapshot(self)
        with snapshot.lock:
            snapshot.users += 1
        token = _current.set(snapshot)
        try:
            yield
        finally:
            _current.reset(token)
            with snapshot.lock:
                snapshot.users -= 1
                if not snapshot.users:
                    self._end(snapshot)

    @property
    def current(self) -> Snapshot | None:
        """The snapshot of the context."""
        snapshot = _current.get()
        return snapshot if snapshot and snapshot.index is self else None

    @property
    def versions(self) -> tuple[int, int]:
        """Catalog's version and progress, at the snapshot of the context."""
        snapshot = self.current
        if not snapshot:
            return self._version, self._progress
        if snapshot.cursor is None:
            with self.cursor():  # begins it
                pass
        return snapshot.versions

    def _begin(self, snapshot: Snapshot) -> duckdb.DuckDBPyConnection:
        """The snapshot's cursor, whose transaction begins with its first use. The caller holds the gate."""
        if snapshot.cursor is None:
            cursor = self._connection.cursor()
            cursor.execute("BEGIN")
            cursor.execute("SELECT run_id FROM run LIMIT 1").fetchall()
            snapshot.cursor = cursor
            # Nothing else has the version of a state between two marks.
            version = next(_versions) if self._changing else None
            snapshot.versions = (version, version) if version is not None else (self._version, self._progress)
            self._snapshots.add(snapshot)
        return snapshot.cursor

    def _end(self, snapshot: Snapshot) -> None:
        """Let the snapshot begin again at its next use."""
        with self._gate:
            if snapshot.cursor is not None:
                snapshot.cursor.close()
                snapshot.cursor = None

    def _close(self) -> None:
        """Close the database once no cursor is in use. The caller holds the gate."""
        self._gate.wait_for(lambda: not self._cursors)
        for snapshot in self._snapshots:
            self._end(snapshot)
        self._connection.close()

    def close(self) -> None:
        """Waits until no cursor is in use."""
        with self._gate:
            self._close()
        with _opening:  # which `release_memory` holds while it counts
            _opened.discard(self)

    def trim_memory(self) -> None:
        """Return to the system the memory that DuckDB has freed and its allocator keeps, up to 100 MB."""
        with self._gate:
            if not self.in_memory:
                with suppress(duckdb.Error):  # closed in the meantime
                    self._connection.execute(f"SET memory_limit = '{INDEX_MEMORY}'")  # the same as before

    def release_memory(self) -> None:
        """Free the memory that DuckDB holds for later queries, unless a query is running or another Index of this
        process has the database open."""
        with self._gate, _opening:
            if not (self._cursors or self.in_memory) and [index.path for index in _opened].count(self.path) == 1:
                for statements in (
                    f"CHECKPOINT; SET memory_limit = '{AT_REST}'",
                    f"SET memory_limit = '{INDEX_MEMORY}'",
                ):
                    with suppress(duckdb.Error):  # a full disk, or closed in the meantime: nothing is freed
                        self._connection.execute(statements)

    def is_damage(self, error: duckdb.Error) -> bool:
        """Whether the error says that the file is damaged."""
        damaged = isinstance(error, DAMAGE) or "Corrupt" in str(error)  # to_arrow_table raises a plain duckdb.Error
        return damaged and not self.in_memory and not is_unavailable(error)

    def replace(self, *, in_memory: bool) -> None:
        """Start again with an empty database, in memory or in a new file. Waits until no cursor is in use. Until
        `release`, other threads that ask for one wait, so that none sees the database while it is filled."""
        with self._gate:
            self._replacing = threading.get_ident()
            self._close()
            if not in_memory:
                self.notices.append(f"{self.path} was damaged and has been rebuilt from the runs.")
                _discard(self.path)
            self._open(in_memory)
            self.generation += 1
            self.mark(None, None)

    def release(self) -> None:
        """Release the threads that wait for a database that was replaced, and let this one's snapshot begin again."""
        if snapshot := self.current:
            with snapshot.lock:
                self._end(snapshot)
        with self._gate:
            self._replacing = None
            self._gate.notify_all()

    def mark(self, content: object, course: object) -> None:
        """Increment progress if anything has changed since the last mark, and version if the content has changed."""
        with self._gate:
            before, self._marks = self._marks, (content, course)
            if before != self._marks:
                self._progress = next(_versions)
                if before[0] != content:
                    self._version = self._progress
            self._changing = False

    def changing(self) -> None:
        """Called before rows are written, until the next mark."""
        with self._gate:
            self._changing = True

    def _open(self, in_memory: bool = False) -> None:
        reason = _no_file(self.path)
        if reason:
            self.notices.append(reason)
        usable = self.root.is_dir() and not (reason or in_memory)
        for _ in ("as it is", "rebuilt") if usable else ():
            try:
                # The leading dot keeps it from being mistaken for a run.
                limits = {"memory_limit": INDEX_MEMORY, "temp_directory": str(self.root / SPILLED)}
                with _opening:
                    connection = duckdb.connect(str(self.path), config=SETTINGS | limits)
                    _opened.add(self)
            except duckdb.Error as error:
                if is_unavailable(error):
                    break
            else:
                if _prepare(connection):
                    self._connection, self.in_memory, self.intake = connection, False, Intake(self.root)
                    return
                connection.close()
            _discard(self.path)
        self._connection, self.in_memory, self.intake = _in_memory(), True, Intake(self.root)


class Snapshot:
    """A state of the index, which the threads that share it see one at a time. It is that of its first use."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.lock = threading.RLock()
        self.users = 0
        self.cursor: duckdb.DuckDBPyConnection | None = None
        self.versions = (0, 0)


_current: ContextVar[Snapshot | None] = ContextVar("snapshot", default=None)


def _in_memory() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:", config=SETTINGS)
    connection.execute(schema())
    return connection


def is_unavailable(error: duckdb.Error) -> bool:
    return any(reason in str(error) for reason in UNAVAILABLE)


def _no_file(index: Path) -> str | None:
    """A sentence if the name of the index or its log is taken by something other than a file: opening it could block,
    and Binade must not delete it."""
    for path in (index, index.with_name(f"{index.name}.wal")):
        try:
            mode = os.stat(path).st_mode
        except OSError:
            continue
        if not stat.S_ISREG(mode):
            kind = KINDS.get(stat.S_IFMT(mode), "not a regular file")
            return f"{path} is {kind}: move it away. Until then the index is kept in memory and rebuilt at each start."
    return None


def _prepare(connection: duckdb.DuckDBPyConnection) -> bool:
    """Create the tables in a new index; False for one that is damaged or made by another version of the schema."""
    wanted = schema()
    try:
        tables = connection.execute("SELECT table_name FROM information_schema.tables").fetchall()
        if not tables:
            connection.execute("BEGIN")
            connection.execute(wanted)
            connection.execute("CREATE TABLE origin AS SELECT ? AS schema", [wanted])
            connection.execute("COMMIT")
            return True
        return ("origin",) in tables and connection.execute("FROM origin").fetchall() == [(wanted,)]
    except duckdb.Error:  # damaged, or no room for it
        return False


def _discard(index: Path) -> None:
    """Delete an index that cannot be used. It is derived data; the runs are not touched."""
    for path in (index, index.with_name(f"{index.name}.wal")):
        path.unlink(missing_ok=True)
    shutil.rmtree(index.with_name(SPILLED), ignore_errors=True)
