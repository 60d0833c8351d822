"""One SQL statement of a user, in a process of its own: the child of `data.index.sandbox`.

DuckDB neither counts a single value of a gigabyte in its memory limit nor interrupts its computation in time. So the
operating system enforces the limits: of the address space here, and the parent kills the process at its timeout.
Imports are few, because every statement waits for them.

    python -m binade.data.index.statement PARENT COPY    the parent's pid, and the open file of the index's copy
    stdin    {"sql": text, "limit": rows, "files": paths of the segments' sketches} as JSON
    stdout   READY when the clock may start, then ROWS and an Arrow stream, or ERROR and one line of text
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from binade.data.words.text import one_line

MEMORY = "512 MB"
MEMORY_BYTES = 512 * 10**6
# Address space above what the open database takes: DuckDB's own limit, and as much again for what it does not count
# and what the allocators of its threads hold in reserve.
ADDRESS_SPACE = 2 * MEMORY_BYTES
MAX_BYTES = 32 << 20  # of the rows that are returned
COLUMNS = 1000  # the browser becomes slow with more
# Python has no dates after 9999, no infinite ones, and no numbers such as BIGNUM: these are returned as DuckDB's text.
NUMBER_OR_TEXT = re.compile(r"BOOLEAN|VARCHAR|FLOAT|DOUBLE|U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|DECIMAL\(.*\)")
VALUE = 64  # bytes that a value takes in Python besides its own
SHUT = (
    *(f"SET {folder} = ''" for folder in ("home_directory", "secret_directory", "extension_directory")),  # shown by SQL
    "SET temp_directory = ''",
    "SET enable_external_access = false",
    "SET python_enable_replacements = false",  # otherwise a table's name could refer to a variable of this process
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET allow_community_extensions = false",
    "SET max_temp_directory_size = '0B'",
    "SET threads = 2",
    f"SET memory_limit = '{MEMORY}'",
    "SET lock_configuration = true",
)
TOO_MUCH = f"it needs more than {MEMORY} of memory: narrow the query, or aggregate"
READY, ROWS, ERROR = b"ready\n", b"rows\n", b"error\n"
PR_SET_PDEATHSIG = 1


class RefusedStatementError(ValueError):
    """The statement cannot be run. The message says why, in one line."""


def answer(connection: duckdb.DuckDBPyConnection, sql: str, limit: int) -> pa.Table:
    """Return at most limit + 1 rows of a single SELECT. Raises RefusedStatementError."""
    statement = _single_select(sql)
    try:
        # The newline ends a comment on the last line.
        relation = connection.sql(f"FROM ({statement}\n)")
        if len(relation.columns) > COLUMNS:
            raise RefusedStatementError(f"the result has {len(relation.columns):,} columns: select at most {COLUMNS:,}")
        names = [f"c{index}" for index in range(len(relation.columns))]
        shown = ", ".join(
            name if NUMBER_OR_TEXT.fullmatch(str(kind)) else f"{name}::VARCHAR"
            for name, kind in zip(names, relation.types, strict=True)
        )
        rows = connection.sql(
            f"SELECT {shown} FROM ({statement}\n) AS rows({', '.join(names)}) LIMIT {limit + 1}"
        ).to_arrow_table()
        rows = rows.rename_columns(relation.columns)
    except (duckdb.OutOfMemoryException, MemoryError, pa.ArrowMemoryError):
        raise RefusedStatementError(TOO_MUCH) from None
    except (duckdb.Error, pa.ArrowException) as error:
        raise RefusedStatementError(TOO_MUCH if "bad_alloc" in str(error) else one_line(error)) from None
    held = rows.nbytes + VALUE * rows.num_rows * rows.num_columns
    if held > MAX_BYTES:
        raise RefusedStatementError(f"the result takes {held / 1e6:.0f} MB: select fewer columns or shorter strings")
    return rows


def _single_select(sql: str) -> str:
    """The text of the one SELECT in sql. Raises RefusedStatementError."""
    if "\0" in sql:
        raise RefusedStatementError("a statement cannot contain a NUL character")
    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise RefusedStatementError(one_line(error)) from None
    if len(statements) != 1:
        raise RefusedStatementError(f"one SELECT is expected, not {len(statements)} statements")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise RefusedStatementError(f"only SELECT can be run here, not {statements[0].type.name.replace('_', ' ')}")
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


def _confine() -> None:
    """Limit this process: no more memory than ADDRESS_SPACE, no files written, no core dump."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    most = pages * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent had ended before
        os._exit(1)


def main() -> None:
    _die_with(int(sys.argv[1]))
    request: dict[str, Any] = json.load(sys.stdin)
    copy = int(sys.argv[2])
    connection = duckdb.connect(f"/proc/self/fd/{copy}", read_only=True)
    os.close(copy)  # DuckDB keeps it open; by this name, which it would allow, nobody can read it as bytes
    connection.execute("SET allowed_paths = ?", [request["files"]])
    for statement in SHUT:
        connection.execute(statement)
    _confine()
    out = sys.stdout.buffer
    out.write(READY)
    out.flush()
    try:
        rows = answer(connection, request["sql"], request["limit"])
    except RefusedStatementError as error:
        out.write(ERROR + str(error).encode(errors="replace"))
    else:
        out.write(ROWS)
        with pa.ipc.new_stream(out, rows.schema) as sink:
            sink.write_table(rows)
    out.flush()
    os._exit(0)  # there is nothing to clean up


if __name__ == "__main__":
    main()
