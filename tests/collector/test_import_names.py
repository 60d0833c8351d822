"""Names of imported tensors are distinct over the whole import, and their full path is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from binade.collector.imports import importer
from binade.data.index.catalog import Catalog
from binade.data.run.columns import Identity
from tests.collector.logs_made import read_here, tensor
from tests.collector.statistics_made import ms_tensor

Import = Callable[..., pd.DataFrame]
IDENTITY = [*Identity.__annotations__]


@pytest.fixture
def imported(command: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """The rows of the tensors in the folder "in", by module_path."""
    monkeypatch.setattr(importer, "scatter", read_here)

    def call(status: int = 0) -> pd.DataFrame:
        assert command("import", str(tmp_path / "in"), "--scores", "", "--workers", "1") == status
        with Catalog.open(tmp_path / "runs") as catalog:
            assert catalog.refused == []
            return catalog.tensors().set_index("module_path")

    return call


def dump(directory: Path, names: list[str]) -> None:
    """A dump of msprobe with these tensors, and its dump.json."""
    folder = directory / "step0/rank0"
    (folder / "dump_tensor_data").mkdir(parents=True)
    data: dict = {}
    for seed, name in enumerate(names):
        x = tensor(seed, dtype=torch.float32)
        torch.save(x, folder / f"dump_tensor_data/{name}.output.0.pt")
        data[name] = {"output": [ms_tensor(x) | {"data_name": f"{name}.output.0.pt"}]}
    (folder / "dump.json").write_text(json.dumps({"task": "tensor", "dump_data_dir": "/x", "data": data}))


def test_two_towers_of_msprobe(imported: Import, tmp_path: Path):
    paths = [f"model.{tower}.layers.{i}.self_attn.q_proj" for i in (0, 11) for tower in ("encoder", "decoder")]
    paths += ["module.visual.blocks.0.attn.proj", "module.language_model.layers.0.self_attn.o_proj", "model.norm"]
    dump(tmp_path / "in", [f"Module.{path}.Linear.forward.0" for path in paths])
    table = imported()
    assert not table.duplicated(IDENTITY).any()
    expected = {
        "model.encoder.layers.0.self_attn.q_proj": (1, "model.encoder.layers.self_attn.q_proj"),
        "model.decoder.layers.0.self_attn.q_proj": (1, "model.decoder.layers.self_attn.q_proj"),
        "model.encoder.layers.11.self_attn.q_proj": (12, "model.encoder.layers.self_attn.q_proj"),
        "model.decoder.layers.11.self_attn.q_proj": (12, "model.decoder.layers.self_attn.q_proj"),
        "visual.blocks.0.attn.proj": (1, "visual.blocks.attn.proj"),  # "module" is DistributedDataParallel's
        "language_model.layers.0.self_attn.o_proj": (1, "language_model.layers.self_attn.o_proj"),
    }
    found = {path: (row["layer_index"], row["module"]) for path, row in table.iterrows()}
    assert found.pop("model.norm")[1] == "norm" and found == expected
    again = imported()
    assert again["module"].to_dict() == table["module"].to_dict()
    assert again["tensor_id"].to_dict() == table["tensor_id"].to_dict()


def test_towers_in_files_of_their_own(imported: Import, tmp_path: Path):
    """The second file is added later: the tensors of the first one are renamed, with their ids and statistics."""
    folder = tmp_path / "in"
    folder.mkdir()
    vision = {"visual.blocks.0.mlp.fc1.weight": tensor(0), "visual.norm.weight": tensor(1, 8)}
    save_file(vision, folder / "a.safetensors")
    before = imported()
    assert list(before["module"]) == ["fc1", "norm"]
    save_file({"language_model.layers.0.mlp.fc1.weight": tensor(2)}, folder / "b.safetensors")
    table = imported()
    assert table["module"].to_dict() == {
        "visual.blocks.0.mlp.fc1": "visual.blocks.mlp.fc1",
        "visual.norm": "norm",
        "language_model.layers.0.mlp.fc1": "language_model.layers.mlp.fc1",
    }
    first = "visual.blocks.0.mlp.fc1"
    assert table.loc[first, "tensor_id"] == before.loc[first, "tensor_id"]
    with Catalog.open(tmp_path / "runs") as catalog:
        assert torch.equal(catalog.load(table.loc[first, "tensor_id"]), tensor(0))
        assert catalog.distribution()["count"].sum() == table["numel"].sum()


def test_calls_are_micro_batches_if_all_modules_have_as_many(imported: Import, tmp_path: Path):
    dump(tmp_path / "in", [f"Module.layers.{i}.{m}.Linear.{way}.{call}" for call in range(3) for i in range(2)
                           for m in ("q_proj", "up_proj") for way in ("forward", "backward")])  # fmt: skip
    table = imported()
    assert len(table) == 24 and not table.duplicated(IDENTITY).any()
    assert sorted(table["micro_batch"].unique()) == [0, 1, 2] and set(table["module"]) == {"q", "up"}


def test_calls_of_a_shared_module_are_told_apart(imported: Import, tmp_path: Path):
    names = [f"layers.0.q_proj.Linear.forward.{call}" for call in range(3)]
    names += ["layers.0.up_proj.Linear.forward.0", "encoder.layers.0.q_proj.Linear.forward.0"]
    dump(tmp_path / "in", [f"Module.{name}" for name in names])
    table = imported()
    assert not table.duplicated(IDENTITY).any() and table["micro_batch"].isna().all()
    shared = ["layers.q_proj", "layers.q_proj.1", "layers.q_proj.2"]
    assert sorted(table["module"]) == ["encoder.layers.q_proj", *shared, "up"]
    assert sorted(imported()["module"]) == sorted(table["module"])
