"""binade diff: two layouts, two back ends, and a difference that is planted in one layer."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from binade.collector import Recorder, Watch, coverage, instrument
from binade.data.compare.difference import TOLERANCE, difference
from binade.data.run.directory import DONE, RunInfo, list_runs, read_run, write_run_file
from binade.data.run.json_files import MARK, sealed
from binade.data.run.run_writer import RunWriter
from binade.data.run.segment import write_segment
from binade.quant import reference
from binade.quant.reference import outer_absmax
from tests.collector.forked import run_forked
from tests.collector.small_model import build, loss
from tests.data.builder import row

pytestmark = pytest.mark.slow
COMMON = ("--layers", "2", "--micro-batch-size", "1", "--sequence-length", "32", "--scores", "", "--backend", "torch")


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> list[RunInfo]:
    """A run on one rank, one on two that split sequences too, and one on two without values."""
    root = tmp_path_factory.mktemp("layouts")
    for number, more in ((1, ()), (2, ("--tp", "2", "--sequence-parallel")), (2, ("--tp", "2", "--no-raw"))):
        assert run_forked(root, *COMMON, *more, ranks=number) == 0
    return list_runs(root)[0]


@pytest.mark.thorough
def test_one_rank_and_two_by_values(layouts: list[RunInfo], command: Callable[..., int], capsys):
    one, two, _ = layouts
    assert command("diff", one.run_id, str(two.directory), "--tensor-save-dir", str(one.directory.parent)) == 0
    assert f"No tensor differs by more than {TOLERANCE:.4g}" in capsys.readouterr().out
    found = difference(one, two)
    assert len(found.rows) == one.status.tensors and {row.by for row in found.rows} == {"values"}
    assert not (found.only_a or found.only_b or found.incomplete or found.notes)
    assert [row.tensor_id[-6:] for row in found.rows] == [f"{n:06d}" for n in range(1, len(found.rows) + 1)]
    # The first sum over the two ranks is rounded to bfloat16 once more; before it every bit is the same.
    first = found.rows[found.first(None)]
    assert (first.layer_index, first.module, first.tensor_name) == (1, "proj", "output")
    assert command("diff", str(one.directory), str(two.directory), "--bitwise") == 1
    assert f"first difference, after {found.first(None)} tensors that do not: {first.place}" in capsys.readouterr().out


def test_one_rank_and_two_by_statistics(layouts: list[RunInfo]):
    one, _, bare = layouts
    found = difference(one, bare)
    assert {row.by for row in found.rows} == {"statistics"} and found.first(TOLERANCE) is None
    # The statistics of a sum do not follow from its parts.
    assert all(" output " in text or " grad " in text for text in found.incomplete) and found.incomplete
    assert len(found.rows) + len(found.incomplete) == one.status.tensors


Record = Callable[..., RunInfo]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """A step of a small model under a recipe, with a change to the model before it: the run."""

    def call(change: Callable[[torch.nn.Module], object] = bool, skip: str | None = None, **options: object) -> RunInfo:
        model = build()
        change(model)
        with (
            Recorder(tmp_path, **{"scores": ()} | options) as recorder,
            instrument(model, "mxfp8", recorder, backend="torch", skip=skip),
        ):
            loss(model).backward()
        return read_run(recorder.writer.directory)

    return call


def test_the_compiled_back_end_and_the_reference(record: Record, monkeypatch: pytest.MonkeyPatch, command, capsys):
    compiled, calls = record(), []

    def plain(x: Tensor, spec, dim: int, absmax: Tensor | None, want_scales: bool, seed: int):
        calls.append(x)
        return reference.quantize_dequantize(
            x, spec, dim, outer_absmax(x, spec, dim) if absmax is None else absmax, seed
        )

    monkeypatch.setattr("binade.quant.backends.cpu.quantize_dequantize", plain)
    other = record()
    assert calls
    assert command("diff", str(compiled.directory), str(other.directory), "--bitwise") == 0
    assert f"{compiled.status.tensors:,} by values" in capsys.readouterr().out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("raw", [True, False], ids=["values", "statistics"])
def test_a_planted_difference_is_found_there_and_nowhere_before(record: Record, raw: bool, command, capsys):
    def plant(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.layers[1].mlp.linear_fc1.weight[3, 5] += 2.0

    kept = {} if raw else {"max_bytes": 0}
    sound, planted = record(**kept), record(plant, **kept)
    found = difference(sound, planted)
    first = found.rows[found.first(TOLERANCE)]
    assert (first.layer_index, first.module, first.tensor_name) == (2, "fc1", "weight")
    assert all(row.equal for row in found.rows[: found.first(TOLERANCE)])
    assert first.at == ((3, 5) if raw else None)
    assert command("diff", str(sound.directory), str(planted.directory), "--format", "csv") == 1
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(table) == sound.status.tensors
    assert next(row["place"] for row in table if float(row["difference"])) == first.place


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scores", [(), ("mxfp4",)])
def test_a_layer_that_only_one_run_quantizes(record: Record, scores: tuple[str, ...], command, capsys):
    """As the recipes say; and a watched step, which has no scores of later GEMMs, leaves their formats unknown."""
    every, part = record(scores=scores), record(skip="first", scores=scores)
    model = build()
    expected = coverage(model, "mxfp8").difference(coverage(model, "mxfp8", skip="first"))
    found = difference(every, part).formats
    assert set(found) == set(expected) and all(each.place.startswith("layer 1 ") for each in found)
    assert not difference(every, every).formats
    command("diff", str(every.directory), str(part.directory))
    assert capsys.readouterr().out.count("\nformat: layer 1 ") == len(found) == 6
    watched = record(watch=Watch("every step"), scores=scores)
    assert not difference(every, watched).formats


def test_what_is_not_in_both(record: Record, command, capsys):
    whole, part = record(), record(tensors=("input", "weight"))
    assert command("diff", str(whole.directory), str(part.directory)) == 0
    assert " only in RUN_A, first iteration 0, micro-batch 0, L1 qkv output" in capsys.readouterr().out
    only = record(tensors=("grad_weight",))
    assert command("diff", str(only.directory), str(part.directory)) == 1
    assert capsys.readouterr().err == f"binade: {only.run_id} and {part.run_id} have no tensor in common\n"
    assert command("diff", str(whole.directory), "nothing") == 2
    assert command("diff", str(whole.directory), str(part.directory), "--bitwise", "--tolerance", "1") == 2
    shutil.rmtree(next(whole.directory.glob("tensors/*")))
    assert command("diff", str(part.directory), str(whole.directory)) == 1  # no value can be read
    assert "not compared" in capsys.readouterr().out


def test_rows_reduced_over_ranks_are_in_the_order_of_execution(tmp_path: Path):
    """Each has the id and the rank of the worst of its parts."""
    writer = RunWriter.create(tmp_path, "reduced", {})
    rows = []
    for number, rank in enumerate((1, 1, 0, 1)):
        part = row(writer.run_id, number, torch.ones(8), None, module=f"m{number}", rank=rank)
        rows.append(replace(part, tensor_id=f"r{rank:02d}-{number:06d}"))
    write_segment(writer.directory / "segments", "rank00-000001", rows)
    writer.finish(DONE)
    run = read_run(writer.directory)
    assert [each.module for each in difference(run, run).rows] == ["m0", "m1", "m2", "m3"]


def test_settings_and_data_that_differ(layouts: list[RunInfo], tmp_path: Path, command, capsys):
    one, copy = layouts[0], tmp_path / "copy"
    shutil.copytree(one.directory, copy)
    write_run_file(copy, {**read_run(copy).config, "seed": 5, "pv_quant": "mxfp4"})
    lines = (copy / "loss.jsonl").read_bytes().replace(b'"data_sha256": "', b'"data_sha256": "0').splitlines()
    (copy / "loss.jsonl").write_bytes(b"".join(sealed(line.rpartition(MARK)[0] + b"}") + b"\n" for line in lines))
    assert command("diff", str(one.directory), str(copy)) == 0
    printed = capsys.readouterr().out
    assert "note: Settings that differ: seed (1234, 5), pv_quant (not set, mxfp4)." in printed
    assert "note: The runs read different data from iteration 0 on." in printed


def steps_of(root: Path, sizes: tuple[int, ...], scale: Callable[[int], float] | None = None, **options) -> RunInfo:
    """Two steps on eight sequences, in micro-batches of these sizes; each loss is multiplied by `scale` of its size."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))})
    model.forward = lambda x: model.layers[1](model.layers[0](x).relu())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tensors = ("input", "weight", "grad_weight", "exp_avg", "master_weight")
    with Recorder(root, scores=(), tensors=tensors, **options) as recorder, instrument(model, "bf16", recorder):
        for step in range(2):
            data = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(step))
            for part in data.split(sizes):
                (model(part).square().mean() * (scale(len(part)) if scale else len(part) / 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return read_run(recorder.writer.directory)


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1,) * 8, (4, 4), (3, 5)])
def test_a_step_in_parts_is_compared_by_its_gradients(tmp_path, command, capsys, sizes):
    whole, parts = steps_of(tmp_path, (8,)), steps_of(tmp_path, sizes)
    found = difference(parts, whole)
    kinds = {(row.tensor_name, row.by, row.micro_batch) for row in found.rows}
    assert kinds == {
        ("grad_weight", "values", None), ("weight", "values", None), ("master_weight", "values", None),
    }  # fmt: skip
    assert max(row.difference for row in found.rows) < 1e-6 and not (found.only_a or found.only_b or found.incomplete)
    assert found.notes == (
        "Whether the runs read the same data is not known: hashes are of micro-batches.",
        f"The steps of 2 iterations, from 0 on, have {len(sizes)} and 1 micro-batches: gradients of weights are "
        f"compared as sums over the step, weights once; {4 * len(sizes)} and 4 tensors of single micro-batches are not "
        "compared.",
    )
    assert command("diff", str(parts.directory), str(whole.directory)) == 0
    assert "No tensor differs" in capsys.readouterr().out


def test_a_step_in_parts_that_is_not_the_same(tmp_path):
    whole = steps_of(tmp_path, (8,))
    undivided = difference(steps_of(tmp_path, (2, 2, 2, 2), lambda size: 1.0), whole)
    assert "The sums of RUN_B are 0.25 times those of RUN_A" in undivided.notes[-1]
    by_number = difference(steps_of(tmp_path, (6, 2), lambda size: 0.5), whole)  # a mean of means
    first = by_number.rows[by_number.first(TOLERANCE)]
    assert first.tensor_name == "grad_weight" and len(by_number.notes) == 2
    bare = difference(steps_of(tmp_path, (2, 2, 2, 2), max_bytes=0), whole)
    assert len(bare.incomplete) == 4 and "sum over micro-batches, which needs values" in bare.incomplete[0]
    others = difference(steps_of(tmp_path, (3, 5)), steps_of(tmp_path, (4, 4)))
    assert "have micro-batches of other sizes" in others.notes[1] and others.first(TOLERANCE) is None
    same = difference(steps_of(tmp_path, (4, 4)), steps_of(tmp_path, (4, 4)))
    assert {row.micro_batch for row in same.rows} == {0, 1, None} and not same.notes
