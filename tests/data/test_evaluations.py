"""What runs evaluated while they trained: what is written is read, and what earlier versions wrote as well."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from binade.data.exchange import bundle
from binade.data.index.catalog import Catalog
from binade.data.run.directory import RunError
from binade.data.run.evaluations import TWIN, GradientTwin, HeldOut, Twin, read_held_out, read_twins
from binade.data.run.experiment import check_experiment, cut_results, experiment_files
from binade.data.run.json_files import sealed
from binade.data.run.records import read_lines
from binade.data.run.verify import verify
from tests.data.builder import assorted, make_run
from tests.data.experiments import add_evaluations

STEP = GradientTwin("step", None, None, None, 2.0, 0.1, 0.09, 0.01, 0.2, 0.01, 0.98)
FC1 = GradientTwin("layers.0.fc1.weight", 1, "fc1", 3, 1.0, 0.1, 0.1, 0.0, 0.0, 0.0, 0.99)
FORMER = Path(__file__).parent / "former"  # files of a run of the version before evaluations became results


def twin(iteration: int, *changes: float) -> Twin:
    return Twin(iteration, 5.0, changes or (0.25,), len(changes) > 1, (STEP, FC1))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path, assorted(1)).directory


def test_what_is_written_is_read(run: Path):
    assert read_twins(run) == [] and read_held_out(run) == {}
    first, again, later = HeldOut(0, (1.0, 2.0), "a"), HeldOut(0, (1.5, 2.0), "a", 64), HeldOut(3, (1.0, 1.5), "a")
    evaluated = twin(3), first, twin(0, 0.5, -0.25), later, again, twin(3, 1.0)
    for each in evaluated:
        add_evaluations(run, each)
    assert read_twins(run) == [twin(0, 0.5, -0.25), twin(3, 1.0)] and read_held_out(run) == {0: again, 3: later}
    check_experiment(run)
    cut_results(run, 3)
    assert read_twins(run) == [twin(0, 0.5, -0.25)] and read_held_out(run) == {0: again}
    cut_results(run, 0)
    assert read_twins(run) == [] and read_held_out(run) == {}


def test_what_is_not_finite_is_read(run: Path):
    gradient = GradientTwin("step", None, None, None, math.nan, math.inf)
    add_evaluations(run, Twin(0, math.inf, (math.nan,), False, (gradient,)), HeldOut(0, (math.nan, 1.0), "a"))
    ((read,), held_out) = read_twins(run), read_held_out(run)
    assert math.isinf(read.loss) and math.isnan(read.changes[0]) and math.isnan(read.step.norm)
    assert read.step.bias == math.inf and read.step.variance is None
    assert math.isnan(held_out[0].losses[0]) and held_out[0].losses[1] == 1.0


def test_the_index_has_the_effect_of_a_recipe_on_held_out_sequences(run: Path):
    """Against numpy. Maps of a model's weights do not show what was measured on those of a later iteration."""
    exact, rounded = np.random.default_rng(0).normal(5, 1, (2, 6))
    add_evaluations(run, HeldOut(4, tuple(rounded), "a"), exact=exact.tolist())
    add_evaluations(run, twin(4, 0.5, -0.25), HeldOut(8, tuple(rounded), "a"))
    with Catalog.open(run.parent) as catalog:
        effect = catalog.ask("FROM effect").loc[0]
        assert catalog.effects([run.name]).empty and len(catalog.ask("FROM effect")) == 1
    change = rounded - exact
    assert (effect["iteration"], effect["sequences"], effect["format"]) == (4, 6, "mxfp8")
    assert effect["loss"] == pytest.approx(exact.mean()) and effect["change"] == pytest.approx(change.mean())
    assert effect["change_error"] == pytest.approx(change.std(ddof=1) / math.sqrt(6))


@pytest.fixture
def former(run: Path) -> Path:
    """A run of the version that wrote a line for each evaluation."""
    for file in FORMER.iterdir():
        shutil.copy(file, run)
    return run


