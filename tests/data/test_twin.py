"""Twin steps on disk: what is written is read, and what is damaged is named and left out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from binade.data.exchange import bundle
from binade.data.index.catalog import Catalog
from binade.data.run.directory import RunError
from binade.data.run.json_files import sealed
from binade.data.run.twin import GradientTwin, Twin, append_twin, check_twins, read_twins
from binade.data.run.verify import verify
from tests.data.builder import assorted, make_run

STEP = GradientTwin("step", None, None, None, 2.0, 0.1, 0.09, 0.01, 0.2, 0.01, 0.98)
FC1 = GradientTwin("layers.0.fc1.weight", 1, "fc1", None, 1.0, 0.1, 0.1, 0.0, 0.0, 0.0, 0.99)


def twin(iteration: int, *changes: float) -> Twin:
    return Twin(iteration, 5.0, changes or (0.25,), len(changes) > 1, (STEP, FC1))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path, assorted(1)).directory


def test_what_is_written_is_read(run: Path):
    assert read_twins(run) == []
    append_twin(run, twin(3))
    append_twin(run, twin(0, 0.5, -0.25))
    append_twin(run, twin(3, 1.0))
    assert read_twins(run) == [twin(0, 0.5, -0.25), twin(3, 1.0)]
    check_twins(run)


def test_what_is_not_finite_is_null(run: Path):
    append_twin(run, Twin(0, math.inf, (math.nan,), False, (GradientTwin("step", None, None, None, math.nan),)))
    (read,) = read_twins(run)
    assert math.isnan(read.loss) and math.isnan(read.changes[0]) and read.gradients[0].bias is None
    assert b"NaN" not in (run / "twin.jsonl").read_bytes() and b"Inf" not in (run / "twin.jsonl").read_bytes()


def test_a_line_that_a_crash_cut_short_is_left_out(run: Path):
    append_twin(run, twin(0))
    whole = (run / "twin.jsonl").read_bytes()
    for end in range(1, len(whole) - 20, 7):
        (run / "twin.jsonl").write_bytes(whole + whole[:end])
        assert read_twins(run) == [twin(0)]
        check_twins(run)


@pytest.mark.parametrize(
    "line",
    [
        *(b"17\n", b"{}\n", b"[" * 100_000 + b"\n"),
        sealed(b'{"iteration": "x"}') + b"\n",
    ],
    ids=lambda line: line.decode()[:20],
)
def test_what_is_no_twin_step_is_named(run: Path, line: bytes):
    append_twin(run, twin(0))
    with open(run / "twin.jsonl", "ab") as file:
        file.write(line)
    assert read_twins(run) == [twin(0)]
    with pytest.raises(RunError, match=r"line 2 of its twin\.jsonl"):
        check_twins(run)


def test_flipped_bits_are_noticed(run: Path):
    for iteration in range(2):
        append_twin(run, twin(iteration))
    assert not verify(run.parent).damaged
    content = (run / "twin.jsonl").read_bytes()
    for place in range(0, content.index(b"crc32"), 11):
        (run / "twin.jsonl").write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        (line,) = verify(run.parent).damaged
        assert run.name in line and "line 1 of its twin.jsonl" in line and read_twins(run) == []
    with Catalog.open(run.parent) as catalog:
        assert [f"some twin steps of {run.name} are not shown" in line for line in catalog.refused] == [True]


def test_a_bundle_keeps_them(run: Path, tmp_path: Path):
    append_twin(run, twin(0, 0.5, 0.25))
    bundle.write(tmp_path, tmp_path / "bundle.zip", [run.name], None)
    bundle.import_runs(tmp_path / "new", tmp_path / "bundle.zip")
    assert read_twins(tmp_path / "new" / run.name) == [twin(0, 0.5, 0.25)]
