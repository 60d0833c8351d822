"""Checkpoints as PyTorch, transformers, safetensors, numpy and Megatron write them: layers, modules and weights are
read from the names, and nothing is unpickled."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePath
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from binade.collector.imports import importer
from binade.collector.imports.file_rows import FileJob, read_file
from binade.collector.imports.files import File
from binade.collector.imports.model_paths import Clues
from binade.collector.imports.registry import interpret
from binade.data.exchange.foreign import NAMELESS, load_foreign, opened
from binade.data.index.catalog import Catalog
from binade.data.run.directory import list_runs
from binade.data.run.notes import notes
from binade.data.run.store import TensorFileError
from tests.collector.logs_made import read_here, tensor

Import = Callable[[Path], pd.DataFrame]
LAYERS = 11
RUNS_CODE = "it contains more than tensors and plain data (posix.mkdir), which could run code: it is not loaded"
NO_FLOAT = "dtype |i1 cannot be read: expected float16, float32 or float64 in this machine's byte order"
LINEARS = {"q", "k", "v", "proj", "gate", "up", "fc2"}


@pytest.fixture
def imported(command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """The rows of the tensors in a folder."""
    monkeypatch.setattr(importer, "scatter", read_here)

    def call(folder: Path) -> pd.DataFrame:
        assert command("import", str(folder), "--scores", "", "--workers", "1") == 0
        with Catalog.open(tmp_path / "runs") as catalog:
            return catalog.tensors()

    return call


def refusals(tmp_path: Path) -> list[tuple[str, str | None, str]]:
    ((run,), _) = list_runs(tmp_path / "runs")
    lines = (run.directory / "refused.jsonl").read_text().splitlines()
    return [(each["file"], each["key"], each["reason"]) for each in map(json.loads, lines)]


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=16
    )
    return LlamaForCausalLM(config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["save_pretrained", "bin", "pth", "model", "npz", "npz, compressed"])
def test_a_model_of_transformers(imported: Import, llama: LlamaForCausalLM, tmp_path: Path, how: str):
    folder, state = tmp_path / "in", llama.state_dict()
    folder.mkdir()
    match how:
        case "save_pretrained":
            llama.save_pretrained(folder, max_shard_size="10KB")
            assert len([*folder.glob("*.safetensors")]) > 1
        case "bin":
            torch.save(state, folder / "pytorch_model.bin")
        case "pth":
            torch.save(state, folder / "consolidated.00.pth", _use_new_zipfile_serialization=False)
        case "model":
            torch.save({"epoch": 3, "train": {"model": state}}, folder / "last.pt")
        case _:
            save = np.savez if how == "npz" else np.savez_compressed
            save(folder / "model.npz", **{name: x.numpy() for name, x in state.items()})
    table = imported(folder)
    of_layers = table.dropna(subset="layer_index")
    assert sorted(of_layers["layer_index"].unique()) == [*range(1, LAYERS + 1)]
    assert set(of_layers["module"]) == {*LINEARS, "input_layernorm", "post_attention_layernorm"}
    assert {"embed_tokens", "norm", "lm_head"} >= set(table[table["layer_index"].isna()]["module"])
    assert set(table["tensor_name"]) == {"weight"} and set(table["source_version"]) == {"checkpoint"}
    linear = of_layers[of_layers["module"].isin(LINEARS)]
    assert set(linear["contracted_axis"]) == {-1} and set(linear["layer_type"]) == {"linear"}
    assert set(linear["operation"]) == {"forward"} and len(linear) == LAYERS * len(LINEARS)
    (row,) = linear.query("layer_index == 11 and module == 'fc2'").to_dict("records")
    expected = state["model.layers.10.mlp.down_proj.weight"]
    with Catalog.open(tmp_path / "runs") as catalog:
        assert torch.equal(catalog.load(row["tensor_id"]), expected)
    assert tuple(row["shape"]) == tuple(expected.shape) and "Its file is a checkpoint." in notes(row)[0]


def test_gpt2_keeps_weights_transposed(imported: Import, tmp_path: Path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8))
    model.save_pretrained(tmp_path / "in")
    table = imported(tmp_path / "in")
    qkv = table.query("module == 'qkv' and tensor_name == 'weight'")
    assert sorted(qkv["layer_index"]) == [1, 2] and qkv["contracted_axis"].isna().all()
    assert "may keep the weight as [in, out]" in qkv["corrections"].iloc[0]


def megatron(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint as Megatron lays it out, with its classes; returns the weights."""
    module = ModuleType("megatron.core.enums")

    class ModelType(int): ...

    ModelType.__module__, ModelType.__qualname__ = module.__name__, "ModelType"
    module.ModelType = ModelType
    model = {
        f"decoder.layers.{layer}.{name}": tensor(layer, 4, 6)
        for layer in range(2)
        for name in ("self_attention.linear_qkv.weight", "mlp.experts.linear_fc1.weight3")
    }
    sys.modules[module.__name__] = module
    try:
        torch.save(
            {
                "args": argparse.Namespace(num_layers=2, model_type=ModelType(1), path=Path("/x")),
                "checkpoint_version": 3.0,
                "iteration": 100,
                "model": model | {"decoder.layers.0.mlp.linear_fc1._extra_state": io.BytesIO(b"state")},
                "optimizer": {"optimizer": {"state": {0: {"exp_avg": tensor(5)}, 1: {"exp_avg": tensor(6)}}}},
                "rng_state": [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}],
            },
            path,
        )
    finally:
        del sys.modules[module.__name__]
    return model


