"""A Recorder: how its runs end, what it counts, and what it refuses."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from binade.collector import Recorder, Watch, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.capture.measure import Measurer
from binade.collector.capture.recorder import RecorderError
from binade.collector.errors import ConfigError
from binade.data.index.catalog import Catalog
from binade.data.run import merge
from binade.data.run.directory import CANCELLED, DONE, FAILED, read_run
from binade.quant.formats import UnknownFormatError
from tests.collector.small_model import build, loss, step

WORDS = {"operation": "forward", "phase": "pre"}


class TestRecorder:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(
        ("error", "state", "reason"),
        [(None, DONE, None), (ValueError, FAILED, "bad"), (KeyboardInterrupt, CANCELLED, None)],
        ids=["done", "failed", "cancelled"],
    )
    def test_says_how_the_run_ended(self, tmp_path, error, state, reason):
        model = build()
        with pytest.raises(error) if error else nullcontext():
            with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
                step(model)
                if error:
                    raise error("bad\nthing")
        status = read_run(recorder.writer.directory).status
        assert (status.state, status.reason, status.tensors) == (state, reason, 70)
        with Catalog.open(tmp_path) as catalog:  # what was captured is kept
            assert catalog.totals().tensors == catalog.totals().with_values == 70

    @pytest.mark.sampled(1)
    @pytest.mark.slow
    @pytest.mark.parametrize(("steps", "left"), [(merge.MANY - 1, merge.MANY - 1), (merge.MANY, 1)])
    def test_many_segments_are_merged_when_the_run_ends(self, tmp_path, steps, left):
        values = torch.arange(steps, dtype=torch.float32)
        with Recorder(tmp_path, scores=(), max_bytes=0) as recorder:
            for iteration in range(steps):
                with recorder.at(iteration, 0):
                    recorder.record("x", values[iteration].repeat(8), layer=0, module="norm", **WORDS)
                recorder.settle()
        assert len(read_run(recorder.writer.directory).segments) == left
        with Catalog.open(tmp_path) as catalog:
            assert catalog.tensors().sort_values("iteration")["absmax"].tolist() == values.tolist()

    def test_counts_iterations_for_loops_of_ones_own(self, tmp_path):
        model = build()
        with Recorder(tmp_path, tensors=("query",)) as recorder, instrument(model, "bf16", recorder):
            for _ in range(3):
                step(model)
                recorder.step()
        with Catalog.open(tmp_path) as catalog:
            assert catalog.tensors()["iteration"].tolist() == [0, 0, 1, 1, 2, 2]
            assert catalog.runs()["iteration"].tolist() == [2]
        assert len(read_run(recorder.writer.directory).segments) == 3

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("how", ["optimizer", "two optimizers", "GradScaler", "cleared", "other model"])
    def test_finds_iterations_by_the_updates_of_the_model(self, tmp_path, how):
        """Two micro-batches and an evaluation each, without recorder.step(). Clearing gradients ends no iteration."""
        model = build()
        matrices, others = ([p for p in model.parameters() if (p.dim() == 2) == two] for two in (True, False))
        other = torch.nn.Parameter(torch.ones(2))
        other.grad = torch.ones(2)
        groups = {"two optimizers": [matrices, others], "other model": [[other]], "cleared": []}
        optimizers = [torch.optim.SGD(group, lr=0.01) for group in groups.get(how, [model.parameters()])]
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0 if how == "GradScaler" else 1.0)

        def iterate() -> None:
            for _ in range(2):
                scaler.scale(loss(model)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad(set_to_none=how != "other model")
            if optimizers:
                scaler.update()
            if how == "cleared":
                model.zero_grad()
            with torch.no_grad():
                loss(model)

        with Recorder(tmp_path, tensors=("query",), evaluation=True) as recorder, instrument(model, "bf16", recorder):
            for _ in range(3):
                iterate()
            if how in ("cleared", "other model"):
                with pytest.warns(UserWarning, match=r"^6 forward and backward passes .* call recorder\.step\(\)"):
                    recorder.check_steps()
                recorder.step()
        with Catalog.open(tmp_path) as catalog:
            rows = catalog.tensors()
        trained, evaluated = (rows[(rows["operation"] == "evaluation") == each] for each in (False, True))
        if how in ("cleared", "other model"):
            expected = {(0, micro_batch): 2 for micro_batch in range(6)}
        else:
            expected = {(iteration, micro_batch): 2 for iteration in range(3) for micro_batch in range(2)}
            # An evaluation after an update is of the iteration that begins.
            assert set(evaluated["iteration"]) == {1, 2, 3}
        assert trained.groupby(["iteration", "micro_batch"]).size().to_dict() == expected

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"scores": ("nope",)}, "unknown format 'nope'"),
            ({"tensors": ("query", "inputt")}, "unknown tensor 'inputt': expected one of input, weight, "),
            ({"tensors": "input"}, r"tensors='input' is a single string: .* such as tensors=\('input',\)"),
            ({"scores": "mxfp8"}, "scores='mxfp8' is a single string"),
            ({"config": {"size": 224}}, "config has size 224: expected a string"),
            ({"config": {"model": {"name": "x"}}}, "config has model {'name': 'x'}"),
        ],
        ids=["score", "tensor", "tensors", "scores", "size", "model"],
    )
    def test_what_cannot_be_recorded_is_refused_before_a_run_exists(self, tmp_path, options, message):
        error = UnknownFormatError if "format" in message else ConfigError
        with pytest.raises(error, match=message):
            Recorder(tmp_path, **options)
        assert list(tmp_path.iterdir()) == []

    def test_entered_again_it_records_another_run(self, tmp_path):
        model = build()
        recorder = Recorder(tmp_path, tensors=("query",), iterations=1, config={"size": None})
        for _ in range(2):
            with recorder, instrument(model, "bf16", recorder):
                for _ in range(2):
                    step(model)
                    recorder.step()
        with Catalog.open(tmp_path) as catalog:
            assert catalog.runs()["state"].tolist() == [DONE, DONE]
            rows = catalog.tensors()
            assert Counter(rows["run_id"]).most_common() == [(run, 2) for run in rows["run_id"].unique()]
            assert rows["iteration"].tolist() == [0] * 4 and rows["run_id"].nunique() == 2

    def test_entered_twice_it_says_so(self, tmp_path):
        with Recorder(tmp_path) as recorder, pytest.raises(RecorderError, match="is already recording a run"):
            recorder.__enter__()
        assert [read_run(path).status.state for path in tmp_path.iterdir()] == [DONE]

    def test_without_a_run_it_says_so(self, tmp_path):
        model = build()
        recorder = Recorder(tmp_path)
        with instrument(model, "bf16", recorder):
            with pytest.raises(RecorderError, match=r"call the model within `with Recorder\(...\)`"):
                step(model)
            assert list(tmp_path.iterdir()) == []
            with recorder:
                step(model)
            with pytest.raises(RecorderError, match="has no run to write to"):
                step(model)
        assert read_run(recorder.writer.directory).status.tensors == 70

    def test_float64_is_refused_by_the_layers_name(self, tmp_path):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double())
        x = torch.randn(3, 8)
        said = r"1 \(layer2\.linear\) computes in float64, which is neither recorded nor rounded: convert the model"
        for recipe, records in ((None, True), ("mxfp4", True), ("mxfp4", False)):  # before the first pass
            with Recorder(tmp_path / "all", enabled=records) as recorder, pytest.raises(InstrumentError, match=said):
                with instrument(model, recipe, recorder if records else None):
                    pytest.fail("the model can be called")
        with instrument(model, None):  # it neither records nor rounds
            assert model[1](model[0](x).double()).dtype == torch.float64
        with Recorder(tmp_path / "some") as recorder, instrument(model, None, recorder, capture="first"):
            assert model[1](model[0](x).double()).dtype == torch.float64
        assert read_run(recorder.writer.directory).status.tensors == 3

    def test_inputs_in_float64_are_refused_at_the_first_pass(self, tmp_path):
        class Wide(torch.nn.Linear):
            """Its weight is wide only while it computes."""

            def forward(self, x):
                return torch.nn.functional.linear(x, self.weight.double())

        core = torch.nn.Sequential(Wide(8, 8))
        with pytest.raises(InstrumentError, match="float64"), Recorder(tmp_path) as recorder:
            with instrument(core, None, recorder):
                core(torch.randn(3, 8, dtype=torch.float64))
        assert "float64" in read_run(recorder.writer.directory).status.reason

    def test_a_capture_broken_off_leaves_no_file_without_a_row(self, tmp_path, monkeypatch):
        """Interrupted between writing a file and noting its row: the moment of a SIGTERM, chosen."""
        model, save = build(), Measurer._save

        def interrupted(measurer, *arguments):
            path = save(measurer, *arguments)
            if measurer.count == 41:
                raise KeyboardInterrupt
            return path

        monkeypatch.setattr(Measurer, "_save", interrupted)
        with pytest.raises(KeyboardInterrupt), Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
            step(model)
        files = list(tmp_path.rglob("*.pt"))
        with Catalog.open(tmp_path) as catalog:
            assert sorted(catalog.path(i) for i in catalog.tensors()["tensor_id"]) == sorted(files)
            assert len(files) == 40

    @pytest.mark.parametrize("error", [None, ValueError], ids=["done", "failed"])
    def test_an_interrupt_while_the_last_rows_are_written(self, tmp_path, error):
        """The run's end is interrupted, as SIGTERM does to a rank whose peer was killed; its rows and state stay."""
        written = []

        class Slow:
            def write(self, directory, rank, rows):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)  # longer than an exception takes to leave the context
                written.extend(rows)

            def close(self, error=None):
                written.append("closed")

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with (
                pytest.raises(error or KeyboardInterrupt),
                Recorder(tmp_path, watch=Watch(sink=Slow()), scores=()) as recorder,
            ):
                recorder.record("x", torch.ones(8), layer=0, module="norm", **WORDS)
                if error:
                    raise error("bad")
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, before)
        status = read_run(recorder.writer.directory).status
        assert (status.state, status.tensors) == (FAILED if error else CANCELLED, 1)
        assert len(written) == 2 and written[1] == "closed"


def test_the_example_of_a_nanogpt_like_loop(tmp_path, monkeypatch):
    """Iterations and micro-batches of the training alone: it says nothing of them."""
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["nanogpt_loop.py", "--recipe", "linear_mxfp8", "--max-iters", "3"])
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "nanogpt_loop.py"), run_name="__main__")
    with Catalog.open(tmp_path) as catalog:
        rows = catalog.tensors()
    linear, core = 4 * 6, 11  # tensors of a layer
    assert rows.groupby(["iteration", "micro_batch"]).size().to_dict() == {(i, 0): 2 * (linear + core) for i in (0, 1)}
    assert set(rows["operation"]) == {"forward", "backward"}
    assert set(rows["module"]) == {"qkv", "proj", "fc1", "fc2", "core"}
