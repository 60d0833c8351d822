"""Logs of other tools that are overwritten, damaged or absurd: what is shown is what was imported, and what is not read
is reported."""

from __future__ import annotations

import csv
import json
import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from binade.collector import Recorder, instrument
from binade.collector.errors import ConfigError
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import RecipeError
from binade.data.index.catalog import Catalog
from binade.data.run.directory import list_runs
from binade.data.run.losses import read_losses
from binade.data.run.store import TensorFileError
from binade.quant.summary import summarize
from tests.collector.statistics_made import LAYERS, te_line, write_te
from tests.siege.attack import Attempt, attack, check_sentence
from tests.siege.files import command

STEPS = 60
HOW = ("written", "replaced", "in secret", "cut", "deleted", "touched", "swapped with another")


def _overwrite(path: Path, other: Path, how: str, seed: int) -> None:
    before = path.stat()
    generator = torch.Generator().manual_seed(seed)
    match how:
        case "written" | "in secret":
            torch.save(torch.randn(8, 8, generator=generator), path)
        case "replaced":
            torch.save(torch.randn(8, 8, generator=generator), path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        case "cut":
            os.truncate(path, before.st_size // 2)
        case "deleted":
            path.unlink()
        case "touched":
            path.touch()
        case _:
            content = path.read_bytes()
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
    if how == "in secret":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@attack(
    "A tensor's values are those that were imported, or refused in one sentence; no id gets another tensor", tries=30
)
def overwritten_sources(attempt: Attempt) -> None:
    how = attempt.case = attempt.choose(HOW)
    logs, root = attempt.place / "logs", attempt.place / "runs"
    logs.mkdir()
    for seed, name in enumerate("abc"):
        torch.save(torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)), logs / f"{name}.pt")
    line = ("import", str(logs), "--scores", "", "--workers", "1")
    assert command(root, *line)[0] == 0
    meant: dict[str, float] = {}
    for again in range(2):
        with Catalog.open(root) as catalog:
            for _, row in catalog.tensors().iterrows():
                assert meant.setdefault(row["tensor_id"], row["rms"]) == row["rms"]
            if not again:
                _overwrite(logs / "b.pt", logs / "c.pt", how, attempt.number + 9)
            refused = 0
            for tensor_id, path in catalog.tensors()[["tensor_id", "path"]].itertuples(index=False):
                try:
                    assert summarize(catalog.load(tensor_id)).rms == meant[tensor_id]
                except TensorFileError as error:
                    check_sentence(error)
                    refused += not again or Path(path).exists()
            changed = {"touched": 0, "swapped with another": 2}.get(how, 1)
            assert refused == (0 if again else changed)
        status, out, _ = command(root, "verify", str(root))
        assert (status == 1) == (not again and how not in ("touched", "deleted")), out
        assert command(root, *line)[0] == 0


