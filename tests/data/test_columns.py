"""Columns against what DuckDB makes of them, and a new one: a line, and the place that computes it."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from binade.data.index.tables import INDEX_TABLES
from binade.data.run.columns import TensorRow, columns_of
from binade.data.run.segment import TABLES
from tests.conftest import run_python
from tests.data.builder import assorted, make_run
from tests.test_packaging import copy_project

# What a user of a copy of the project adds to it.
DECLARED = '    first_axis: int | None = column(LONG, "length of the first axis", default=None, optional=True)\n'
COMPUTED = "                first_axis=shape[0],\n"
RUN = (
    *("-m", "binade", "run", "--recipe", "mxfp8", "--layers", "1", "--micro-batch-size", "1", "--train-iters", "1"),
    *("--sequence-length", "64", "--backend", "torch", "--scores", ""),
)
QUERY = """
import sys
from binade.data.index.catalog import Catalog

with Catalog.open(sys.argv[1]) as catalog:
    assert not catalog.refused
    print(catalog.table("tensor").to_pandas()[["run_id", "shape", "first_axis"]].to_json(orient="records"))
"""


def test_the_index_has_the_columns_of_segments_in_their_order() -> None:
    """With the types that DuckDB gives those of Arrow. In the place of the tensor's id stands its key."""
    opened = duckdb.connect()
    for table in INDEX_TABLES.values():
        opened.execute(table.sql)
    for name, schema in TABLES.items():
        opened.register("segment", schema.empty_table())
        given, made = (
            opened.execute(f"SELECT column_name, column_type FROM (DESCRIBE {table})").fetchall()
            for table in ("segment", name)
        )
        own = given if name == "tensor" else given[1:]
        added = [("sketch_start", "BIGINT"), ("sketch_stop", "BIGINT")] if name == "tensor" else []
        assert made == [("key", "INTEGER"), *own, *added]


def test_a_name_stands_for_one_column() -> None:
    for name, table in INDEX_TABLES.items():
        names = [column.name for column in table.columns]
        assert len(set(names)) == len(names), name


@pytest.mark.slow
def test_a_new_column_is_a_line_and_the_place_that_computes_it(tmp_path: Path) -> None:
    """It is recorded, indexed and documented; in the rows of runs that were recorded before, it is null."""
    copy = copy_project(tmp_path / "copy")
    for path, before, line in (
        ("data/run/columns.py", "    recomputed: bool | None = column(", DECLARED),
        ("collector/capture/measure.py", "                recomputed=recomputed,\n", COMPUTED),
    ):
        source = (copy / path).read_text()
        assert source.count(before) == 1
        (copy / path).write_text(source.replace(before, line + before))
    root = tmp_path / "root"
    old = make_run(root, assorted(0, format="mxfp8"))
    segment = next(old.directory.glob("segments/*/tensor.parquet"))
    assert pq.read_schema(segment).names == [column.name for column in columns_of(TensorRow)]
    env = {"PYTHONPATH": str(copy)}
    done = run_python(*RUN, env=env | {"TENSOR_SAVE_DIR": str(root)}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_python("-c", QUERY, root, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["run_id"] == old.run_id for row in rows} == {True, False}
    for row in rows:
        assert row["first_axis"] == (None if row["run_id"] == old.run_id else row["shape"][0])
    page = run_python(copy / "docs" / "generate.py", env=env, cwd=tmp_path)
    assert "| `first_axis` | BIGINT | length of the first axis |" in page.stdout, page.stderr
