"""SQL that tries to leave the SQL page's sandbox, or returns values that Python cannot represent."""

from __future__ import annotations

import atexit
import csv
import io
import os
import re
import unicodedata
from functools import cache
from pathlib import Path

import pandas as pd

from binade.data.index.catalog import Catalog
from binade.data.index.sandbox import QueryError, Sandbox
from binade.data.words.text import csv_table
from tests.siege.attack import Attempt, attack, check_sentence

# {secret} is a file that holds SECRET; {new} is one that must not come to be.
SECRET = "the-secret-word"
READERS = ("read_text", "read_blob", "read_csv", "read_csv_auto", "sniff_csv", "read_json", "read_json_auto",
           "read_json_objects", "read_ndjson", "read_ndjson_objects", "read_parquet", "parquet_scan",
           "parquet_metadata",
           "parquet_schema", "parquet_file_metadata", "parquet_kv_metadata", "parquet_bloom_probe", "glob",
           "read_xlsx",
           "st_read", "sqlite_scan", "postgres_scan", "mysql_scan", "iceberg_scan", "delta_scan", "read_duckdb",
           "arrow_scan", "pandas_scan", "query", "query_table", "seq_scan", "read_avro", "json_execute_serialized_sql",
           "from_substrait", "from_substrait_json", "load_aws_credentials", "duckdb_secrets",
           "which_secret")  # fmt: skip
