"""A user's own SQL, read-only, over a copy of the index: the one place where SQL from outside is run.

The statement runs in a DuckDB of its own, in memory, that holds copies of the index's tables and nothing else. Before
the first statement it is shut: no files, no network, no extensions, no spilling to disk, a memory limit, and a locked
configuration. A statement must be a single SELECT; it is interrupted after a time, and the rows are limited.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import duckdb
import pandas as pd

from data.catalog import PUBLIC_TABLES, Catalog

SECONDS = 5.0
ROWS = 1000
MEMORY = "512 MB"
MAX_BYTES = 32 << 20  # of the rows that are handed on
SHUT = (
    "SET enable_external_access = false",
    "SET python_enable_replacements = false",  # or a table's name could be a variable of this process
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET allow_community_extensions = false",
    "SET max_temp_directory_size = '0B'",
    "SET threads = 2",
    f"SET memory_limit = '{MEMORY}'",
    "SET lock_configuration = true",
)


class QueryError(ValueError):
    """The statement cannot be run, or was stopped. The message says why, in one line."""


@dataclass(frozen=True)
class Answer:
    """The rows, whether there were more than the limit, and how long it took."""

    rows: pd.DataFrame
    more: bool
    seconds: float


class Sandbox:
    """A closed copy of a catalog's tables. Safe to use from several threads: one statement at a time."""

    def __init__(self, catalog: Catalog) -> None:
        self._connection = duckdb.connect(":memory:")
        self._lock = threading.Lock()
        for name in PUBLIC_TABLES:
            self._connection.register("incoming", catalog.table(name))
            self._connection.execute(f"CREATE TABLE {name} AS FROM incoming")
            self._connection.unregister("incoming")
        for statement in SHUT:
            self._connection.execute(statement)

    def close(self) -> None:
        self._connection.close()

    def columns(self) -> pd.DataFrame:
        """table, column, type: what can be asked for."""
        rows = self._connection.execute(
            'SELECT table_name AS "table", column_name AS "column", data_type AS type'
            " FROM information_schema.columns ORDER BY table_name, ordinal_position"
        )
        return rows.df()

    def select(self, sql: str, limit: int = ROWS, seconds: float = SECONDS) -> Answer:
        """At most `limit` rows of a single SELECT. Raises QueryError."""
        statement = _single_select(sql)
        with self._lock:
            cursor = self._connection.cursor()
            expired = threading.Event()

            def stop() -> None:
                expired.set()
                cursor.interrupt()

            timer = threading.Timer(seconds, stop)
            start = time.monotonic()
            timer.start()
            try:
                # The newline ends a comment on the last line.
                rows = cursor.execute(f"FROM ({statement}\n) LIMIT {limit + 1}").df()
            except duckdb.InterruptException:
                raise QueryError(f"stopped after {seconds:g} s: ask for less, or aggregate") from None
            except duckdb.OutOfMemoryException:
                raise QueryError(f"it needs more than {MEMORY} of memory: ask for less, or aggregate") from None
            except duckdb.Error as error:
                if expired.is_set():
                    raise QueryError(f"stopped after {seconds:g} s: ask for less, or aggregate") from None
                raise QueryError(_one_line(error)) from None
            finally:
                timer.cancel()
                cursor.close()
            if (held := int(rows.memory_usage(deep=True).sum())) > MAX_BYTES:
                raise QueryError(f"the rows hold {held / 1e6:.0f} MB: ask for fewer columns or shorter texts")
            return Answer(rows.head(limit), len(rows) > limit, time.monotonic() - start)


def _single_select(sql: str) -> str:
    """The text of the one SELECT in sql. Raises QueryError."""
    if "\0" in sql:
        raise QueryError("a statement cannot hold a NUL character")
    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise QueryError(_one_line(error)) from None
    if len(statements) != 1:
        raise QueryError(f"one SELECT is expected, not {len(statements)} statements")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise QueryError(f"only SELECT can be run here, not {statements[0].type.name.replace('_', ' ')}")
    return _without_semicolon(statements[0].query)


def _without_semicolon(statement: str) -> str:
    """The text before the semicolon that ends it, if one does."""
    text = statement.encode()
    ends = [
        at
        for at, kind in duckdb.tokenize(statement)
        if kind == duckdb.token_type.operator and text[at : at + 1] == b";"
    ]
    return text[: ends[0]].decode() if ends else statement


def _one_line(error: duckdb.Error) -> str:
    return " ".join(str(error).split("\n\nLINE")[0].split())[:400]
