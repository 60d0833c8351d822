"""A user's own SQL, read-only, on a copy of the index: the only place that runs SQL from outside.

The copy is a DuckDB file without a name, so it disappears with the app, however the app ends. Sketches, which are most
of the data, are not copied: `sketch` is a view of the segments' files. Each statement runs in a process of its own
(`data.index.statement`), which opens the copy read-only and disables everything else before it parses the statement: no
files but those of the view, no network, extensions or spilling to disk, a locked configuration, limited memory. A
statement must be a single SELECT; its process is killed at a timeout, and the number of rows is limited.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import pandas as pd
import pyarrow as pa

from binade.data.exchange.python import package_environment
from binade.data.index import statement
from binade.data.index.catalog import PUBLIC_TABLES, Catalog
from binade.data.index.statement import MEMORY as MEMORY
from binade.data.words.text import one_line

SECONDS = 5.0
ROWS = 1000
AT_ONCE = 4  # statements: each may hold its memory
# The directory's name is the run's id, as in the index: files are <root>/<run_id>/segments/<name>/sketch.parquet.
SKETCH = """string_split(filename, '/')[-4] || '/' || tensor_id AS tensor_id, bin::SMALLINT AS bin,
    count::BIGINT AS count"""
STARTUP = 60.0  # seconds until the process is ready, even on a busy machine


class QueryError(ValueError):
    """The statement cannot be run, or was stopped. The message says why, in one line."""


@dataclass(frozen=True)
class Answer:
    """The rows, whether there were more than the limit, and how long it took."""

    rows: pd.DataFrame
    more: bool
    seconds: float


class Sandbox:
    """A closed copy of a catalog's tables. Safe to use from several threads. Raises QueryError if the folder of
    temporary files is too full for the copy."""

    def __init__(self, catalog: Catalog) -> None:
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        try:
            self._files = catalog.sketch_files()
            self._copy, self._columns = _copy(catalog, self._files)
        except (duckdb.IOException, OSError) as error:
            raise QueryError(f"the index cannot be copied into {tempfile.gettempdir()}: {one_line(error)}") from error

    def close(self) -> None:
        self._copy.close()

    def columns(self) -> pd.DataFrame:
        """The columns that a statement can use: table, column, type."""
        return self._columns.copy()

    def select(self, sql: str, limit: int = ROWS, seconds: float = SECONDS) -> Answer:
        """Return at most `limit` rows of a single SELECT. Raises QueryError."""
        try:
            with self._slots, _Process(self._copy.fileno()) as process:
                process.send({"sql": sql, "limit": limit, "files": self._files})
                start = time.monotonic()
                rows = process.rows(seconds)
                took = time.monotonic() - start
        except QueryError as error:
            if all(map(os.path.exists, self._files)):
                raise
            raise QueryError("segments were merged or deleted since the index was copied: run it again") from error
        with duckdb.connect(":memory:") as connection:  # its types are shown as DuckDB shows them
            frame = connection.from_arrow(rows).df()
        return Answer(frame.head(limit), len(frame) > limit, took)


def _copy(catalog: Catalog, sketches: list[str]) -> tuple[BinaryIO, pd.DataFrame]:
    """An open DuckDB file of the public tables, without a name, and their columns."""
    with tempfile.TemporaryDirectory(prefix="binade-sql-") as folder:
        path = Path(folder) / "index.duckdb"
        with duckdb.connect(path) as connection:
            for name in PUBLIC_TABLES:
                if name == "sketch" and sketches:
                    files = connection.read_parquet(sketches, filename=True, hive_partitioning=False)
                    files.project(SKETCH).create_view(name)
                else:
                    connection.register("incoming", catalog.table(name))
                    connection.execute(f"CREATE TABLE {name} AS FROM incoming")
                    connection.unregister("incoming")
            columns = connection.execute(
                'SELECT table_name AS "table", column_name AS "column", data_type AS type'
                " FROM information_schema.columns ORDER BY table_name, ordinal_position"
            ).df()
        return open(path, "rb"), columns


class _Process:
    """The process of one statement; leaving the block kills it."""

    def __init__(self, copy: int) -> None:
        command = [sys.executable, "-P", "-m", statement.__name__, str(os.getpid()), str(copy)]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        # glibc's allocator would reserve address space for each thread, up to all that a statement may use.
        environment = package_environment() | {"MALLOC_ARENA_MAX": "2"}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=nowhere, pass_fds=(copy,), env=environment
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with suppress(BrokenPipeError):
            self._in.close()
        self._out.close()
        self._process.wait()

    @contextmanager
    def _limit(self, seconds: float) -> Iterator[threading.Event]:
        """Kill the process if the block takes longer, and set the event."""
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            yield expired
        finally:
            timer.cancel()

    def send(self, request: dict[str, Any]) -> None:
        """Send the statement. Returns when the process starts to run it."""
        with self._limit(STARTUP):
            with suppress(BrokenPipeError):  # it has ended: there will be no answer
                self._in.write(json.dumps(request).encode())
                self._in.close()
            if self._out.readline() != statement.READY:
                raise QueryError("the query process did not start: try again, or restart the app")

    def rows(self, seconds: float) -> pa.Table:
        """The rows, within this time."""
        with self._limit(seconds) as expired:
            kind, content = self._out.readline(), self._out.read()
            status = self._process.wait()
        if expired.is_set():
            raise QueryError(f"stopped after {seconds:g} s: narrow the query, or aggregate")
        if kind == statement.ERROR:
            raise QueryError(content.decode())
        if status < 0:  # DuckDB may also abort where it cannot allocate
            raise QueryError(statement.TOO_MUCH)
        if kind != statement.ROWS or status:
            raise QueryError("the query process ended without a result: simplify the query")
        return pa.ipc.open_stream(content).read_all()
