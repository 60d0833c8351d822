"""The options of `binade run` that decide what is recorded."""

from __future__ import annotations

import os
from collections import Counter

import pandas as pd
import pytest

from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE
from binade.data.run.losses import read_losses
from binade.data.words.filter import Filter

pytestmark = pytest.mark.slow


class TestOptions:
    def rows(self, run) -> pd.DataFrame:
        with Catalog.open(run.directory.parent) as catalog:
            return catalog.tensors(Filter(run_id=[run.run_id]))

    def test_iterations_and_micro_batches(self, collect):
        run = collect("--control-iter", "5", "--capture-every", "2", "--micro-batches", "3",
                      "--collect-micro-batches", "2", "--tensors", "query,weight")  # fmt: skip
        rows = self.rows(run)
        counts = Counter(zip(rows["iteration"], rows["micro_batch"], rows["tensor_name"], strict=True))
        names = {"query": 1, "weight": 4}
        assert counts == {(i, m, name): n for i in (0, 2, 4, 6, 8) for m in (0, 1) for name, n in names.items()}
        assert run.status.tensors == len(rows) == 50 and run.status.iteration == 8

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize(
        ("asked", "trained", "recorded"),
        [
            (("--control-iter", "2", "--capture-every", "3"), 4, [0, 3]),
            (("--control-iter", "2", "--capture-every", "3", "--train-iters", "6"), 6, [0, 3]),
            (("--control-iter", "0", "--train-iters", "4"), 4, [0, 1, 2, 3]),
            (("--control-iter", "0", "--capture-every", "2", "--train-iters", "4"), 4, [0, 2]),
            (("--train-iters", "3"), 3, [0]),
        ],
        ids=["just enough", "longer", "every one", "every second", "one by default"],
    )
    def test_iterations_trained_and_recorded_are_counted_apart(self, collect, tmp_path, asked, trained, recorded):
        run = collect(*asked, "--tensors", "query", "--no-raw")
        assert self.rows(run)["iteration"].tolist() == recorded and run.status.iteration == trained - 1
        assert len(read_losses(run.directory)) == trained == run.config["train_iters"]
        with Catalog.open(tmp_path / "runs") as catalog:
            assert catalog.runs()["iterations"].tolist() == [trained]

    def test_micro_batches_of_an_iteration_are_all_recorded_by_zero(self, collect):
        rows = self.rows(collect("--micro-batches", "3", "--collect-micro-batches", "0", "--tensors", "query"))
        assert rows["micro_batch"].tolist() == [0, 1, 2]

    def test_no_save_tensors_records_nothing_and_trains_the_same(self, collect):
        arguments = ("--control-iter", "2", "--quantization", "mxfp4")
        run, recorded = collect(*arguments, "--no-save-tensors"), collect(*arguments, "--save-tensors")
        assert run.status.tensors == 0 and run.segments == [] and run.status.state == DONE
        assert list(run.directory.rglob("*.pt")) == [] and recorded.status.tensors == 70
        losses = [[record["loss"] for record in read_losses(each.directory)] for each in (run, recorded)]
        assert losses[0] == losses[1] and len(losses[0]) == 2

    def test_layers_and_modules(self, collect):
        rows = self.rows(collect("--layers", "2", "--capture-layers", "last,qkv", "--modules", "qkv,core"))
        found = Counter(zip(rows["layer_index"], rows["module"], strict=True))
        assert found == {(1, "qkv"): 6, (2, "qkv"): 6, (2, "core"): 11}

    def test_no_raw_keeps_rows_only(self, collect):
        run = collect("--no-raw")
        rows = self.rows(run)
        assert len(rows) == run.status.tensors == run.status.tensors_without_raw == 35
        assert rows["path"].isna().all() and run.status.bytes == 0 and rows["kurtosis"].notna().all()
        assert list(run.directory.rglob("*.pt")) == []

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("budget", [0, 20_000, 200_000, 700_000])
    def test_files_stay_within_the_budget(self, collect, budget):
        run = collect("--max-bytes", str(budget))
        files = list(run.directory.rglob("*.pt"))
        rows = self.rows(run)
        assert sum(os.path.getsize(file) for file in files) == run.status.bytes <= budget
        assert len(rows) == 35 and rows["path"].notna().sum() == len(files)
        assert run.status.tensors_without_raw == 35 - len(files)
        assert (len(files) > 0) == (budget > 0)

    def test_scores_can_be_chosen(self, collect, tmp_path):
        run = collect("--scores", "mxint8,mxfp8_e4m3,mxfp8", "--tensors", "input")
        with Catalog.open(tmp_path / "runs") as catalog:
            assert Counter(catalog.scores(Filter(run_id=[run.run_id]))["format"]) == {"mxint8": 4, "mxfp8": 4}

    def test_warm_up_is_in_bf16_and_not_recorded(self, collect):
        plain, warm = collect("--control-iter", "3"), collect("--warmup-iterations", "2", "--quantization", "mxfp4")
        losses = [pd.read_json(run.directory / "loss.jsonl", lines=True) for run in (plain, warm)]
        assert losses[1]["iteration"].tolist() == [-2, -1, 0]
        assert losses[0]["loss"][:2].tolist() == losses[1]["loss"][:2].tolist()
        assert losses[0]["loss"][2] != losses[1]["loss"][2]
        assert set(self.rows(warm)["iteration"]) == {0}

    def test_a_run_can_be_repeated_to_the_bit(self, collect):
        first, second = (self.rows(collect("--quantization", "mxfp8", "--control-iter", "2")) for _ in range(2))
        different = {"tensor_id", "run_id", "captured", "path", "sha256"}  # of a file that says when it was written
        same = [column for column in first.columns if column not in different]
        pd.testing.assert_frame_equal(first[same], second[same], check_exact=True)
