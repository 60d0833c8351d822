"""Names of modules that have dots of their own, as setattr(self, "blocks.0.fc1", nn.Linear(...)) gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from binade.collector import Recorder, instrument
from binade.collector.capture.adapters.megatron import layer_number
from binade.collector.capture.adapters.torch_modules import parent_of
from binade.collector.capture.survey import InstrumentError
from binade.data.index.catalog import Catalog

NAMES = ("fc1.0", "blocks.0.fc2", "a", "..", ".x", "y.", "experts.3.w")


class Dotted(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [Dotted(*NAMES), nn.Sequential(Dotted(*NAMES))], ids=["itself", "within"])
def test_layers_with_such_names_are_recorded(tmp_path: Path, model: nn.Module):
    with Recorder(tmp_path, iterations=1, scores=()) as recorder, instrument(model, "linear_mxfp8", recorder):
        model(torch.randn(4, 32)).sum().backward()
        recorder.step()
    with Catalog.open(tmp_path) as catalog:
        weights = catalog.tensors().query("tensor_name == 'weight' and operation == 'forward'")
        assert catalog.refused == [] and len(weights) == len(NAMES)


def test_the_parent_is_the_module_that_contains_it():
    model = nn.Sequential(Dotted(*NAMES), Dotted("b"))
    modules = dict(model.named_modules())
    assert {parent_of(modules, f"0.{name}") for name in NAMES} == {("0", name) for name in NAMES}
    assert parent_of(modules, "1.b") == ("1", "b") and parent_of(modules, "1") == ("", "1")
    assert layer_number(modules, "0.blocks.0.fc2") is None
    modules["0"].layer_number = 7
    assert layer_number(modules, "0.blocks.0.fc2") == 7


def test_two_modules_of_one_path_are_refused():
    model = Dotted("a.b")
    model.a = Dotted("b")
    with pytest.raises(InstrumentError, match=r"two modules of Dotted have the path 'a\.b'.*rename one"):
        with instrument(model, "mxfp8"):
            pass
