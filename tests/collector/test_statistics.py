"""Statistics that Transformer Engine and msprobe log without values, against torch's on the same tensors."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch

from binade.cli import main
from binade.collector.imports import importer, transformer_engine, workers
from binade.collector.imports.log import TensorLog, logged
from binade.data.index.catalog import Catalog
from binade.data.run.columns import COUNTS, ERROR_COLUMNS, MOMENTS
from binade.data.run.directory import CRASHED, list_runs
from binade.data.run.notes import notes
from tests.collector.forked import forked, kill_at
from tests.collector.logs_made import read_here, tensor, write
from tests.collector.statistics_made import LAYERS, ms_calls, ms_tensor, ms_tensors, te_line, write_msprobe, write_te

# As Transformer Engine's documentation shows it: docs/debug/1_getting_started.rst
DOCUMENTED = """\
INFO - transformer_layer.self_attention.layernorm_qkv_activation_max                 iteration=000002                  value=4.3188
INFO - transformer_layer.self_attention.layernorm_qkv_activation_min                 iteration=000002                  value=-4.3386
INFO - transformer_layer.self_attention.layernorm_qkv_activation_mean                iteration=000002                  value=0.0000
INFO - transformer_layer.self_attention.layernorm_qkv_activation_std                 iteration=000002                  value=0.9998
INFO - transformer_layer.self_attention.layernorm_qkv_activation_l1_norm             iteration=000002                  value=130799.6953
INFO - transformer_layer.self_attention.layernorm_qkv_activation_max                 iteration=000003                  value=4.3184
"""  # noqa: E501
LINEAR = "Module.layers.0.up_proj.Linear"


@pytest.fixture
def bring(command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """binade import of tmp_path/logs; this process reads."""
    monkeypatch.setattr(importer, "scatter", read_here)
    return lambda: command("import", str(tmp_path / "logs"), "--workers", "1")


def rows(tmp_path: Path) -> pd.DataFrame:
    with Catalog.open(tmp_path / "runs") as catalog:
        assert catalog.refused == []
        return catalog.tensors()


def known(row: pd.Series) -> dict[str, float]:
    """The statistics of a row that are not null."""
    return row[["numel", *MOMENTS, *COUNTS, *ERROR_COLUMNS]].dropna().to_dict()


def refusals(tmp_path: Path) -> dict[str | None, str]:
    ((run,), _) = list_runs(tmp_path / "runs")
    lines = (run.directory / "refused.jsonl").read_text().splitlines()
    return {record["key"]: record["reason"] for record in map(json.loads, lines)}


def test_transformer_engine(bring, capsys, tmp_path):
    tensors = {
        (layer, name, iteration): torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
        for seed, (layer, name, iteration) in enumerate(
            (layer, name, i) for layer in LAYERS for name in ("activation", "weight", "gradient") for i in (2, 3)
        )
    }
    write_te(tmp_path / "logs", tensors)
    assert bring() == 0
    out, err = capsys.readouterr()
    assert "left out: 1\n" in out and "refused" not in out
    assert "12 tensors of 1 files" in out and "by source: TransformerEngine 1" in out and err == ""
    table = rows(tmp_path).set_index(["layer_index", "tensor_name", "iteration"])
    names = {"activation": "input", "weight": "weight", "gradient": "grad_output"}
    for (layer, name, iteration), x in tensors.items():
        row = table.loc[(1 + LAYERS.index(layer), names[name], iteration)]
        expected = {"min": x.min(), "max": x.max(), "mean": x.mean(), "absmax": x.abs().max()}
        expected = {key: round(float(value), 4) for key, value in expected.items()}
        assert known(row) == expected | {"nans": 0, "infs": 0, "mse": 0.0625, "underflow_of_all": 0.125}
        assert (row["rank"], row["module"], row["stage"]) == (3, layer.rpartition("_")[2], "before")
        assert row[["path", "format", "micro_batch", "dtype", "nbytes"]].isna().all()
        assert row["original_quant_type"] == "mxfp8" and "four decimals" in row["corrections"]
    assert {key: reason.partition(":")[0] for key, reason in refusals(tmp_path).items()} == {
        "std": "left out of 12 tensors"
    }
    ((run,), _) = list_runs(tmp_path / "runs")
    assert (run.status.tensors, run.status.tensors_without_raw) == (12, 12)
    with Catalog.open(tmp_path / "runs") as catalog:
        assert catalog.scores().empty and catalog.distribution().empty
        absmax = catalog.moments(by="tensor_name").set_index("group")["absmax"]
        assert absmax["input"] == table.xs("input", level="tensor_name")["absmax"].max()
    assert main(["compare", str(tmp_path / "runs")]) == 1
    assert "states its recipe, so there is nothing to compare" in capsys.readouterr().err


def test_documented_log(bring, tmp_path):
    path = write_te(tmp_path / "logs", {})
    path.write_text(DOCUMENTED)
    assert bring() == 0
    first, second = (row for _, row in rows(tmp_path).sort_values("iteration").iterrows())
    assert known(first) == {"min": -4.3386, "max": 4.3188, "absmax": 4.3386, "nans": 0, "infs": 0}
    assert known(second) == {"max": 4.3184}  # a NaN would show in it, -Inf would not
    assert first["module"] == "qkv" and first["iteration"] == 2
    assert (
        set(refusals(tmp_path)) == {"mean", "std", "l1_norm"} and "may be a small value" in refusals(tmp_path)["mean"]
    )


def test_what_does_not_mean_the_same_is_left_out(bring, tmp_path):
    layer = f"{LAYERS[0]}_activation"
    more = {
        "mxfp8_mse": 0.5,
        "fp8_block_scaling_mse": 0.25,
        "underflows%_columnwise": 3.0,
        "underflows%": 3.0,
        "mxfp8_scale_inv_min": 1.0,
        "dynamic_range": 9.0,
        "max_blockwise_dynamic_range_block_size_32_dims_1_max_over_orientations": 5.0,
        "l2_norm": 7.0,
        "max": 2.0,
    }
    lines = [te_line(f"{layer}_{name}", value, 1) for name, value in more.items()]
    lines += [
        te_line(f"{LAYERS[1]}_weight_{name}", value, 1) for name, value in (("min", -math.inf), ("mean", math.nan))
    ]
    lines += [te_line(f"{LAYERS[1]}_weight_max", 1.0, 1), te_line(f"{LAYERS[1]}_gradient_mse", 0.125, 1)]
    lines += [te_line(f"{LAYERS[1]}_gradient_underflows%", 0.0, 1)]
    write_te(tmp_path / "logs", {}, lines)
    assert bring() == 0
    table = rows(tmp_path).set_index("tensor_name", drop=False)
    assert known(table.loc["input"]) == {"max": 2.0} and pd.isna(table.loc["input", "original_quant_type"])
    assert known(table.loc["weight"]) == {"max": 1.0}
    assert any("so it has NaN or Inf" in sentence for sentence in notes(table.loc["weight"]))
    assert known(table.loc["grad_output"]) == {"mse": 0.125, "underflow_of_all": 0.0}
    assert set(refusals(tmp_path)) == set(more) - {"max"}
    assert "one recipe" in refusals(tmp_path)["underflows%"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_msprobe(bring, capsys, tmp_path, dtype):
    x = ms_tensors(dtype)
    write_msprobe(tmp_path / "logs", ms_calls(x))
    assert bring() == 0
    assert "8 tensors of 1 files" in capsys.readouterr().out
    table = rows(tmp_path)
    table = table[table["layer_index"] == 1].set_index("tensor_name")
    assert set(table.index) == set(x) - {"mask"}
    for name, row in table.iterrows():
        wide = x[name].double()
        near = {"mean": wide.mean(), "rms": wide.square().mean().sqrt()}
        exact = {"min": wide.min(), "max": wide.max(), "absmax": wide.abs().max()}
        assert known(row).keys() == {"numel", "nans", "infs", *near, *exact}
        assert (row["numel"], row["nans"], row["infs"]) == (wide.numel(), 0, 0)
        assert {key: row[key] for key in exact} == {key: value.item() for key, value in exact.items()}
        half_a_step = 2.0**-9 if dtype == torch.bfloat16 else 1e-6
        for key, value in near.items():
            assert row[key] == pytest.approx(value.item(), rel=2 * half_a_step, abs=1e-7), key
        assert (tuple(row["shape"]), row["dtype"]) == (tuple(wide.shape), str(dtype).removeprefix("torch."))
        assert row["nbytes"] == x[name].nbytes and pd.isna(row["path"])
        assert (row["iteration"], row["rank"], row["module"]) == (1, 2, "up")
        assert (pd.notna(row["corrections"])) == (dtype == torch.bfloat16)
    assert table["contracted_axis"].dropna().to_dict() == {"input": -1, "weight": -1, "grad_output": -1}
    others = rows(tmp_path)["tensor_name"]
    assert {"input.0.0", "input.0.1"} < set(others)
    assert refusals(tmp_path) == {None: "left out of 1 tensor: not a floating tensor: int64"}


def test_msprobe_without_some_statistics(bring, tmp_path):
    x = torch.tensor([[1.0, 2.0]])
    bad = ms_tensor(torch.tensor([[1.0, math.nan]]))
    high = ms_tensor(x) | {"Mean": None, "Norm": None}  # precision: high
    checked = {name: value for name, value in ms_tensor(x).items() if name not in ("Max", "Min", "Mean", "Norm")}
    data = {f"{LINEAR}.forward.{call}": {"input_args": [each]} for call, each in enumerate((bad, high, checked))}
    write_msprobe(tmp_path / "logs", data)
    assert bring() == 0
    assert [known(row) for _, row in rows(tmp_path).iterrows()] == [
        {"numel": 2, "min": 1, "max": 2, "absmax": 2, "nans": 0, "infs": 0}
    ]
    assert refusals(tmp_path) == {None: "left out of 2 tensors: tensors without statistics"}
    with Catalog.open(tmp_path / "runs") as catalog:
        total = catalog.moments(by="tensor_name").iloc[0]
    assert total["max"] == 2 and pd.isna(total["rms"]) and pd.isna(total["mean"])


def one_tensor(**changes: object) -> str:
    """A dump.json of a tensor with these entries."""
    known = {"dtype": "torch.float32", "shape": [2], "Min": 0, "Max": 1, "Mean": 0.5, "Norm": 1} | changes
    return json.dumps({"task": "statistics", "data": {"Torch.relu.0.forward": {"output": [known]}}})


def te_lines(**statistics: float) -> str:
    return "".join(te_line(f"{LAYERS[0]}_weight_{name}", value, 1) for name, value in statistics.items())


BAD = {
    "text": ("te", "hello\n", "a line that is not a statistic of TransformerEngine: 'hello'"),
    "long": ("te", "x" * 9000, "a line that is not a statistic"),
    "value": ("te", te_line("fc1_weight_max", 1.0, 1).replace("1.0000", "one"), "not a statistic"),
    "bytes": ("te", "\udcff\n", "not a statistic"),
    "cut": ("ms", '{"task": "statistics", "data": {"a": ', "damaged"),
    "nested": ("ms", '{"task": "statistics", "data": ' + "[" * 100_000, "damaged"),
    "no data": ("ms", '{"task": "statistics"}', "damaged"),
    "list": ("ms", '{"task": "statistics", "data": [1]}', "damaged"),
    "empty": ("ms", '{"task": "statistics", "data": {}}', "it has no statistics"),
    "size": ("ms", one_tensor(shape=[-1]), "no size of 1 or more"),
    "size of a bool": ("ms", one_tensor(shape=[True, 2]), "no size of 1 or more"),
    "digits": ("ms", one_tensor(Max=10**400), "damaged"),
    "minimum above maximum": ("ms", one_tensor(Min=2), "impossible: its minimum 2 is larger than its maximum 1"),
    "negative norm": ("ms", one_tensor(Norm=-1), "impossible: its rms is negative"),
    "mean above maximum": ("ms", one_tensor(Mean=1.5), "impossible: its mean 1.5 is not between"),
    "norm too large": ("ms", one_tensor(Norm=2), "impossible: its rms 1.41421 is larger than its largest magnitude 1"),
    "norm too small": ("ms", one_tensor(Norm=0.1), "impossible: its rms 0.0707107 is smaller than its mean 0.5"),
    "minimum above maximum in TE": ("te", te_lines(min=5.0, max=1.0), "impossible: its minimum 5 is larger than"),
    "negative absmax": ("te", te_lines(cur_amax=-3.0), "impossible: its absmax is negative"),
    "absmax too small": ("te", te_lines(max=5.0, cur_amax=3.0), "impossible: its largest magnitude 3 is smaller than"),
    "share": ("te", te_lines(**{"mxfp8_underflows%": 250.0}), "impossible: its underflow_of_all is 250 %"),
    "negative share": ("te", te_lines(**{"mxfp8_underflows%": -1.0}), "impossible: its underflow_of_all is -1 %"),
    "negative error": ("te", te_lines(mxfp8_mse=-1.0), "impossible: its mse is negative"),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tool", "text", "reason"), BAD.values(), ids=BAD)
def test_a_damaged_log_is_refused_and_the_rest_goes_on(bring, tmp_path, tool, text, reason):
    make = {"te": partial(write_te, tensors={}), "ms": partial(write_msprobe, data={})}[tool]
    log = make(tmp_path / "logs")
    log.write_text(text, errors="surrogateescape")
    log.with_name("stack.json").unlink(missing_ok=True)
    write(tmp_path / "logs" / "x.pt", tensor(0))
    assert bring() == 0 and len(rows(tmp_path)) == 1
    (found,) = refusals(tmp_path).values()
    assert reason in found and len(found) < 300 and found.isprintable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_no_statistics_of_a_tensor_are_impossible(dtype):
    """As torch computes them in the tensor's dtype, whatever its size, and with the four decimals of a log."""
    generator = torch.Generator().manual_seed(0)
    for exponent in range(-30, 16, 3):
        for size in (1, 2, 7, 1000, 40_000):
            spread = torch.randn(size, generator=generator, dtype=torch.float64)
            for x in (spread, spread + 100, spread.abs(), torch.full_like(spread, 0.1), torch.zeros_like(spread)):
                x = (x * 2.0**exponent).to(dtype)
                values = {"min": x.min(), "max": x.max(), "mean": x.mean(), "rms": x.norm() / math.sqrt(size)}
                values = {name: value.item() for name, value in values.items()}
                assert logged(TensorLog(), values, dtype=str(dtype).removeprefix("torch.")).impossible is None, values
                del values["rms"]
                assert logged(TensorLog(), {name: round(value, 4) for name, value in values.items()}).impossible is None


