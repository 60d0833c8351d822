"""Losses in stores that are not text: databases, Parquet, and the files of MLflow."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from binade.collector.imports.files import walk
from binade.collector.imports.losses import find_logs
from binade.collector.imports.readers.series import Columns, Series

LOSS = {step: round(3 - 0.1 * step, 3) for step in range(1, 7)}


def read(path: Path) -> dict[str | None, Series]:
    (log,) = find_logs(walk(path, path.parent / "runs"))
    return {series.run: series for series in log.reader.read(path, Columns())}


def database(path: Path, create: str, insert: str, rows: list[tuple]) -> Path:
    with sqlite3.connect(path) as connection:
        connection.execute(create)
        connection.executemany(insert, rows)
    connection.close()
    return path


def test_trackio(tmp_path):
    rows = [("2026-01-01", run, step, json.dumps({"train": {"loss": loss + up}, "lr": 0.1}))
            for step, loss in LOSS.items() for run, up in (("bf16", 0), ("mxfp8", 1))]  # fmt: skip
    path = database(
        tmp_path / "project.db",
        "CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, timestamp TEXT NOT NULL, run_name TEXT NOT NULL, "
        "step INTEGER NOT NULL, metrics TEXT NOT NULL)",
        "INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?)", rows,
    )  # fmt: skip
    before = path.read_bytes()
    found = read(path)
    assert {run: series.losses for run, series in found.items()} == {
        "bf16": LOSS, "mxfp8": {step: loss + 1 for step, loss in LOSS.items()},
    }  # fmt: skip
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["project.db"]


def test_mlflow_database(tmp_path):
    rows = [(key, value, 1735689600000 + step, "r1", step, value is None)
            for step, loss in LOSS.items()
            for key, value in (("loss", loss if step < 6 else None), ("val_loss", 9.0))]  # fmt: skip
    path = database(
        tmp_path / "mlflow.db",
        "CREATE TABLE metrics (key TEXT, value REAL, timestamp INTEGER, run_uuid TEXT, step INTEGER, is_nan INTEGER)",
        "INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows,
    )  # fmt: skip
    (series,) = read(path).values()
    assert series.name == "loss" and series.losses == pytest.approx({**LOSS, 6: math.nan}, nan_ok=True)


def test_mlflow_files(tmp_path):
    metrics = tmp_path / "mlruns" / "0" / "abc" / "metrics"
    (metrics / "train").mkdir(parents=True)
    for name in ("train/loss", "val_loss", "lr"):
        (metrics / name).write_text("".join(f"{1735689600000 + s} {x} {s}\n" for s, x in LOSS.items()))
    (log,) = find_logs(walk(tmp_path / "mlruns", tmp_path / "runs"))
    assert log.label == "0/abc/metrics/train/loss"
    (series,) = log.reader.read(log.path, Columns())
    assert (series.name, series.losses) == ("train/loss", LOSS)


def test_parquet(tmp_path):
    steps = [*LOSS, 7]
    columns = {"_step": steps, "train/loss": [*LOSS.values(), None], "_timestamp": [1.5] * 7, "text": [["x"]] * 7}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "history.parquet")
    (series,) = read(tmp_path / "history.parquet").values()
    assert (series.name, series.losses, series.empty) == ("train/loss", LOSS, 1)


@pytest.mark.parametrize("content", [b"PAR1", b"PAR1" + b"\0" * 99 + b"PAR1", b"SQLite format 3\0" + b"\xff" * 200])
def test_a_damaged_store_is_refused_in_one_line(command, capsys, tmp_path, content):
    (tmp_path / "store").write_bytes(content)
    assert command("import", str(tmp_path / "store")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_view_of_a_database_is_not_read(tmp_path):
    """It may compute anything, and a table of that name may be a virtual one."""
    path = tmp_path / "x.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE VIEW metrics AS SELECT 'a' AS run_name, 1 AS step, '{}' AS metrics")
    connection.close()
    with pytest.raises(Exception, match="is not recognized"):
        read(path)
