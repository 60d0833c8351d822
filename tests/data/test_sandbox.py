"""A user's SQL: it sees the index, and nothing else."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from binade.data.index.catalog import PUBLIC_TABLES, Catalog
from binade.data.index.sandbox import QueryError, Sandbox
from binade.data.run.store import process_start
from binade.data.words.filter import Filter
from tests.conftest import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sandbox(catalog: Catalog):
    opened = Sandbox(catalog)
    yield opened
    opened.close()


def test_sees_every_table_of_the_index(catalog, sandbox):
    for name in PUBLIC_TABLES:
        rows = sandbox.select(f"SELECT count(*) AS n FROM {name}").rows["n"].item()
        assert rows == catalog.table(name).num_rows and (rows > 0 or name == "effect")  # nothing was measured
    assert set(sandbox.columns()["table"]) == set(PUBLIC_TABLES)


def test_answers_as_the_catalog_does(catalog, sandbox):
    sql = "SELECT max(kurtosis) AS k FROM tensor WHERE quant_type = 'mxfp4'; -- the worst"
    wanted = catalog.tensors(Filter(quant_type=["mxfp4"]))["kurtosis"].max()
    assert sandbox.select(sql).rows["k"].item() == wanted


def test_sketches_are_read_in_place(catalog, sandbox):
    files = sorted(catalog.root.glob("*/segments/*/sketch.parquet"))
    stored = pa.concat_tables(map(pq.read_table, files)).group_by("bin").aggregate([("count", "sum")]).to_pandas()
    rows = sandbox.select("SELECT bin, sum(count)::BIGINT AS n FROM sketch GROUP BY bin", limit=10_000).rows
    assert dict(rows.itertuples(index=False)) == dict(stored[["bin", "count_sum"]].itertuples(index=False))
    each = "SELECT sum(count) - any_value(numel - nans - infs) AS n FROM sketch JOIN tensor USING (tensor_id)"
    rows = sandbox.select(f"{each} GROUP BY tensor_id", limit=10_000).rows
    assert len(rows) == catalog.totals().tensors and not rows["n"].any()
    for other in (files[0].with_name("manifest.json"), files[0].parent / "../../run.json", f"{files[0].parent}/*"):
        with pytest.raises(QueryError, match="disabled"):
            sandbox.select(f"SELECT * FROM read_blob('{other}')")


def test_settings_do_not_show_the_home_folder(sandbox, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "of-somebody"))
    rows = sandbox.select("SELECT name, value FROM duckdb_settings()", limit=10_000).rows
    assert len(rows) > 100 and "of-somebody" not in rows.to_csv()


def test_a_segment_that_is_gone_is_the_reason(catalog, tmp_path):
    root = tmp_path / "it's [one]"
    shutil.copytree(catalog.root, root, ignore=shutil.ignore_patterns("index.duckdb*"))
    with Catalog.open(root) as copied:
        box = Sandbox(copied)
    count = "SELECT count(bin) AS n FROM sketch"
    assert box.select(count).rows["n"].item() == catalog.table("sketch").num_rows
    shutil.rmtree(next(root.glob("*/segments/*")))
    with pytest.raises(QueryError, match=r"segments were merged or deleted.*run it again"):
        box.select(count)
    box.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT ';' AS x",
        "SELECT ';' AS x;",
        "SELECT ';' AS x -- ö; no",
        "SELECT /* ö; */ ';' AS x ; -- ;",
        "VALUES (';')",
    ],
)
def test_semicolons_and_comments(sandbox, sql):
    assert sandbox.select(sql).rows.iloc[0, 0] == ";"


def test_rows_are_limited_and_it_is_said(sandbox):
    answer = sandbox.select("FROM tensor", limit=7)
    assert len(answer.rows) == 7 and answer.more
    assert not sandbox.select("FROM run", limit=4).more


def test_values_that_python_cannot_hold_are_text(sandbox):
    """As DuckDB writes them; columns of one name keep apart."""
    sql = """SELECT DATE '1000000-01-01' AS d, 'infinity'::TIMESTAMP AS t, TIME '24:00:00' AS t,
                    123456789012345678901234567890123456789012345678901234567890::BIGNUM AS b, {'a': [1, NULL]} AS s"""
    rows = sandbox.select(sql).rows
    number = "123456789012345678901234567890123456789012345678901234567890"
    assert rows.iloc[0].tolist() == ["1000000-01-01", "infinity", "24:00:00", number, "{'a': [1, NULL]}"]
    assert rows.columns[0] == "d" and len(set(rows.columns)) == 5
    assert sandbox.select("FROM test_all_types()").rows.shape[0] == 3
    assert sandbox.select("SELECT 1::UTINYINT AS u, 0.5 AS n, true AS b").rows.iloc[0].tolist() == [1, 0.5, True]
    with pytest.raises(QueryError, match="1,001 columns: select at most 1,000"):
        sandbox.select(f"SELECT {', '.join(map(str, range(1001)))}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE run",
        "INSERT INTO run SELECT * FROM run",
        "DELETE FROM run",
        "UPDATE run SET recipe = 'x'",
        "CREATE TABLE x AS SELECT 1",
        "COPY run TO '{file}'",
        "EXPORT DATABASE '{file}'",
        "ATTACH '{file}'",
        "SET threads = 4",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "PRAGMA version",
        "INSTALL httpfs",
        "LOAD httpfs",
        "CALL pragma_version()",
        "EXPLAIN SELECT 1",
        "BEGIN",
        "WITH x AS (DELETE FROM run RETURNING *) SELECT * FROM x",
        "SELECT 1; DROP TABLE run",
        "SELECT 1) ; DROP TABLE run; SELECT (1",
        "SELECT 1)) --",
        "",
        "-- nothing",
        "selec",
        "SELECT nope FROM run",
        "SELECT 1 \0",
        "SELECT * FROM read_text('{there}')",
        "SELECT * FROM read_csv('{there}')",
        "SELECT * FROM read_parquet('{there}')",
        "SELECT * FROM '{there}'",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM read_text('https://127.0.0.1/')",
        "SELECT getenv('HOME')",
        "SELECT * FROM rows",
        "SELECT * FROM statement",
        "SELECT error('two\nlines')",
    ],
)
def test_refuses_all_else_in_one_line_and_touches_nothing(sandbox, tmp_path, sql):
    there = tmp_path / "secret.csv"
    there.write_text("a,b\n1,2\n")
    asked = sql.format(file=tmp_path / "out", there=there, folder=tmp_path)
    with pytest.raises(QueryError) as refused:
        sandbox.select(asked)
    assert "\n" not in str(refused.value) and str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]
    if "run" in sql:
        assert sandbox.select("SELECT count(*) AS n FROM run").rows["n"].item() == 4


def test_is_stopped_after_a_time_and_goes_on(sandbox):
    before = seconds_of_children()
    with pytest.raises(QueryError, match=r"stopped after 0.5 s"):
        sandbox.select(
            "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE (a.range * b.range) % 7 = 3", seconds=0.5
        )
    assert seconds_of_children() - before < 10
    assert sandbox.select("SELECT 1 AS one").rows["one"].item() == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT list(range) FROM range(1000000000)", "more than 512 MB"),
        ("SELECT repeat('x', 100000000) AS x", "fewer columns or shorter"),
        # One value, which DuckDB neither counts nor lets be interrupted.
        ("SELECT list_sum(range(100000000))", "more than 512 MB"),
        ("SELECT repeat('x', 1000000000)", "more than 512 MB"),
    ],
)
def test_memory_is_limited(sandbox, sql, message):
    before = peak_of_children()
    with pytest.raises(QueryError, match=message):
        sandbox.select(sql, seconds=30)
    assert peak_of_children() <= max(before, 1400 << 20)


def peak_of_children() -> int:
    """Bytes of memory that the largest child so far held."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


