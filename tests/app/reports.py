"""A root with hostile words and odd values, and the report of it, made once for all tests."""

from __future__ import annotations

from pathlib import Path

import torch

from binade.data.index.catalog import Catalog
from tests.conftest import MadeOnce, run_collector
from tests.data.builder import make_run

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"


def reported(made_once: MadeOnce) -> Path:
    """A directory with the root, `root`, and the report that the command made of it: `draw`."""
    return made_once("reported", _make)


def _make(place: Path) -> None:
    root = place / "root"
    command = f"binade batch --quantization bf16,mxfp8 --tensor-save-dir {root} --seed 7"
    make_run(root, tensors(1), dataset=HOSTILE, recipe="mxfp8", command=command)
    with Catalog.open(root):
        pass
    output = ("--output", str(place / "draw"), "--jobs", "1")  # to start one takes seconds
    done = run_collector("report", "--tensor-save-dir", str(root), *output, root=root)
    assert done.returncode == 0, done.stderr
    assert "charts" in done.stdout and "Traceback" not in done.stderr


def tensors(seed: int) -> list[tuple[torch.Tensor, dict]]:
    """Operands of two layers in both directions, zeros, NaN and Inf among them, and attention probabilities."""
    random = torch.Generator().manual_seed(seed)
    odd = torch.randn(48, 64, generator=random)
    odd[0, 0], odd[1, 1], odd[2, :9] = torch.nan, torch.inf, 0.0
    gradient = torch.randn(32, 64, generator=random) * 2.0**-20
    probs = torch.randn(1, 4, 24, 24, generator=random).tril().softmax(-1).tril()
    core = {"layer_type": "attention", "module": "core", "component": "FA"}
    return [
        (torch.randn(64, 96, generator=random).bfloat16() * 3, {"format": "mxfp8"}),
        (odd, {"format": "mxfp8", "layer_index": 2, "module": HOSTILE}),
        (gradient, {"format": "mxfp8", "operation": "backward", "tensor_name": "grad_output", "layer_index": 2}),
        (torch.randn(16, 64, generator=random), {"quant_type": "mxfp4", "format": "mxfp4", "tensor_name": "weight"}),
        (probs, {"format": "mxfp8", "tensor_name": "attention_probs", **core}),
    ]