def test_megatrons_checkpoint(imported: Import, tmp_path: Path):
    folder = tmp_path / "in/iter_0000100/mp_rank_00"
    folder.mkdir(parents=True)
    model = megatron(folder / "model_optim_rng.pt")
    table = imported(tmp_path / "in").set_index("file_key")
    assert set(table.index) == {f"model.{name}" for name in model} and set(table["iteration"]) == {100}
    fc1 = table.loc["model.decoder.layers.1.mlp.experts.linear_fc1.weight3"]
    assert (fc1["layer_index"], fc1["module"], fc1["tensor_name"], fc1["expert"]) == (2, "fc1", "weight", 3)
    with Catalog.open(tmp_path / "runs") as catalog:
        assert torch.equal(catalog.load(fc1["tensor_id"]), model["decoder.layers.1.mlp.experts.linear_fc1.weight3"])
    name = "iter_0000100/mp_rank_00/model_optim_rng.pt"
    assert refusals(tmp_path) == [(name, "optimizer.optimizer.state", f"2 tensors {NAMELESS}")]


def test_checkpoints_of_lightning_and_nanogpt(imported: Import, tmp_path: Path):
    """Beside the weights, they hold the optimizer's state, whose tensors have no names."""
    (tmp_path / "in").mkdir()
    state = {"state": {0: {"step": torch.tensor(7.0), "exp_avg": tensor(0)}}, "param_groups": [{"lr": 0.1}]}
    lightning = {"epoch": 0, "global_step": 7, "pytorch-lightning_version": "2.5.0", "optimizer_states": [state],
                 "state_dict": {"model.layers.0.mlp.up_proj.weight": tensor(0)}, "hyper_parameters": {}}  # fmt: skip
    nanogpt = {"model": {"_orig_mod.transformer.h.1.mlp.c_fc.weight": tensor(0)}, "optimizer": state, "iter_num": 9,
               "model_args": {"n_layer": 2}, "best_val_loss": torch.tensor(3.5), "config": {}}  # fmt: skip
    torch.save(lightning, tmp_path / "in" / "epoch=0-step=7.ckpt")
    torch.save(nanogpt, tmp_path / "in" / "ckpt.pt")
    rows = imported(tmp_path / "in").query("layer_index.notna()")
    found = {(row.layer_index, row.module, row.tensor_name, row.iteration) for row in rows.itertuples()}
    assert found == {(1, "up", "weight", 7), (2, "fc1", "weight", 9)}