WAYS = (
    "FROM {f}('{secret}')",
    "SELECT * FROM main.{f}('{secret}')",
    "SELECT * FROM system.main.{f}('{secret}')",
    "SELECT * FROM {f}(['{secret}'])",
    "WITH x AS MATERIALIZED (FROM {f}('{secret}')) FROM x",
    "SELECT * FROM \"{f}\"('{secret}')",
    "SELECT (SELECT count(*) FROM {f}('{secret}'))",
    "SELECT /* */ * FROM/**/{f}/**/('{secret}')",
    "SELECT * FROM run, LATERAL (FROM {f}('{secret}'))",
    "SELECT {f}('{secret}')",
)
OTHERS = (
    "FROM '{secret}'", 'FROM "{secret}"', "FROM 'file:{secret}'", "FROM 'file://{secret}'",
    "FROM '/proc/self/environ'",
    "FROM read_text('/proc/self/fd/3')", "FROM read_text('/dev/stdin')", "FROM 'https://127.0.0.1/x.csv'",
    "FROM read_csv('http://127.0.0.1:1/x.csv')", "FROM 's3://b/x.parquet'", "FROM 'hf://datasets/a/b.csv'",
    "COPY (SELECT 1) TO '{new}'", "COPY run TO '{new}' (FORMAT parquet)", "EXPORT DATABASE '{new}'", "ATTACH '{new}'",
    "ATTACH ':memory:' AS m", "DETACH index", "USE memory", "CREATE TABLE x AS SELECT 1",
    "CREATE TEMP TABLE x (a INT)",
    "CREATE VIEW v AS SELECT 1", "CREATE MACRO m() AS 1", "CREATE SECRET s (TYPE s3)", "CREATE TYPE t AS ENUM ('a')",
    "CREATE SCHEMA s", "CREATE SEQUENCE s", "DROP TABLE run", "ALTER TABLE run ADD COLUMN x INT", "TRUNCATE run",
    "INSERT INTO run SELECT * FROM run", "UPDATE run SET recipe = 'x'", "DELETE FROM run",
    "MERGE INTO run USING run r ON 1=1",
    "INSTALL httpfs", "FORCE INSTALL httpfs", "LOAD httpfs", "LOAD '{secret}'", "UPDATE EXTENSIONS",
    "SET threads = 99",
    "SET enable_external_access = true", "SET lock_configuration = false", "SET memory_limit = '99GB'",
    "RESET memory_limit",
    "SET GLOBAL disabled_filesystems = ''", "SET VARIABLE x = 1", "PRAGMA enable_profiling", "PRAGMA database_list",
    "PRAGMA import_database('{secret}')", "CALL pragma_version()", "CALL enable_logging()", "EXPLAIN ANALYZE SELECT 1",
    "SELECT getenv('HOME')", "SELECT getenv('PATH'), current_setting('home_directory')", "BEGIN; SELECT 1", "COMMIT",
    "CHECKPOINT", "FORCE CHECKPOINT", "VACUUM", "ANALYZE", "PREPARE p AS SELECT 1", "EXECUTE p", "DEALLOCATE p",
    "SELECT 1; SELECT 2", "SELECT 1;; DROP TABLE run", "SELECT 1) UNION ALL (FROM read_text('{secret}')",
    "SELECT 1) TO '{new}' --", "SELECT 1) AS x; COPY run TO '{new}'; SELECT (1", "SELECT 1 -- \n; DROP TABLE run",
    "SELECT $$a$$; DROP TABLE run", "SELECT '\\'; DROP TABLE run; --'", "SELECT 'a''; DROP TABLE run; --",
    "SELECT E'\\''; DROP TABLE run; --'", "SELECT /* /* */ 1; DROP TABLE run --*/", "SELECT 1\uff1b DROP TABLE run",
    "\u202eSELECT 1", "SELECT 1\u2028; DROP TABLE run", "SELECT 1\x00; DROP TABLE run", "\ufeffDROP TABLE run",
    "SELECT * FROM connection", "SELECT * FROM rows", "SELECT * FROM request", "SELECT * FROM out",
    "SELECT * FROM sys",
    "FROM (DESCRIBE run), (COPY run TO '{new}')", "FROM (SHOW DATABASES)",
    "FROM duckdb_settings() WHERE value LIKE '%/%'",
    "FROM duckdb_databases()", "FROM pragma_database_list", "FROM duckdb_extensions() WHERE loaded",
    "FROM duckdb_temporary_files()", "FROM duckdb_logs()", "SELECT error('a\nb')", "SELECT write_log('x')",
    "FROM query('COPY run TO ''{new}''')", "FROM query('SELECT 1; DROP TABLE run')", "FROM query_table('{secret}')",
    "FROM query_table(['run', '{secret}'])", "FROM query('FROM query(''FROM read_text(''''{secret}'''')'')')",
    "SELECT list_transform(['{secret}'], lambda x: read_text(x))", "PIVOT run ON '{secret}'",
    "UNPIVOT '{secret}' ON a",
    "SUMMARIZE '{secret}'", "SUMMARIZE FROM read_text('{secret}')", "DESCRIBE FROM '{secret}'",
    "SHOW TABLES FROM '{secret}'",
    "SELECT * FROM run POSITIONAL JOIN '{secret}'", "SELECT * FROM run ASOF JOIN '{secret}' USING (run_id)",
    "VALUES ((SELECT content FROM read_text('{secret}')))", "SELECT COLUMNS('.*') FROM '{secret}'",
    "SELECT * FROM range(10) t(i) WHERE i IN (FROM '{secret}')", "FROM (COPY run TO '{new}')",
    "SELECT * INTO x FROM run",
    "WITH x AS (INSERT INTO run SELECT * FROM run RETURNING *) FROM x", "WITH x AS (COPY run TO '{new}') FROM x",
    "WITH RECURSIVE r AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM r) SELECT count(*) FROM r",
    "SELECT repeat('x', 4000000000)", "SELECT list(range) FROM range(1000000000)",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "SELECT " + "1+" * 50_000 + "1", "SELECT " + ",".join(f"{i} AS c{i}" for i in range(3000)), "SELECT [[[" * 2000,
    "SELECT regexp_matches(repeat('a', 100000), '(a|aa|a)*(a|aa)*b')",
    "SELECT * FROM run a, run b, run c, tensor, tensor t",
    "SELECT setseed(2)", "SELECT nextval('x')", "SELECT currval('x')", "SELECT pg_read_file('{secret}')",
    "SELECT load_extension('{secret}')", "SELECT readfile('{secret}')", "SELECT writefile('{new}', 'x')",
    "SELECT lo_import('{secret}')", "SELECT system('touch {new}')", "COPY run TO PROGRAM 'touch {new}'",
    "COPY run FROM PROGRAM 'id'", "COPY run FROM '{secret}'", "IMPORT DATABASE '{secret}'", ".read {secret}",
    ".shell id",
    "\\! id", "SELECT * FROM sqlite_master", "SELECT sql FROM duckdb_tables()",
)  # fmt: skip
# Values of types that Python lacks or limits.
UNHELD = (
    "DATE '1000000-01-01'", "DATE '290000-01-01 (BC)'", "'infinity'::DATE", "'-infinity'::TIMESTAMP",
    "TIME '24:00:00'",
    "'290000-01-01 00:00:00'::TIMESTAMP", "'290000-01-01 00:00:00'::TIMESTAMPTZ", "TIMETZ '00:00:00+15:59:59'",
    "INTERVAL 100000 YEARS", "INTERVAL '999999999' DAYS", "to_microseconds(9223372036854775807)",
    "(repeat('9', 3000))::BIGNUM", "170141183460469231731687303715884105727::HUGEINT", "(2**127)::UHUGEINT",
    "99999999999999999999999999999999999999::DECIMAL(38,0)", "'nan'::DOUBLE", "'infinity'::FLOAT",
    "'\\xFF\\x00'::BLOB",
    "'0101'::BIT", "UUID '00000000-0000-0000-0000-000000000000'", "MAP {'a': [NULL]}", "MAP {[1]: 2}",
    "{'a': {'b': [1]}}",
    "union_value(a := 1)", "[[DATE '1000000-01-01']]", "[NULL]::INT[]", "array_value(1, 2)", "row(1, NULL)", "chr(0)",
    "chr(1114111)", "repeat('\U0001f600', 100000)", "NULL", "''::VARCHAR", "'a'::ENUM('a')", "'{\"a\": 1}'::JSON",
    "TIMESTAMP_S '9999-12-31 23:59:59'", "TIMESTAMP_NS '2262-04-11 23:47:16.854775807'", "x -> x + 1", "DEFAULT",
    "rowid", "*", "COLUMNS(*)", "epoch_ms(9223372036854775807)", "make_timestamp(9223372036854775806)",
)  # fmt: skip


