"""Dumps of Transformer Engine, msprobe and SGLang, laid out as the tools' own code lays them out. It was run on a small
model and compared: mindstudio-probe 26.2.0 (PrecisionDebugger, level mix), dumper.py and tensor_dump_forward_hook.py of
sglang 0.5.23, dump_tensors.py of Transformer Engine 2.20.0.dev0 (d0067d0). The quantized tensor is not TE's own, which
needs a GPU: the class here pickles as TE's does."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path, PurePath
from types import ModuleType

import pytest
import torch

from binade.collector.imports import importer, registry
from binade.collector.imports.log import Importer, TensorLog
from binade.collector.imports.registry import interpret
from binade.data.index.catalog import Catalog
from binade.data.run.directory import list_runs
from binade.data.run.notes import notes
from tests.collector.logs_made import read_here, tensor

TE = "tensor_dumps/rank_3/iter_000002/"
MSPROBE = "step1/rank2/dump_tensor_data/"
SGLANG = "dump_1/step=4___rank=1___dump_index=9___name="
PASS = "TP1_PP0_Rank1_pid77/Pass00004.pt"
FORWARD, BACKWARD = {"operation": "forward", "phase": "pre"}, {"operation": "backward", "phase": "post"}
LINEAR = {"layer_type": "linear", "component": "linear"}


def names(layer: int | None, module: str | None, name: str | None, **more: object) -> dict[str, object]:
    return {"layer_index": layer, "module": module, "tensor_name": name, **more}


@pytest.mark.parametrize(
    ("tool", "name", "expected"),
    [
        # Transformer Engine: the layer's number is Megatron's layer_number, from 1
        (
            TE,
            "_decoder_layers_1_self_attention_linear_qkv_activation",
            names(1, "qkv", "input", **FORWARD, **LINEAR, stage="before", contracted_axis=-1, iteration=2, rank=3),
        ),
        (
            TE,
            "_decoder_layers_12_mlp_experts_linear_fc1_gemm_5_wgrad",
            names(12, "fc1", "grad_weight", **BACKWARD, expert=5, stage=None),
        ),
        (TE, "_decoder_layers_2_mlp_shared_experts_linear_fc2_dgrad", names(2, "shared_fc2", "grad_input")),
        (TE, "transformer_layer_layernorm_mlp_fc2_gradient", names(None, "fc2", "grad_output")),
        (TE, "_layers_5_self_attn_q_proj_weight", names(5, "q", "weight")),
        (TE, "Layer_3_output", names(None, "Layer_3", "output", phase="post")),
        # msprobe: a module's path counts layers from 0
        (
            MSPROBE,
            "Module.layers.0.up_proj.Linear.forward.0.input.0",
            names(1, "up", "input", **FORWARD, **LINEAR, contracted_axis=-1, iteration=1, rank=2),
        ),
        (MSPROBE, "Module.layers.1.down_proj.Linear.backward.0.input.0", names(2, "fc2", "grad_output", phase="pre")),
        (MSPROBE, "Module.layers.1.down_proj.Linear.backward.0.output.0", names(2, "fc2", "grad_input", **BACKWARD)),
        (MSPROBE, "Module.layers.0.up_proj.Linear.forward.0.parameters.weight", names(1, "up", "weight", **FORWARD)),
        (MSPROBE, "Module.layers.0.up_proj.Linear.parameters_grad.0.weight", names(1, "up", "grad_weight", **BACKWARD)),
        (MSPROBE, "Module.layers.1.Block.forward.0.output.0", names(2, None, "output.0", layer_type=None)),
        (
            MSPROBE,
            "Module.0.module.decoder.layers.3.mlp.linear_fc1.TELayerNormColumnParallelLinear.forward.1.input.0",
            names(4, "fc1.1", "input.0", **LINEAR, contracted_axis=None),
        ),
        (MSPROBE, "Functional.linear.3.forward.input.1", names(None, "Functional.linear.3", "weight", **LINEAR)),
        (MSPROBE, "Functional.linear.3.backward.input.0", names(None, "Functional.linear.3", "grad_output")),
        (MSPROBE, "Functional.linear.3.backward.output.0", names(None, "Functional.linear.3", "output.0", **BACKWARD)),
        (
            MSPROBE,
            "Functional.scaled_dot_product_attention.0.forward.input.1",
            names(None, "Functional.scaled_dot_product_attention.0", "key", layer_type="attention", component="FA"),
        ),
        (MSPROBE, "Torch.relu.1.forward.input.0", names(None, "Torch.relu.1", "input.0", layer_type=None)),
        # SGLang
        (
            SGLANG,
            "non_intrusive__model.layers.1.mlp.down_proj.inputs.0___recompute_status=disabled___layer_id=1",
            names(2, "fc2", "input", **FORWARD, **LINEAR, contracted_axis=-1, iteration=4, rank=1),
        ),
        (
            SGLANG,
            "grad__non_intrusive__model.layers.0.mlp.down_proj.inputs.0",
            names(1, "fc2", "grad_input", **BACKWARD),
        ),
        (SGLANG, "grad__param__model.layers.0.mlp.down_proj.weight", names(1, "fc2", "grad_weight", **BACKWARD)),
        (SGLANG, "non_intrusive__model.layers.0.output", names(1, None, "output", layer_type=None)),
        (SGLANG, "final_hidden___layer_id=1", names(2, None, "final_hidden", operation=None, phase=None)),
        (
            PASS,
            "model.layers.0.self_attn.qkv_proj",
            names(1, "qkv", "output", phase="post", operation="forward", iteration=4, rank=1),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" not in value else "",
)
def test_words(tool, name, expected):
    key = {TE: "high_precision", MSPROBE: None, SGLANG: "value", PASS: name}[tool]
    log = interpret(PurePath("/dumps", tool if tool == PASS else f"{tool}{name}.pt"), None, key)
    assert log.version and {name: getattr(log, name) for name in expected} == expected


def test_metadata_comes_before_the_name():
    meta = {"step": 7, "rank": 5, "layer_id": 2, "name": "x" * 500}
    log = interpret(PurePath(SGLANG + "query.pt"), {"meta": meta}, "value")
    assert (log.iteration, log.rank, log.layer_index, log.tensor_name) == (7, 5, 3, None)


def test_dumps_with_a_layer_0_count_from_0(tmp_path):
    """A model without layer_number: nvdlfw_inspect names its layers by their paths in torch."""
    folder = tmp_path / TE
    folder.mkdir(parents=True)
    paths = [folder / f"_layers_{layer}_mlp_fc1_activation.pt" for layer in (0, 1, 10)]

    def layers() -> list[int | None]:
        return [interpret(path, None, "high_precision").layer_index for path in paths]

    for path in paths[1:]:
        path.touch()
    assert layers()[1:] == [1, 10]
    paths[0].touch()
    assert layers() == [1, 2, 11]
    assert "counts layers from 0" in interpret(paths[1], None, "high_precision").corrections[-1]
    enormous = folder / f"_layers_{'9' * 100}_mlp_fc1_activation.pt"
    enormous.touch()
    assert interpret(enormous, None, "high_precision").layer_index is None


@pytest.mark.parametrize(
    ("path", "iteration", "rank"),
    [
        ("dump/step3/rank1/dump_tensor_data/x_tensor.0.debug.pt", 3, 1),
        ("dump/step0/proc2016/dump_tensor_data/Module.model.layers.0.q_proj.Linear.forward.0.input.0.pt", 0, None),
        ("save/step2/rank0/x_float32_0.npy", 2, 0),
        ("acl/step5/rank2/tensor_data/linear.0.input.0.pt", 5, 2),
        ("iter_0000100/mp_rank_03/model_optim_rng.pt", 100, 3),
        ("global_step20/x.pt", 20, None),
        ("checkpoint-300/model.safetensors", 300, None),
        ("step1/iter2/rank_4/rank5/x.pt", 2, 5),
        ("my_step3/ranking1/x.pt", None, None),
        (f"step{'9' * 40}/rank{'9' * 12}/x.pt", None, None),
        ("step3/step=7___rank=2___dump_index=1___name=query.pt", 7, 2),
    ],
)
def test_folders_say_the_iteration_and_the_rank(path, iteration, rank):
    log = interpret(PurePath(path))
    assert (log.iteration, log.rank) == (iteration, rank)


@pytest.mark.parametrize("path", ["iter_000002/fc1_activation", "dump_tensor_data/x", "step=1___rank=0", "Pass00001"])
def test_other_files_are_no_tools(path):
    assert interpret(PurePath(path + ".pt")).version is None


def test_an_importer_is_one_entry(monkeypatch):
    toy = Importer(
        "toy", lambda path, metadata, key: TensorLog("toy", tensor_name=path.stem) if path.suffix == ".npy" else None
    )
    monkeypatch.setattr(registry, "IMPORTERS", (toy, *registry.IMPORTERS))
    assert (
        interpret(PurePath("x.npy")) == TensorLog("toy", tensor_name="x")
        and interpret(PurePath("x.pt")).version is None
    )


def engine(monkeypatch: pytest.MonkeyPatch, *, bound: bool) -> torch.Tensor:
    """A tensor that pickles as TE's MXFP8Tensor: by a function of its module, or by a bound method as in 2.15."""
    module = ModuleType("transformer_engine.pytorch.tensor.mxfp8_tensor")

    class MXFP8Tensor(torch.Tensor):
        def __reduce_ex__(self, protocol):
            content = (torch.zeros(4, dtype=torch.uint8), module.Quantizer(), torch.bfloat16, torch.Size([4, 8]))
            return module.MXFP8Tensor._make_in_reduce_ex if bound else module._make_mxfp8_tensor_in_reduce_ex, content

        @classmethod
        def _make_in_reduce_ex(cls, *content): ...

    class Quantizer:
        def __init__(self):
            self.rowwise = True

    def _make_mxfp8_tensor_in_reduce_ex(*content): ...

    for each in (MXFP8Tensor, Quantizer, _make_mxfp8_tensor_in_reduce_ex):
        each.__module__, each.__qualname__ = module.__name__, each.__name__
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return torch.ones(4, 8).as_subclass(MXFP8Tensor)


