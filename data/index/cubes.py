"""The cubes of an index: sketches that are summed up in advance, over the fields that queries use least."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb

from binade.data.index.sketches import PLACED, sketches
from binade.data.run.segment import SegmentError
from binade.data.words.filter import FIELDS

TAIL = 1 << 13  # tensors that are added before they are summed up
# What is summed up, each time with the fields that its rows keep apart.
CUBES = {
    name: tuple(field for field in (*FIELDS, "format") if field not in left_out)
    for name, left_out in {
        "place": {"iteration", "micro_batch", "rank"},
        "history": {"layer_index", "module", "expert", "micro_batch", "rank"},
    }.items()
}
SUMS = "sum(count)::BIGINT AS count"  # adds up the rows of sketches


@contextmanager
def transaction(cursor: duckdb.DuckDBPyConnection) -> Iterator[None]:
    cursor.execute("BEGIN")
    try:
        yield
    except BaseException:
        cursor.execute("ROLLBACK")
        raise
    cursor.execute("COMMIT")


def same(a: str, b: str, fields: Iterable[str]) -> str:
    """The condition that rows of two tables have the same values, or none, in these fields."""
    return " AND ".join(f"{a}.{name} IS NOT DISTINCT FROM {b}.{name}" for name in fields)


def next_key(cursor: duckdb.DuckDBPyConnection) -> int:
    """The key of the next tensor. It is never one that is already summed up, even if that tensor was deleted."""
    ((key,),) = cursor.execute(
        "SELECT greatest(max(tried), (SELECT coalesce(max(key) + 1, 0) FROM tensor)) FROM cube"
    ).fetchall()
    return int(key)


def sum_up(cursor: duckdb.DuckDBPyConnection, root: Path) -> None:
    """Add the sketches of new tensors to each cube if there are many."""
    end = next_key(cursor)
    for cube, upto, tried, merged in cursor.execute("SELECT name, upto, tried, merged FROM cube").fetchall():
        if end - upto >= max(TAIL, 2 * (tried - upto)):
            _add_to_cube(cursor, root, cube, upto, end, merged)


def _add_to_cube(cursor: duckdb.DuckDBPyConnection, root: Path, cube: str, upto: int, end: int, merged: int) -> None:
    """Add the tensors with keys from upto to end to a cube if there are at least two for each of its rows on average.
    merged: the rows of its sums right after they were last merged."""
    names, alike = ", ".join(CUBES[cube]), same("tensor", cube, CUBES[cube])
    new = f"FROM tensor WHERE key >= {upto}"
    ((tensors, rows),) = cursor.execute(
        f"SELECT (SELECT count(*) {new}), (SELECT count(*) FROM (SELECT DISTINCT {names} {new}))"
    ).fetchall()
    cursor.execute("UPDATE cube SET tried = ? WHERE name = ?", [end, cube])
    if tensors < 2 * rows:
        return
    # Without a cube queries read the sketches: where sums need more than 64 bits, or more memory than there
    # is, or a segment was merged in the meantime.
    with suppress(duckdb.DataError, duckdb.OutOfMemoryException, SegmentError), transaction(cursor):
        cursor.execute(
            # In the order of the tensors, so that the sums of rows that follow each other read the same files.
            f"INSERT INTO {cube} (key, {names})"
            f" SELECT (SELECT coalesce(max(key) + 1, 0) FROM {cube}) + row_number() OVER (ORDER BY first) - 1, {names}"
            f" FROM (SELECT {names}, min(key) AS first {new} GROUP BY ALL) AS tensor ANTI JOIN {cube} ON {alike}"
        )
        part = f"SELECT {PLACED}, {cube}.key AS other FROM tensor JOIN {cube} ON {alike} WHERE tensor.key >= {upto}"
        with sketches(cursor, root, part) as added_up:
            cursor.execute(f"INSERT INTO {cube}_sketch FROM {added_up}")
        size = _count(cursor, f"{cube}_sketch")
        merged = merged or size
        if size > 4 * merged:
            cursor.execute(
                f"CREATE OR REPLACE TABLE {cube}_sketch AS SELECT key, bin, {SUMS}"
                f" FROM {cube}_sketch GROUP BY ALL ORDER BY ALL"
            )
            merged = _count(cursor, f"{cube}_sketch")
        cursor.execute(
            "UPDATE cube SET upto = ?, merged = ?, size = ? WHERE name = ?", [end, merged, _count(cursor, cube), cube]
        )


def _count(cursor: duckdb.DuckDBPyConnection, table: str) -> int:
    ((count,),) = cursor.execute(f"SELECT count(*) FROM {table}").fetchall()
    return int(count)