@cache
def _sandbox(root: Path) -> Sandbox:
    with Catalog.open(root) as catalog:
        opened = Sandbox(catalog)
    atexit.register(opened.close)
    return opened


ESCAPES = [way.replace("{f}", name) for name in READERS for way in WAYS] + list(OTHERS)


@attack(
    "The query is refused in one sentence or answered harmlessly: no file is read or written, no table changed",
    tries=len(ESCAPES),
    share=2.0,
)
def sql_escapes(attempt: Attempt) -> None:
    secret = attempt.place / "secret.csv"
    secret.write_text(f"a,b\n{SECRET},2\n")
    sql = attempt.choose(ESCAPES).replace("{secret}", str(secret)).replace("{new}", str(attempt.place / "new"))
    attempt.case = ascii(sql[:100])
    box = _sandbox(attempt.root)
    try:
        answer = box.select(sql, seconds=2.0)
    except QueryError as error:
        check_sentence(error)
    else:
        shown = answer.rows.to_csv()
        assert SECRET not in shown
        for file in sorted(attempt.root.glob("*/segments/*/sketch.parquet")):  # duckdb_settings() lists them
            shown = shown.replace(str(file), "")
        assert "index.duckdb" not in shown and str(attempt.root) not in shown
        assert not re.search(rf"{re.escape(os.environ['HOME'])}(/|,|$)", shown, re.MULTILINE)
    assert [path.name for path in attempt.place.iterdir()] == ["secret.csv"]
    if attempt.number % 40 == 0:
        assert box.select("SELECT count(*) AS n FROM run").rows["n"].item() == 4


SIGNS = "=+-@\uff1d\uff0b\uff0d\uff20"
PIECES = [*SIGNS, ";", ",", "\t", "\n", " ", "\u00a0", '"', "'", "a", "1", "SUM(A1)", "cmd|' /C calc'!A0"]


@attack("No cell of a CSV is a formula, whatever separates cells in the reader's locale", tries=4000)
def spreadsheet_cells(attempt: Attempt) -> None:
    text = "".join(attempt.random.choices(PIECES, k=attempt.random.randint(1, 8)))
    attempt.case = ascii(text)
    written = csv_table(pd.DataFrame({"n": [-1.5], text: [text]}))
    for row in csv.reader(io.StringIO(written, newline="")):
        for cell in row:
            for part in (cell, *re.split("[;\t\n]", cell)):
                shown = unicodedata.normalize("NFKC", part).strip()
                number = re.match(r"[+-]\.?\d", shown)
                assert not shown.startswith(("=", "+", "-", "@")) or number, (cell, part)


@attack("The query returns a row or an error in one sentence, never an exception", tries=len(UNHELD))
def values_python_cannot_hold(attempt: Attempt) -> None:
    value = attempt.choose(UNHELD)
    attempt.case = value[:60]
    box = _sandbox(attempt.root)
    for sql in (f"SELECT {value} AS x", f"SELECT {value} AS x, {value} AS x FROM range(3)"):
        try:
            rows = box.select(sql).rows
        except QueryError as error:
            check_sentence(error)
        else:
            assert len(rows) in (1, 3)
            rows.to_csv()
            rows.to_html()