class Evil:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def test_what_needs_unpickling_is_refused_and_the_rest_is_read(imported: Import, tmp_path: Path):
    folder, proof = tmp_path / "in", tmp_path / "proof"
    folder.mkdir()
    weights = {"layers.0.q_proj.weight": tensor(0)}
    torch.save(weights, folder / "good.pth")
    torch.save(weights | {"args": Evil(proof)}, folder / "evil.bin")
    torch.save(weights | {"args": argparse.Namespace(x=Evil(proof))}, folder / "evil.pth")
    torch.save(weights | {"config": LlamaConfig()}, folder / "training_args.bin")
    (folder / "plain.bin").write_bytes(pickle.dumps(weights))
    (folder / "cut.bin").write_bytes((folder / "good.pth").read_bytes()[:-300])
    np.savez(folder / "good.npz", a=np.ones(4, np.float32), b=np.array([Evil(proof)], object), c=np.ones(4, np.int8))
    whole = (folder / "good.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[:-30])
    (folder / "text.npz").write_text("x")
    np.save(folder / "one", np.ones(3, np.float32))
    table = imported(folder)
    assert not proof.exists()
    assert sorted(table["file_key"].fillna("")) == ["", "a", "layers.0.q_proj.weight"]
    expected = {
        ("cut.bin", None, "it was cut short or damaged: its ZIP directory cannot be read"),
        ("cut.npz", None, "it was cut short or damaged: its ZIP directory cannot be read"),
        ("text.npz", None, "it was cut short or damaged: its ZIP directory cannot be read"),
        ("evil.bin", None, RUNS_CODE),
        ("evil.pth", None, RUNS_CODE),
        ("good.npz", "b", "it contains Python objects, which are pickled: they are not loaded"),
        ("good.npz", "c", NO_FLOAT),
        ("plain.bin", None, "it is in neither of torch's two formats"),
    }
    found = set(refusals(tmp_path))
    assert expected <= found, found
    ((name, key, reason),) = found - expected
    assert (name, key) == ("training_args.bin", None) and "LlamaConfig" in reason and "\n" not in reason


def test_dicts_that_refer_to_themselves_and_to_others(tmp_path: Path):
    x, path = tensor(0), tmp_path / "x.pt"
    content: dict = {"model": {"a.weight": x}, 3: x, "list": [x, (x, {"y": x})]}
    content["model"]["again"] = content
    content["a"] = {"b": tensor(1)}
    content["a.b"] = tensor(2)
    level: dict = {"end": x}
    for _ in range(40):  # 2 ** 40 paths lead to its end
        level = {"l": level, "r": level}
    content["deep"] = level
    torch.save(content, path)
    with opened(path) as file:
        found = [(each.key, each.tensor is not None, each.refused) for each in file.tensors]
    assert [key for key, is_read, _ in found if is_read] == ["model.a.weight", "a.b"]
    refused = {key: reason for key, is_read, reason in found if not is_read}
    assert refused[None] == f"1 tensor {NAMELESS}" and refused["list"] == f"3 tensors {NAMELESS}"
    assert refused["a.b"] == f"1 tensor {NAMELESS}"
    assert len(refused) == 4 and torch.equal(load_foreign(path, "a.b"), tensor(1))
    torch.save({"step": 3}, path)
    with pytest.raises(TensorFileError, match="contains no tensor"):
        load_foreign(path)


def test_an_archive_that_claims_more_than_it_has(tmp_path: Path):
    path = tmp_path / "x.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header.getvalue())
    with pytest.raises(TensorFileError, match="claims the shape"):
        load_foreign(path, "x")
    np.savez_compressed(path, x=np.zeros(1 << 20, np.float32))
    assert path.stat().st_size < 1 << 14 and load_foreign(path, "x").shape == (1 << 20,)
    with pytest.raises(TensorFileError, match="its arrays are read whole"), opened(path, 1 << 20) as large:
        next(large.tensors)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("state_dict._forward_module.model.layers.1.self_attn.o_proj.weight", (2, "proj", None, "weight")),
        ("model.layers.0.mlp.experts.5.down_proj.weight", (1, "fc2", 5, "weight")),
        ("model.layers.0.mlp.experts.gate_up_proj", (1, "fc1", None, "weight")),
        ("model.decoder.layers.0.mlp.linear_fc1.layer_norm_weight", (1, "fc1", None, "layer_norm_weight")),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", (1, "q", None, "weight_scale_inv")),
        ("model.layers.1.mlp.shared_experts.down_proj.weight", (2, "shared_fc2", None, "weight")),
        ("model.layers.1.mlp.gate.weight", (2, "router", None, "weight")),  # of DeepSeek and Qwen
        ("model.layers.1.block_sparse_moe.gate.weight", (2, "router", None, "weight")),  # of Mixtral
        ("model.layers.1.block_sparse_moe.experts.3.w1.weight", (2, "gate", 3, "weight")),
        ("model.layers.1.mlp.gate_proj.weight", (2, "gate", None, "weight")),
        ("optimizer.model.layers.0.fc1.weight", (None, None, None, "optimizer.model.layers.0.fc1.weight")),
        ("model.norm.weight", (None, "norm", None, "weight")),
        ("query.weights.mean", (None, None, None, "query.weights.mean")),
        ("weight", (None, None, None, "weight")),
    ],
)
def test_names_of_parameters(key: str, expected: tuple[object, ...]):
    log = interpret(PurePath("model.safetensors"), None, key, Clues(PurePath("model.safetensors"), has_parameters=True))
    assert (log.layer_index, log.module, log.expert, log.tensor_name) == expected


def test_a_module_of_torch_and_a_hostile_name(imported: Import, tmp_path: Path):
    folder = tmp_path / "in"
    folder.mkdir()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hostile = {"<b>.weight": torch.ones(2), "x" * 500 + ".weight": torch.ones(2)}
    save_file(model.state_dict() | hostile, folder / "m.safetensors")
    table = imported(folder)
    assert len(table) == 6 and sorted(table["layer_index"].dropna()) == [1, 1, 2, 2]
    assert table[table["layer_index"].isna()]["module"].isna().all()


def npz(*entries: tuple[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, array in entries:
            file.writestr(name, array)
    return content.getvalue()


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 3\n"
OF_NUMPY = b"\x93NUMPY%c\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.safetensors", POINTER, "it is a pointer of Git LFS, not the file that it stands for: run git lfs pull"),
        ("a.pt", POINTER, "it is a pointer of Git LFS, not the file that it stands for: run git lfs pull"),
        ("a.pt", saved([tensor(0), tensor(1)]), f"2 tensors {NAMELESS}"),
        ("a.pt", saved({"a\ud800": tensor(0)}), "1 tensor: its name in the file is not valid Unicode"),
        ("a.npz", npz(("a.npy", OF_NUMPY % 3)), "its header is not of version 1.0 or 2.0 of .npy"),
        ("a.npz", npz(("a.npy", b"no array")), "damaged, or not of the type that its name indicates: the magic string"),
    ],
)
def test_files_that_are_no_tensors_are_one_line(tmp_path: Path, name: str, content: bytes, reason: str):
    (tmp_path / name).write_bytes(content)
    file = File(str(tmp_path / name), name, len(content), 0)
    (refusal,) = read_file(FileJob(file, ())).refused
    assert refusal.reason.startswith(reason) and refusal.line.isprintable()
