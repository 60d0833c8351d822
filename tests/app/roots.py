"""Roots with odd contents, made with the project's own writers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from binade.collector import Recorder
from tests.conftest import PROJECT

SCORES = ("hifp8", "mxfp8", "mxfp4")


def record(root: Path, tensors: list[Tensor], scores: Sequence[str] = SCORES, **options) -> list[str]:
    """A run in which each tensor is the input of the layer of its number, scored; returns their ids."""
    config = {"model": "odd", "size": "tiny", "dataset": "none", "recipe": "bf16", "control_iter": 1}
    with Recorder(root, label="odd", config=config, scores=scores, **options) as recorder:
        for index, x in enumerate(tensors):
            recorder.record("input", x, layer=index + 1, module="fc1", operation="forward", phase="pre", dim=-1)
    return [f"{recorder.writer.run_id}/r00-{index + 1:06d}" for index in range(len(tensors))]


def odd_tensors() -> dict[str, Tensor]:
    """Tensors that break what assumes a spread of finite values."""
    nan = float("nan")
    random = torch.Generator().manual_seed(7)
    normal = torch.randn(32, 64, generator=random)
    odd = {
        "all NaN": torch.full((32, 64), nan),
        "all infinite": torch.full((32, 64), -float("inf")),
        "zeros": torch.zeros(32, 64),
        "constant": torch.full((32, 64), 0.1),
        "some NaN": torch.where(normal > 1.5, nan, normal),
        "subnormal": normal * 2.0**-128,
        "huge": normal.clamp(-3, 3) * 1e38,
        "single": torch.tensor([[3.5]]),
        "empty": torch.zeros(0, 64),
    }
    return {name: x.bfloat16() for name, x in odd.items()}


def copy(source: Path, target: Path) -> Path:
    """A root of its own with the same runs, not indexed yet. Tensor files are shared until replaced."""
    target.mkdir(parents=True, exist_ok=True)
    for run in runs_of(source):
        copy_run(run, target / run.name)
    return target


def copy_run(run: Path, target: Path) -> None:
    def link(a: str, b: str) -> None:
        if a.endswith(".pt"):
            os.link(a, b)
        else:
            shutil.copy2(a, b)

    shutil.copytree(run, target, copy_function=link)


def runs_of(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if (path / "run.json").exists())


def replace(path: Path, content: bytes) -> None:
    """Write a file anew: what else is linked to the old one keeps it."""
    path.unlink()
    path.write_bytes(content)


def change_status(run: Path, **changes: object) -> None:
    path = run / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def package_with_own_app(folder: Path) -> Path:
    """The package binade in a folder, whose app can be changed."""
    package = folder / "binade"
    package.mkdir()
    for path in (PROJECT / "binade").glob("*.py"):
        shutil.copy2(path, package)
    for name in ("quant", "data", "collector"):
        (package / name).symlink_to(PROJECT / name)
    shutil.copytree(PROJECT / "app", package / "app")  # with what is compiled of it
    return package
