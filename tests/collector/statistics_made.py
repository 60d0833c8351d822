"""Logs of statistics without values, laid out as the tools lay them out. Their own code was run and compared: the
FileLogger of nvdlfw_inspect 0.2.2, into which Transformer Engine logs, and the PrecisionDebugger of mindstudio-probe
26.2.0 (task statistics, level mix)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TE_LOG = "nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-3.log"
LAYERS = ("decoder.layers.1.self_attention.linear_qkv", "decoder.layers.2.mlp.linear_fc1")


def te_line(name: str, value: float, iteration: int) -> str:
    return f"2026-11-26 16:39:22,257 - INFO - {name} \t\t\t\t iteration={iteration:06d} \t\t\t\t value={value:.4f}\n"


def te_statistics(x: Tensor) -> dict[str, float]:
    values = {"min": x.min(), "max": x.max(), "mean": x.mean(), "std": x.std(), "cur_amax": x.abs().max()}
    return {name: value.item() for name, value in values.items()} | {"mxfp8_underflows%": 12.5, "mxfp8_mse": 0.0625}


def write_te(directory: Path, tensors: dict[tuple[str, str, int], Tensor], more: Iterable[str] = ()) -> Path:
    """tensors: by layer, tensor and iteration."""
    lines = [
        te_line(f"{layer}_{tensor}_{name}", value, iteration)
        for (layer, tensor, iteration), x in tensors.items()
        for name, value in te_statistics(x).items()
    ]
    path = directory / TE_LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join([*lines, *more]))
    debug = directory / "nvdlfw_inspect_logs" / path.name
    debug.parent.mkdir(exist_ok=True)
    debug.write_text("INFO - Default logging to file enabled at ./log\n")
    return path


def ms_tensor(x: Tensor) -> dict[str, Any]:
    """As msprobe writes it: mean and norm of floating tensors, in the tensor's dtype."""
    known = {"Max": x.max().item(), "Min": x.min().item(), "Mean": None, "Norm": None}
    if x.is_floating_point():
        known |= {"Mean": x.mean().item(), "Norm": x.norm().item()}
    known = {name: str(v) if isinstance(v, float) and not math.isfinite(v) else v for name, v in known.items()}
    return {"type": "torch.Tensor", "dtype": str(x.dtype), "shape": list(x.shape), **known, "requires_grad": False}


def write_msprobe(directory: Path, data: dict[str, Any]) -> Path:
    path = directory / "step1/rank2/dump.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    path.write_text(json.dumps(head | {"data": data}, indent=1))
    path.with_name("stack.json").write_text("{}")
    return path


def ms_calls(x: dict[str, Tensor]) -> dict[str, Any]:
    """The calls of a linear layer, and of a function with an integer argument."""
    made = {name: ms_tensor(value) for name, value in x.items()}
    module = "Module.layers.0.up_proj.Linear"
    return {
        f"{module}.forward.0": {
            "input_args": [made["input"]],
            "input_kwargs": {"mask": made["mask"]},
            "output": [made["output"]],
            "parameters": {"weight": made["weight"]},
        },
        f"{module}.backward.0": {"input": [made["grad_output"]], "output": [made["grad_input"]]},
        f"{module}.parameters_grad.0": {"weight": [made["grad_weight"]]},
        "Torch.cat.0.forward": {"input_args": [[made["input"], made["output"]], {"type": "int", "value": 1}]},
    }


def ms_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"input": (4, 8), "weight": (16, 8), "output": (4, 16), "grad_output": (4, 16), "grad_input": (4, 8),
              "grad_weight": (16, 8)}  # fmt: skip
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return made | {"mask": torch.ones(4, dtype=torch.int64)}