def test_possible_statistics_beside_impossible_ones_are_kept(bring, capsys, tmp_path):
    more = [te_line(f"{LAYERS[1]}_weight_{name}", value, 1) for name, value in (("min", 5.0), ("max", 1.0))]
    write_te(tmp_path / "logs", {(LAYERS[0], "weight", 1): tensor(0, dtype=torch.float32)}, more)
    assert bring() == 0 and len(rows(tmp_path)) == 1
    assert "left out of 1 tensor: impossible: its minimum 5 is larger than its maximum 1" in capsys.readouterr().out


def test_a_line_that_is_cut_and_repeated_iterations_are_counted(bring, tmp_path):
    lines = [te_line(f"{LAYERS[0]}_weight_max", value, 1) for value in (1.0, 2.0)]  # restarted into the same log
    write_te(tmp_path / "logs", {}, [*lines, te_line(f"{LAYERS[0]}_weight_min", -1.25, 1)[:-4]])
    assert bring() == 0
    (row,) = (row for _, row in rows(tmp_path).iterrows())
    assert known(row) == {"max": 2.0}
    assert {key: reason[:20] for key, reason in refusals(tmp_path).items()} == {
        "max": "left out of 1 tensor",
        None: "left out of 1 tensor",
    }


def test_a_log_alone_that_is_damaged_fails(bring, capsys, tmp_path):
    write_te(tmp_path / "logs", {}).write_text("hello\n")
    assert bring() == 1 and "every file of" in capsys.readouterr().err


