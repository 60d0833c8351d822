"""Recorder.record: tensors that no GEMM shows, recorded by the user."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from binade import quant
from binade.collector import Recorder, instrument
from binade.collector.capture.recorder import RecorderError
from binade.collector.errors import ConfigError
from binade.data.index.catalog import Catalog
from binade.data.run.tensor_kinds import Operation, Phase
from tests.collector.instrumented import rows

NORM = {"layer": 3, "module": "norm", "operation": "forward", "phase": "post"}


def test_members_of_the_enums_are_recorded_as_their_words(tmp_path: Path) -> None:
    """A file with a member of a class of ours would not load with weights_only."""
    x = torch.randn(4)
    with Recorder(tmp_path) as recorder:
        recorder.record("x", x, layer=1, module="fc1", operation=Operation.FORWARD, phase=Phase.POST)
    with Catalog.open(tmp_path) as catalog:
        (row,) = catalog.tensors().to_dict("records")
        assert (row["operation"], row["phase"]) == ("forward", "post")
        assert torch.equal(catalog.load(row["tensor_id"]), x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_has_the_words_values_and_statistics_of_its_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 64).to(dtype)
    config = {"model": "mine", "recipe": "mxfp8"}
    with Recorder(tmp_path, config=config, scores=("mxfp8", "nvfp4")) as recorder, recorder.at(7, 2):
        recorder.record("norm_output", x, **NORM, dim=1)
        x_before = x.clone()
        x.zero_()
    with Catalog.open(tmp_path) as catalog:
        (row,) = catalog.tensors().to_dict("records")
        loaded = catalog.load(row["tensor_id"])
        errors = {fmt: catalog.errors(fmt, ("tensor_name",)) for fmt in ("mxfp8", "nvfp4")}
        facets = catalog.facets()
    expected = {"tensor_name": "norm_output", "layer_index": 3, "module": "norm", "operation": "forward"}
    expected |= {"phase": "post", "model": "mine", "recipe": "mxfp8", "quant_type": "bf16", "iteration": 7}
    expected |= {"micro_batch": 2, "rank": 0, "contracted_axis": -2, "dtype": str(dtype)[6:], "numel": x.numel()}
    assert {name: row[name] for name in expected} == expected
    assert row["layer_type"] is None and row["component"] is None and row["format"] is None
    assert facets["tensor_name"] == ["norm_output"]
    assert torch.equal(loaded, x_before)
    assert row["absmax"] == float(x_before.abs().max())
    assert row["std"] == pytest.approx(float(x_before.double().std(correction=0)), rel=1e-6)
    for fmt, table in errors.items():
        wanted = quant.compare(x_before, quant.fake_quantize(x_before, fmt, dim=1))["sqnr_db"]
        assert table["sqnr_db"].tolist() == pytest.approx([wanted], abs=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "module", "layer_type", "component"),
    [
        ("input", "fc1", "linear", "linear"),
        ("query", "core", "attention", "FA"),
        ("output", "fc1", "linear", "linear"),
        ("output", "core", "attention", "FA"),
        ("exp_avg", "fc1", None, None),
    ],
)
def test_known_names_have_their_layer_type(
    tmp_path: Path, name: str, module: str, layer_type: str | None, component: str | None
) -> None:
    with Recorder(tmp_path, scores=("mxfp8",), max_bytes=0) as recorder:
        recorder.record(
            name, torch.ones(4), layer=1, module=module, operation="optimizer", phase="pre", expert=5, scores=()
        )
    (row,) = rows(tmp_path, values=False).to_dict("records")
    assert (row["layer_type"], row["component"], row["expert"]) == (layer_type, component, 5)
    assert pd.isna(row["contracted_axis"]) and row["operation"] == "optimizer"
    with Catalog.open(tmp_path) as catalog:
        assert catalog.errors("mxfp8", ("tensor_name",)).empty


class Block(nn.Module):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder, self.linear = recorder, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(x, (8,))
        self.recorder.record("norm_output", normed, **NORM)
        return self.linear(normed)


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
def test_recorded_within_an_instrumented_model(tmp_path: Path, recompute: bool) -> None:
    """Of the recorded iterations and micro-batches, once each, beside the model's own tensors."""
    recorder = Recorder(tmp_path, iterations=1, micro_batches=1, tensors=("input",))
    model = nn.Sequential(Block(recorder))
    with recorder, instrument(model, "mxfp8", recorder):
        for _ in range(2):
            for _ in range(2):
                x = torch.randn(4, 8, requires_grad=True)
                y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
                y.sum().backward()
            recorder.step()
    found = rows(tmp_path)
    assert sorted(found["tensor_name"]) == ["input", "norm_output"]
    assert found["iteration"].tolist() == found["micro_batch"].tolist() == [0, 0]
    assert torch.equal(*found["tensor"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a/b"}, "name='a/b'"),
        ({"name": ""}, "name=''"),
        ({"tensor": [1.0]}, "norm_output is a list"),
        ({"tensor": torch.ones(4).double()}, "norm_output is float64"),
        ({"tensor": torch.ones(())}, "norm_output is a scalar"),
        ({"layer": -1}, "layer=-1"),
        ({"layer": "3"}, "layer='3'"),
        ({"expert": 0.5}, "expert=0.5"),
        ({"module": ""}, "module=''"),
        ({"operation": "fwd"}, "operation='fwd' of norm_output: expected one of forward, backward, optimizer"),
        ({"phase": "after"}, "phase='after' of norm_output: expected one of pre, post"),
        ({"dim": 2}, "dim=2 of norm_output is not an axis of its shape (4, 8)"),
        ({"scores": "mxfp8"}, "scores='mxfp8'"),
    ],
    ids=str,
)
def test_what_cannot_be_recorded_is_refused_in_one_line(tmp_path: Path, change: dict, message: str) -> None:
    arguments = {"name": "norm_output", "tensor": torch.ones(4, 8), **NORM} | change
    with Recorder(tmp_path) as recorder, pytest.raises(ConfigError, match=re.escape(message)) as raised:
        recorder.record(**arguments)
    assert "\n" not in str(raised.value)


def test_outside_its_run_a_recorder_records_only_if_it_is_disabled(tmp_path: Path) -> None:
    with pytest.raises(RecorderError, match="has no run to write to"):
        Recorder(tmp_path).record("norm_output", torch.ones(4), **NORM)
    with Recorder(tmp_path, enabled=False) as recorder:
        recorder.record("norm_output", torch.ones(4), **NORM)
    assert list(tmp_path.iterdir()) == []
