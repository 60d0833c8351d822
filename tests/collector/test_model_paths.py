"""Tensors that are named by a path in a model, as hooks and scripts save them: what they are, and distinct names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from binade.collector.imports import importer
from binade.collector.imports.model_paths import Clues
from binade.collector.imports.names import shortened
from binade.collector.imports.registry import interpret
from binade.data.index.catalog import Catalog
from binade.data.run.columns import Identity
from tests.collector.logs_made import read_here, tensor

Import = Callable[..., pd.DataFrame]
X = tensor(0, 8, 32)
MATRIX, VECTOR = (16, 32), (32,)
QUERY, FC1 = "model.layers.0.self_attn.q_proj", "layers.3.mlp.fc1"


@pytest.fixture
def imported(command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """The rows of the tensors in the folder "in", by their keys."""
    monkeypatch.setattr(importer, "scatter", read_here)

    def call(*options: str, status: int = 0) -> pd.DataFrame:
        assert command("import", str(tmp_path / "in"), "--scores", "mxfp8_e4m3", "--workers", "1", *options) == status
        with Catalog.open(tmp_path / "runs") as catalog:
            table = catalog.tensors()
            scored = set(catalog.table("score")["tensor_id"].to_pylist())
        assert not table.duplicated([*Identity.__annotations__]).any()
        return table.assign(scored=[name in scored for name in table["tensor_id"]]).set_index("file_key")

    return call


def save(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


@pytest.mark.parametrize(
    ("file", "key", "shape", "expected"),
    [
        # hooks: the module alone, or with a word for the side
        ("dump.pt", QUERY, (1, 8, 32), (1, "q", None, None, None)),
        ("activations.pt", QUERY, (1, 8, 32), (1, "q", "forward", None, None)),
        ("acts/step_3.pt", "transformer.h.1", (1, 8, 32), (2, None, "forward", None, None)),
        ("dump.pt", f"{QUERY}.input", (8, 32), (1, "q", "forward", "pre", "input")),
        ("dump.pt", f"{QUERY}.out.0", (8, 32), (1, "q", "forward", "post", "output")),
        ("dump.pt", f"outputs.{QUERY}", (8, 32), (1, "q", "forward", "post", "output")),
        ("grad_outputs_10.pt", QUERY, (8, 32), (1, "q", "backward", "pre", "grad_output")),
        ("inputs.pt", f"{QUERY}.1", (8, 32), (1, "q", "forward", "pre", "input.1")),
        # a weight has the name and the shape of one
        ("step_100.pt", f"weight.{QUERY}.weight", MATRIX, (1, "q", "forward", "pre", "weight")),
        ("outputs/model.safetensors", f"{QUERY}.weight", MATRIX, (1, "q", "forward", "pre", "weight")),
        ("grad_accum_8.pt", f"{QUERY}.weight", MATRIX, (1, "q", "forward", "pre", "weight")),
        ("m.npz", "params/layers_0/self_attn/q_proj/kernel", MATRIX, (1, "q", "forward", "pre", "weight")),
        ("m.npz", "params/layers_0/input_layernorm/scale", VECTOR, (1, "input_layernorm", "forward", "pre", "weight")),
        ("d.pt", "['layers'][1]['q_proj'].bias", VECTOR, (2, "q", "forward", "pre", "bias")),
        # gradients and states of the optimizer
        ("step_100.pt", f"grad.{QUERY}.weight", MATRIX, (1, "q", "backward", "post", "grad_weight")),
        ("rank0.pt", f"{QUERY}.weight.grad", MATRIX, (1, "q", "backward", "post", "grad_weight")),
        ("grads_step3.pt", f"{QUERY}.bias", VECTOR, (1, "q", "backward", "post", "grad_bias")),
        ("gradients/3.pt", f"{QUERY}.weight", MATRIX, (1, "q", "backward", "post", "grad_weight")),
        ("o.pt", f"optimizer.state.exp_avg.{QUERY}.weight", MATRIX, (1, "q", "optimizer", "post", "exp_avg")),
        # the path of a file
        ("layers/3/mlp/fc1/input.pt", None, (8, 32), (4, "fc1", "forward", "pre", "input")),
        ("step_2/rank0/layers.3.mlp.fc1.grad_input.pt", None, (8, 32), (4, "fc1", "backward", "post", "grad_input")),
        ("layer_3.pt", "self_attn.q_proj.input", (8, 32), (4, "q", "forward", "pre", "input")),
        (f"{FC1}.npz", "output", (8, 32), (4, "fc1", "forward", "post", "output")),
        # a model in a folder that is named after a GPU
        ("h100/x.pt", "conv.kernel_map", (8, 32), (None, None, None, None, "conv.kernel_map")),
    ],
)
def test_what_a_path_says(file: str, key: str | None, shape: tuple[int, ...], expected: tuple[object, ...]):
    log = interpret(PurePath("/dumps", file), None, key, Clues(PurePath(file), shape))
    assert (log.layer_index, log.module, log.operation, log.phase, log.tensor_name) == expected
    assert log.refused is None and log.is_unnamed == (expected[-1] is None)


@pytest.mark.parametrize(
    ("file", "key", "shape", "reason"),
    [
        ("absmax.pt", QUERY, VECTOR, "a statistic by the name of its file (absmax)"),
        ("act_scales.pt", QUERY, VECTOR, "a statistic by the name of its file (scales)"),
        ("weight_amax.pt", f"{QUERY}.weight", (), "a statistic by the name of its file (amax)"),
        ("d.pt", f"{QUERY}.input.absMax", VECTOR, "a statistic by its name (absmax)"),
        ("model.safetensors", f"{QUERY}.weight_scale_inv", (2, 2), "a statistic by its name (scale)"),
        ("layers.0.mlp.fc1.abs_max.npy", None, VECTOR, "a statistic by its name (absmax)"),
        ("d.pt", f"{QUERY}.input", (1,), "a single value"),
        ("d.pt", "loss", (), "a single value"),
        ("d.pt", f"{QUERY}.weight", VECTOR, "the shape [32] is not that of a linear layer's weight"),
        ("d.pt", f"{QUERY}.weight", (1, 8, 32), "the shape [1, 8, 32] is not"),
    ],
)
def test_statistics_are_no_tensors(file: str, key: str | None, shape: tuple[int, ...], reason: str):
    refused = interpret(PurePath("/dumps", file), None, key, Clues(PurePath(file), shape)).refused
    assert (
        refused
        and refused.startswith(reason)
        and refused.endswith("with --kind input, weight, output, grad_output, grad_input, grad_weight")
    )
    said = interpret(PurePath("/dumps", file), None, key, Clues(PurePath(file), shape, kind="input"))
    assert said.refused is None and said.tensor_name == "input" and said.is_scored


def test_hooks_of_a_model_are_imported_as_what_they_are(imported: Import, tmp_path: Path):
    """Activations, gradients and weights of a real model in one file each; only the weights are weights."""
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    )
    outputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_hook(lambda module, given, result, name=name: outputs.update({name: result}))
    model(torch.arange(8)[None]).logits.sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    save(tmp_path / "in/hooks.pt", {name: x.detach() for name, x in outputs.items()})
    save(tmp_path / "in/grads.pt", gradients)
    save(tmp_path / "in/model.pt", model.state_dict())
    table = imported()
    of_hooks = table[table["path"].str.endswith("hooks.pt")]
    assert set(of_hooks.index) == set(outputs) and of_hooks["tensor_name"].isna().all() and of_hooks["scored"].all()
    assert set(table[table["path"].str.endswith("model.pt")]["tensor_name"]) == {"weight"}
    of_grads = table[table["path"].str.endswith("grads.pt")]
    assert set(of_grads["tensor_name"]) == {"grad_weight"} and set(of_grads["operation"]) == {"backward"}


def test_the_user_says_what_tensors_are(imported: Import, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save(tmp_path / "in/calibration.pt", {QUERY: X, "model.layers.0.mlp": X, "model.layers.1.mlp.up_proj": X[0]})
    table = imported()
    hint = (
        "3 tensors named after a module only: --kind input, weight, output, grad_output, grad_input, grad_weight says"
    )
    assert hint in capsys.readouterr().out
    assert table["tensor_name"].isna().all() and list(table["scored"]) == [True, True, False]
    again = imported("--kind", "input")
    assert set(again["tensor_name"]) == {"input"} and again["scored"].all()
    assert list(again["contracted_axis"]) == [-1, -1, -1] and list(again["layer_type"].fillna("")) == [
        "linear",
        "",
        "linear",
    ]
    assert list(again["tensor_id"]) == list(table["tensor_id"])  # their values are the same
    pd.testing.assert_frame_equal(imported(), table)
    (tmp_path / "in/calibration.pt").unlink()
    save(tmp_path / "in/stats.pt", {QUERY: X[0]})
    imported(status=1)
    assert re.search(r"refused: 1\n    stats.pt: 1 tensor: a statistic .*--kind", capsys.readouterr().out)


LONG = "x" * 150


@pytest.mark.parametrize(
    "files",
    [
        {"w.npz": {f"a/{i}/{name}": X for i in "01" for name in ("q", "k")}},
        {"a/x.pt": None, "b/x.pt": None, "c.x.pt": None},
        {"bf16/layers/0/mlp/fc1/input.pt": None, "fp8/layers/0/mlp/fc1/input.pt": None},
        {"a/model.pt": {f"{QUERY}.weight": X}, "b/model.pt": {f"{QUERY}.weight": X}},
        {"d.pt": {f"{LONG}{word}{LONG}": X for word in ("one", "two", "three")}},
        {"d.pt": {f"{LONG}.layers.{i}.q_proj.weight": X for i in range(3)}},
        {"d.pt": {"tensör_a": X, "tensör_b": X, "日本": X, "日": X}},
        {"d.pt": {"layers.0.a b": X, "layers.0.a_b": X, "layers.0.a/b": X}},
    ],
)
def test_no_two_tensors_have_the_same_name(imported: Import, tmp_path: Path, files: dict[str, Any]):
    for name, content in files.items():
        path = tmp_path / "in" / name
        if path.suffix == ".npz":
            path.parent.mkdir(parents=True)
            np.savez(path, **{key: x.float().numpy() for key, x in content.items()})
        else:
            save(path, X if content is None else content)
    table = imported()  # which compares their identities
    assert len(table) == sum(len(content or "x") for content in files.values())
    words = [*table["module"].dropna(), *table["tensor_name"].dropna()]
    assert all(re.fullmatch(r"[\w.+-]{1,128}", word, re.ASCII) for word in words)
    again = imported()
    pd.testing.assert_frame_equal(again, table)


@pytest.mark.parametrize("place", ["{}_TAIL", "TAIL_{}", "HEAD_{}_TAIL"])
def test_long_names_keep_what_differs(place: str):
    names = [
        place.replace("TAIL", "t" * 90).replace("HEAD", "h" * 90).format(word)
        for word in ("bf16", "mxfp8_lr3e-4", "mxfp8_lr9e-4")
    ]
    short = shortened([*names, "short"], 80)
    assert len(set(short)) == 4 and short[-1] == "short" and max(map(len, short)) <= 80
    assert all("…" in name and word in name for name, word in zip(short, ("bf16", "3e-4", "9e-4"), strict=False))
    assert len(set(shortened([f"{n:03}" * 60 for n in range(300)], 80))) == 300