def test_lines_of_an_earlier_version_are_read(former: Path):
    before = {path.name: path.read_bytes() for path in former.glob("*.jsonl")}
    rows = [json.loads(line) for line in before["held_out.jsonl"].splitlines()]
    found = read_held_out(former)
    assert list(found) == [row["iteration"] for row in rows] == [0, 2, 4, 6]
    for row, own in zip(rows, found.values(), strict=True):
        assert [*own.losses] == row["losses"] and (own.data_sha256, own.tokens) == (row["data_sha256"], row["tokens"])
    row = json.loads(before["twin.jsonl"])
    (twin,) = read_twins(former)
    assert (twin.iteration, twin.loss, [*twin.changes], twin.draws) == (0, row["loss"], row["changes"], True)
    assert [asdict(gradient) for gradient in twin.gradients] == row["gradients"]
    add_evaluations(former, HeldOut(2, (4.0,), "a"))  # the run was resumed
    assert [len(own.losses) for own in read_held_out(former).values()] == [5, 1, 5, 5]
    with Catalog.open(former.parent) as catalog:
        assert not catalog.refused
    assert {path.name: path.read_bytes() for path in former.glob("*.jsonl")} == before


def test_a_line_that_a_crash_cut_short_is_left_out(former: Path):
    whole = (former / "twin.jsonl").read_bytes()
    for end in range(1, len(whole) - 20, 97):
        (former / "twin.jsonl").write_bytes(whole + whole[:end])
        assert len(read_twins(former)) == 1
        assert read_lines(TWIN, former, TWIN.file).problem is None


@pytest.mark.parametrize("name", ["twin.jsonl", "held_out.jsonl"])
@pytest.mark.parametrize("line", [b"17\n", b"{}\n", b"[" * 100_000 + b"\n", sealed(b'{"iteration": "x"}') + b"\n"])
def test_a_line_that_is_no_evaluation_is_named(former: Path, name: str, line: bytes):
    lines = len((former / name).read_bytes().splitlines())
    with open(former / name, "ab") as file:
        file.write(line)
    assert len(read_twins(former)) == 1 and len(read_held_out(former)) == 4
    (damaged,) = verify(former.parent).damaged
    assert f"line {lines + 1} of its {name}" in damaged


def test_flipped_bits_are_noticed(former: Path):
    assert not verify(former.parent).damaged
    content = (former / "twin.jsonl").read_bytes()
    for place in range(0, content.index(b"crc32"), 401):
        (former / "twin.jsonl").write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        (line,) = verify(former.parent).damaged
        assert former.name in line and "line 1 of its twin.jsonl" in line and read_twins(former) == []
    with Catalog.open(former.parent) as catalog:
        assert [f"some twin steps of {former.name} are not shown" in line for line in catalog.refused] == [True]


def test_tables_that_another_program_wrote_are_refused(run: Path):
    """Whose checksums hold, but whose rows are no evaluations."""
    add_evaluations(run, replace(twin(3), changes=(0.5,)), HeldOut(3, (1.0,), "a"))
    (gradients,) = (run / name for name in experiment_files(run) if "gradients" in name)
    gradients.unlink()
    with pytest.raises(RunError, match="its experiment is damaged"):
        read_twins(run)


def test_a_bundle_keeps_them(former: Path, tmp_path: Path):
    add_evaluations(former, twin(9, 0.5, 0.25), HeldOut(9, (1.0,), "a"))
    bundle.write(tmp_path, tmp_path / "bundle.zip", [former.name], None)
    bundle.import_runs(tmp_path / "new", tmp_path / "bundle.zip")
    copied = tmp_path / "new" / former.name
    assert read_twins(copied) == read_twins(former) and len(read_twins(copied)) == 2
    assert read_held_out(copied) == read_held_out(former) and len(read_held_out(copied)) == 5