@attack("Losses are read as they were written, or what is missing is said with exit status 1 or 2", tries=300)
def damaged_losses(attempt: Attempt) -> None:
    kind, damage = attempt.choose(
        [(kind, damage) for kind in ("csv", "jsonl", "events") for damage in ("a bit", "a quote", "cut", "lost")]
    )
    attempt.case = f"{kind}: {damage}"
    root, losses = attempt.place / "runs", 2 + np.arange(STEPS)[::-1] / 8
    first = attempt.random.choice([0, 2**31 - 30, 3 * 10**12])
    expected = dict(zip(range(first, first + STEPS), losses.tolist(), strict=True))
    source = path = attempt.place / f"x.{kind}"
    frame = pd.DataFrame({"step": expected.keys(), "loss": losses, "note": "a, b"})
    match kind:
        case "csv":
            frame.to_csv(path, index=False, quoting=csv.QUOTE_NONNUMERIC)
        case "jsonl":
            frame.to_json(path, orient="records", lines=True)
        case _:
            with SummaryWriter(str(source)) as writer:
                for step, loss in expected.items():
                    writer.add_scalar("loss", loss, step)
            (path,) = source.iterdir()
    content = bytearray(path.read_bytes())
    at = attempt.random.randrange(len(content))
    match damage:
        case "a bit" if kind == "events":  # a text has no checksum that would show it
            content[at] ^= 1 << attempt.random.randrange(8)
        case "a quote":
            content[at:at] = b'"'
        case "cut":
            del content[at:]
        case "lost":
            del content[at : at + attempt.random.randrange(1, 9)]
    path.write_bytes(content)
    status, out, err = command(root, "import", str(source), "--recipe", "bf16")
    assert "Traceback" not in err and status in (0, 1, 2)
    if status == 2:
        check_sentence(err.strip())
        return
    ((run,), _) = list_runs(root)
    found = {record["iteration"]: record["loss"] for record in read_losses(run.directory)}
    if kind == "events":
        assert found.items() <= expected.items()
        said = "not read: " in out or "left out: " in out or damage == "cut"  # which may be between two records
        assert len(found) == STEPS or said
        assert (status == 1) == ("not read: " in out)
    elif damage != "lost":  # of digits, which cannot be noticed
        assert found.items() <= expected.items()
        assert len(found) == STEPS or "left out: " in out or damage == "cut"
    with Catalog.open(root) as catalog:
        assert catalog.refused == [] and catalog.runs()["iteration"].tolist() == [max(found)]


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def _dumps(folder: Path, x: torch.Tensor) -> dict[str, Path]:
    """A file of each kind that is imported, with a tensor."""
    state = {"model.layers.0.mlp.down_proj.weight": x}
    places = {
        "dump": "layer1.pt", "Transformer Engine": "tensor_dumps/rank_0/iter_000100/fc1_activation.pt",
        "msprobe": "step0/rank0/dump_tensor_data/Module.layers.0.mlp.Linear.forward.0.output.0.npy",
        "SGLang": "step=1___rank=0___dump_index=1___name=non_intrusive__model.layers.0.mlp.output.pt",
        "pass": "TP0_PP0_Rank0_pid7/Pass00000.pt", "safetensors": "model.safetensors", "bin": "pytorch_model.bin",
        "npz": "weights.npz", "Megatron": "iter_0000100/mp_rank_00/model_optim_rng.pt",
    }  # fmt: skip
    contents = {"SGLang": {"value": x, "meta": {}}, "pass": {"model.layers.0.mlp": x}, "bin": state,
                "Megatron": {"model": state, "iteration": 100}}  # fmt: skip
    for kind, name in places.items():
        path = folder / kind / name
        path.parent.mkdir(parents=True)
        match path.suffix:
            case ".npy":
                np.save(path, x.numpy())
            case ".npz":
                np.savez(path, **{name: x.numpy() for name, x in state.items()})
            case ".safetensors":
                save_file(state, path)
            case _:
                torch.save(contents.get(kind, x), path)
        places[kind] = str(path)
    return {kind: Path(path) for kind, path in places.items()}


DAMAGES = ("cut", "a bit", "lost", "empty", "random", "code", "another kind", "a huge header")


@attack("Of dumps and checkpoints of each kind, intact ones are imported; each damaged one is imported or "
        "reported in one line, and nothing in it is executed", tries=72)  # fmt: skip
def damaged_dumps(attempt: Attempt) -> None:
    logs, root, marker = attempt.place / "logs", attempt.place / "runs", attempt.place / "executed"
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(attempt.number))
    files = _dumps(logs, x)
    kind, damage = attempt.choose([(kind, damage) for kind in files for damage in DAMAGES])
    attempt.case = f"{kind}: {damage}"
    path, other = files[kind], files["npz" if files[kind].suffix != ".npz" else "dump"]
    content = bytearray(path.read_bytes())
    at = attempt.random.randrange(len(content))
    match damage:
        case "cut":
            del content[at:]
        case "a bit":
            content[at] ^= 1 << attempt.random.randrange(8)
        case "lost":
            del content[at : at + attempt.random.randrange(1, 99)]
        case "empty":
            content.clear()
        case "random":
            content[:] = attempt.random.randbytes(len(content))
        case "code":
            torch.save({"model": _Bomb(marker)}, path)
            content = bytearray(path.read_bytes())
        case "another kind":
            content = bytearray(other.read_bytes())
        case _:
            content[:8] = struct.pack("<Q", 1 << attempt.random.randrange(20, 63))
    path.write_bytes(content)
    status, out, err = command(root, "import", str(logs), "--scores", "", "--workers", "1")
    assert status == 0 and "Traceback" not in out + err, err
    assert not marker.exists()
    refusals = [line for line in out.splitlines() if line.startswith("    ")]
    for line in refusals:
        check_sentence(line)
    with Catalog.open(root) as catalog:
        rows = catalog.tensors()
        assert catalog.refused == [] and len(rows) >= len(files) - 1
        intact = rows[rows["path"] != str(path)]["tensor_id"]
        assert len(intact) == len(files) - 1 and all(torch.equal(catalog.load(each), x) for each in intact)
        assert len(rows) > len(intact) or any(path.name in line for line in refusals)