class Evil:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return (shutil.rmtree, (str(self.proof),))


def test_import_of_each_tool(command, capsys, monkeypatch, tmp_path):
    dumps = tmp_path / "dumps"
    for folder in (dumps / TE, dumps / MSPROBE, (dumps / SGLANG).parent, (dumps / PASS).parent):
        folder.mkdir(parents=True)
    (tmp_path / "proof").mkdir()
    x = [tensor(seed) for seed in range(5)]
    for number, bound in enumerate((True, False)):
        both = {"high_precision": x[number], "quantized": engine(monkeypatch, bound=bound)}
        torch.save(both, dumps / TE / f"_decoder_layers_{number + 1}_mlp_linear_fc1_activation.pt")
    torch.save(both | {"more": Evil(tmp_path / "proof")}, dumps / TE / "_decoder_layers_3_mlp_linear_fc1_weight.pt")
    torch.save(x[2], dumps / MSPROBE / "Functional.linear.0.forward.input.0.pt")
    for name in ("dump", "stack", "construct"):
        content = {"task": "tensor", "dump_data_dir": "/x", "data": {}} if name == "dump" else {}
        (dumps / MSPROBE).with_name(f"{name}.json").write_text(json.dumps(content))
    torch.save({"value": torch.nn.Parameter(x[3]), "meta": {"step": 4}}, dumps / f"{SGLANG}query.pt")
    torch.save({"model.norm": x[4], "lm_head": [x[4]]}, dumps / PASS)
    monkeypatch.setattr(importer, "scatter", read_here)
    assert command("import", str(dumps), "--scores", "", "--workers", "1") == 0
    out, err = capsys.readouterr()
    assert err == "" and "by source: SGLang 2, TransformerEngine 2, msprobe 1\n" in out
    with Catalog.open(tmp_path / "runs") as catalog:
        table = catalog.tensors().sort_values("path")
        values = [catalog.load(each) for each in table["tensor_id"]]
    assert list(table["file_key"].fillna("")) == ["model.norm", "value", "", "high_precision", "high_precision"]
    assert all(torch.equal(a, b) for a, b in zip(values, (x[4], x[3], x[2], x[0], x[1]), strict=True))
    assert notes(table.iloc[-1])[0].endswith("Its file was written by TransformerEngine.")
    ((run,), _) = list_runs(tmp_path / "runs")
    refused = [json.loads(line) for line in (run.directory / "refused.jsonl").read_text().splitlines()]
    assert [(each["key"], " ".join(each["reason"].split()[:5])) for each in refused] == [
        ("lm_head", "1 tensor in lists, by"),
        ("quantized", "quantized tensors of Transformer Engine"),
        ("quantized", "quantized tensors of Transformer Engine"),
        (None, "it contains more than tensors"),
    ]
    assert (tmp_path / "proof").is_dir()