def test_a_log_that_has_grown_is_read_again(bring, tmp_path):
    tensors = {(LAYERS[0], "weight", 1): tensor(0, dtype=torch.float32)}
    write_te(tmp_path / "logs", tensors)
    assert bring() == 0 and bring() == 0 and len(before := rows(tmp_path)) == 1
    write_te(tmp_path / "logs", tensors | {(LAYERS[0], "weight", 2): tensor(1, dtype=torch.float32)})
    assert bring() == 0 and sorted(rows(tmp_path)["iteration"]) == [1, 2]
    assert {*before["tensor_id"]} < {*rows(tmp_path)["tensor_id"]}  # what it had before keeps its id
    ((run,), _) = list_runs(tmp_path / "runs")
    assert run.status.tensors_without_raw == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("moment", ["rename-2", "fsync-6", "replace-7"])
def test_an_import_that_was_killed_goes_on(bring, tmp_path, moment):
    write_te(tmp_path / "logs", {(LAYERS[0], "weight", i): tensor(i, dtype=torch.float32) for i in range(3)})

    def attempt() -> int:
        workers.prepare = lambda module: None
        call, left = moment.split("-")
        kill_at(call, int(left))
        return main(["import", str(tmp_path / "logs")])

    assert forked(attempt, {}) == [-signal.SIGKILL]
    assert all(run.status.state == CRASHED for run in list_runs(tmp_path / "runs")[0])
    assert bring() == 0 and len(rows(tmp_path)) == 3


def test_a_log_with_a_layer_0_counts_from_0(tmp_path: Path):
    """Of a model without layer_number; the lines of layer 0 may come last."""
    x = torch.ones(4, 8)
    path = write_te(tmp_path, {(f"model.layers.{layer}.mlp.fc1", "activation", 0): x for layer in (10, 1, 0)})
    assert [each.log.layer_index for each in transformer_engine.statistics(path).tensors] == [11, 2, 1]
    path = write_te(tmp_path, {(f"decoder.layers.{layer}.mlp.fc1", "activation", 0): x for layer in (10, 1)})
    assert [each.log.layer_index for each in transformer_engine.statistics(path).tensors] == [10, 1]