def seconds_of_children() -> float:
    """Processor time of the children that have ended: a machine that is busy takes longer, and they do not."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_what_cannot_be_interrupted_is_stopped_too(sandbox):
    # One value of one function, in little memory: DuckDB looks up between chunks only.
    slow = "SELECT levenshtein(repeat('a', 200000), repeat('b', 200000))"
    before = seconds_of_children()
    with pytest.raises(QueryError, match=r"stopped after 0\.5 s"):
        sandbox.select(slow, seconds=0.5)
    assert seconds_of_children() - before < 10


def test_a_long_statement_keeps_nobody_waiting(sandbox):
    slow = "SELECT levenshtein(repeat('a', 2000000), repeat('b', 2000000))"  # on one core
    others = set(psutil.Process().children())
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(sandbox.select, slow, seconds=300)
        until(lambda: set(psutil.Process().children()) - others, "the statement's process")
        (its,) = set(psutil.Process().children()) - others
        assert sandbox.select("SELECT 1 AS one").rows["one"].item() == 1
        assert not other.done()
        its.kill()
        with pytest.raises(QueryError):
            other.result()


def test_the_process_of_a_statement_ends_with_the_app(catalog, tmp_path):
    """The app is killed in the middle of a statement: what ran it goes too."""
    app = """
import sys
from pathlib import Path
from binade.data.index.catalog import Catalog
from binade.data.index.sandbox import Sandbox
with Catalog.open(Path(sys.argv[1])) as catalog:
    box = Sandbox(catalog)
    print(flush=True)
    box.select("SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE (a.range * b.range) % 7 = 3", seconds=90)
"""
    running = subprocess.Popen(
        [sys.executable, "-c", app, str(catalog.root)], env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout and running.stdout.readline()
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    until(lambda: children.read_text().split(), "the statement's process", 30)
    (child,) = map(int, children.read_text().split())
    assert process_start(child) is not None
    running.kill()
    running.communicate()
    until(lambda: process_start(child) is None, "the statement's process to end", 30)


def test_the_copy_has_no_name_on_the_disk(catalog, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    box = Sandbox(catalog)
    assert not list(tmp_path.iterdir()) and box.select("SELECT count(*) FROM run").rows.iloc[0, 0] == 4
    box.close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(QueryError, match=r"cannot be copied into .*missing"):
        Sandbox(catalog)


def test_the_copy_cannot_be_read_as_a_file(sandbox):
    path = sandbox.select("SELECT path FROM duckdb_databases() WHERE path IS NOT NULL").rows["path"].item()
    with pytest.raises(QueryError, match="disabled"):
        sandbox.select(f"SELECT * FROM read_blob('{path}')")
    assert sandbox.select(f"SELECT * FROM read_blob('/proc/self/fd/{Path(path).name}')").rows.empty
