"""The recorded gain of a norm is what multiplies the normalized values: of zero-centered norms 1 + w, whatever their
class is called. Norms of transformers and torch, and one written as Megatron computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from binade.collector import Recorder, instrument
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter

SIZE = 64


class FusedLayerNorm(nn.Module):
    """Megatron's, with layernorm_zero_centered_gamma (apply_layernorm_1p) or without."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.zeros(SIZE))
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        return F.layer_norm(x, (SIZE,), weight, self.bias, 1e-5)


class OwnRMSNorm(nn.Module):
    """With an eps that no attribute tells, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight), x


NORMS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "gemma": (lambda: GemmaRMSNorm(SIZE), True),
    "gemma3": (lambda: Gemma3RMSNorm(SIZE), True),
    "nemotron": (lambda: NemotronLayerNorm1P(SIZE), True),
    "megatron zero-centered": (lambda: FusedLayerNorm(SimpleNamespace(layernorm_zero_centered_gamma=True)), True),
    "own": (OwnRMSNorm, True),
    "megatron": (lambda: FusedLayerNorm(SimpleNamespace(layernorm_zero_centered_gamma=False)), False),
    "llama": (lambda: LlamaRMSNorm(SIZE), False),
    "torch RMSNorm": (lambda: nn.RMSNorm(SIZE), False),
    "torch LayerNorm": (lambda: nn.LayerNorm(SIZE), False),
}
WEIGHTS = {
    "zero": torch.zeros(SIZE),
    "one": torch.ones(SIZE),
    "minus a half": torch.full((SIZE,), -0.5),
    "spread": torch.linspace(-0.9, 3, SIZE),
}


class Model(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.fc = norm, nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.fc(y[0] if isinstance(y, tuple) else y)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_gain_is_what_multiplies(norm: str, weight: str, tmp_path: Path):
    make, zero_centered = NORMS[norm]
    model, w = Model(make()), WEIGHTS[weight]
    with torch.no_grad():
        model.norm.weight.copy_(w)
        if getattr(model.norm, "bias", None) is not None:
            model.norm.bias.copy_(torch.linspace(-1, 2, SIZE))
    with (
        Recorder(tmp_path, iterations=1, tensors=("norm_gain",)) as recorder,
        instrument(model, None, recorder),
    ):
        model(torch.randn(5, SIZE) * 0.02 + 0.01).square().sum().backward()
        recorder.step()
    with Catalog.open(tmp_path) as catalog:
        (row,) = catalog.tensors(Filter(tensor_name=["norm_gain"])).to_dict("records")
        want = 1 + w if zero_centered else w
        assert torch.equal(catalog.load(row["tensor_id"]), want)
        assert row["absmax"] == float(want.abs().max())
