"""A small model for the tests of capture, the tensors that its layers see, and the metrics of an error."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from binade import quant
from binade.collector import Recorder
from binade.collector.models.attention import CoreAttention
from binade.collector.models.model import GPTModel
from binade.collector.models.parallel import ParallelLinear
from binade.collector.models.registry import MODELS
from binade.quant.formats import FORMATS

SHAPE = replace(MODELS["llama32-1b"]["tiny"], hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16)
SCORES = ("hifp8", "mxfp8", "mxfp4", "nvfp4")


def build(layers: int = SHAPE.layers) -> GPTModel:
    model = GPTModel(replace(SHAPE, layers=layers))
    model.initialize(0)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(257, (2, 41), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(model: GPTModel) -> torch.Tensor:
    tokens, labels = batch()
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def step(model: GPTModel) -> torch.Tensor:
    tokens, labels = batch()
    logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return logits.detach()


def end_step(recorder: Recorder) -> None:
    """End an iteration before the writer's thread has seen what it recorded, which it has when this returns."""
    with (held := Lock()):
        recorder.later(held.acquire)
        recorder.step()
    recorder.settle()


class Hooks:
    """What each layer saw, by torch's own hooks: {(layer, module, tensor name): tensor}."""

    def __init__(self, model: GPTModel) -> None:
        self.seen: dict[tuple, torch.Tensor] = {}
        self._handles = []
        for layer in model.modules():
            if isinstance(layer, (ParallelLinear, CoreAttention)):
                self._handles += [layer.register_forward_pre_hook(self.before), layer.register_forward_hook(self.after)]

    def keep(self, layer, name: str, tensor: torch.Tensor) -> None:
        self.seen[layer.site.layer_index, layer.site.module, name] = tensor.detach().clone()

    def before(self, layer, inputs: tuple) -> None:
        names = ("query", "key", "value") if isinstance(layer, CoreAttention) else ("input",)
        for name, x in zip(names, inputs, strict=True):
            self.keep(layer, name, x)
            x.register_hook(lambda grad, name=name: self.keep(layer, f"grad_{name}", grad))

    def after(self, layer, inputs: tuple, output: torch.Tensor) -> None:
        self.keep(layer, "output", output)
        output.register_hook(lambda grad: self.keep(layer, "grad_output", grad))
        if isinstance(layer, ParallelLinear):
            self.keep(layer, "weight", layer.weight.to(output.dtype))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def gradients(model: GPTModel) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


def check_errors(x: torch.Tensor, fmt: str, axis: int, found: dict, masked: int = 0) -> None:
    """The metrics of METRICS.md, in NumPy. masked: how many values, all 0, are not counted."""
    q = quant.fake_quantize(x, fmt, dim=axis).double().numpy()
    x = x.double().numpy()
    e = q - x
    n = x.size - masked
    expected = {
        "sqnr_db": 10 * np.log10((x**2).sum() / (e**2).sum()) if (e**2).sum() else np.inf,
        "mse": (e**2).sum() / n,
        "relative_error": np.linalg.norm(e) / np.linalg.norm(x),
        "cosine": (x * q).sum() / np.linalg.norm(x) / np.linalg.norm(q) if q.any() else np.nan,
        "projection": (q * x).sum() / (x**2).sum(),
        "max_abs_error": np.abs(e).max(),
        "flush_to_zero": ((x != 0) & (q == 0)).sum() / (x != 0).sum(),
        "underflow_of_all": ((x != 0) & (q == 0)).sum() / n,
    }
    element = FORMATS[fmt].element
    if fmt == "hifp8":
        expected["saturated"] = (np.abs(x) > 32768).sum() / n
    elif fmt != "nvfp4":  # MX, floor rule; NVFP4's block scale is the quantizer's own tests' matter
        x = np.moveaxis(x, axis, -1)
        padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)])
        blocks = np.abs(padded.reshape(-1, 32))
        top = blocks.max(1, keepdims=True)
        scale = np.exp2(np.floor(np.log2(np.where(top > 0, top, 1))) - element.emax)
        expected["saturated"] = (blocks / scale > element.max).sum() / n
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, nan_ok=True), f"{fmt} {name}"