PRECISION = """configs:
  mxfp8:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: mxfp8}
matchers:
  others: {config: mxfp8, type: glob, pattern: "*", enabled: true}
"""
YAML = {
    "aliases": "a: &a [x, x]\n" + "".join(f"{y}: &{y} [*{x}, *{x}]\n" for x, y in pairwise("abcdefghijklmnopqrs")),
    "code": "configs: !!python/object/apply:os.system ['touch {marker}']\n",
    "deep": "[" * 50_000,
    "itself": "configs: &a {mxfp8: *a}\nmatchers: *a\n",
    "bytes": "\udcff\udcfe",
    "number": PRECISION.replace("mxfp8}", "9" * 5000 + "}"),
    "pattern": PRECISION.replace('"*"', '"' + "[a-" * 3000 + '"'),
}


@attack("A precision file is read as a recipe or refused in one sentence; nothing in it is executed", tries=200)
def damaged_precision_files(attempt: Attempt) -> None:
    case = attempt.case = attempt.choose((*YAML, "cut", "lost", "a character"))
    marker, text = attempt.place / "executed", PRECISION
    at = attempt.random.randrange(len(text))
    match case:
        case "cut":
            text = text[:at]
        case "lost":
            text = text[:at] + text[at + attempt.random.randrange(1, 40) :]
        case "a character":
            text = text[:at] + attempt.random.choice("{}[]:*&!|>'\"#%@\t\n\0\u2028") + text[at + 1 :]
        case _:
            text = YAML[case].replace("{marker}", str(marker))
    path = attempt.place / "mine.yaml"
    path.write_text(text, errors="surrogateescape")
    try:
        parse_recipe(str(path))
    except (RecipeError, ConfigError) as error:
        check_sentence(error)
    assert not marker.exists()


@attack("Statistics that no tensor has are left out and counted; possible ones are imported", tries=20)
def absurd_statistics(attempt: Attempt) -> None:
    chance = attempt.random
    values = {name: round(chance.uniform(-9, 9), 4) for name in ("min", "max", "mean", "cur_amax")}
    values["mxfp8_underflows%"] = chance.choice([12.5, 250.0, -1.0])
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(attempt.number))
    attempt.case = json.dumps(values)
    more = [te_line(f"{LAYERS[1]}_weight_{name}", value, 1) for name, value in values.items()]
    write_te(attempt.place / "logs", {(LAYERS[0], "weight", 1): x}, more)
    root = attempt.place / "runs"
    status, out, err = command(root, "import", str(attempt.place / "logs"), "--scores", "", "--workers", "1")
    assert status == 0, err
    with Catalog.open(root) as catalog:
        rows = catalog.tensors()
        assert len(rows) == (1 if "impossible: " in out else 2)
        assert (rows["min"].fillna(-9) <= rows["max"].fillna(9)).all() and (rows["absmax"] >= 0).all()
        assert rows["underflow_of_all"].between(0, 1).all()


@attack("A model is recorded whatever its modules are called, or refused in one sentence", tries=60)
def odd_module_names(attempt: Attempt) -> None:
    chance = attempt.random
    names = {"".join(chance.choices("a.0 fc1\u202e<%/", k=chance.randrange(1, 9))) for _ in range(3)}
    attempt.case = repr(sorted(names))
    model = nn.Sequential()
    for name in sorted(names):
        setattr(model, name, nn.Linear(32, 32))
    with Recorder(attempt.place, iterations=1, scores=()) as recorder, instrument(model, "mxfp8", recorder):
        model(torch.randn(4, 32)).sum().backward()
        recorder.step()
    with Catalog.open(attempt.place) as catalog:
        rows = catalog.tensors()
        assert catalog.refused == [] and len(rows[rows["tensor_name"] == "weight"]) >= len(names)
