"""Training loops that call parts of a model: passes, iterations and data are those of the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from binade.collector import instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.data.run.directory import list_runs
from tests.collector.instrumented import Recorder, rows, same

RECIPE = "linear_mxfp4(rounding=stochastic)"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.ReLU(), nn.Linear(32, 32)))
        self.out = nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.embed(tokens)))

    def in_parts(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.embed(tokens)))

    def in_layers(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.body:
            x = layer(x)
        return self.out(x)


class Step(nn.Module):
    """As a LightningModule: its `training_step` calls the network, and nothing calls its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Model()

    def training_step(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


def tokens_of(number: int) -> Tensor:
    return torch.randint(50, (8,), generator=torch.Generator().manual_seed(number))


def train(root: Path, kind: type[nn.Module], run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    with Recorder(root, iterations=3) as recorder, instrument(model, RECIPE, recorder, backend="torch"):
        for step in range(3):
            for micro_batch in range(2):
                loss = run(model, tokens_of(2 * step + micro_batch)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            recorder.log(loss=loss)
    return losses


PARTS = {
    "parts": (Model, Model.in_parts),
    "layers": (Model, Model.in_layers),
    "lightning": (Step, Step.training_step),
    "directly": (Step, lambda model, tokens: model.net.in_layers(tokens)),
}
WORDS = ["iteration", "micro_batch", "module", "operation", "tensor_name"]


@pytest.mark.thorough
@pytest.mark.parametrize("how", PARTS)
def test_a_pass_in_parts_is_one_of_the_whole_model(tmp_path: Path, how: str):
    whole = train(tmp_path / "whole", Model, lambda model, tokens: model(tokens))
    assert same(whole, train(tmp_path / how, *PARTS[how]))  # with the same random numbers
    expected, found = (rows(tmp_path / name).sort_values(WORDS) for name in ("whole", how))
    assert expected[WORDS].values.tolist() == found[WORDS].values.tolist()
    assert same(expected["tensor"], found["tensor"])
    lines = []
    for name in ("whole", how):
        (run,) = list_runs(tmp_path / name)[0]
        lines.append([json.loads(line) for line in (run.directory / "loss.jsonl").read_text().splitlines()])
    data = [[{key: value for key, value in line.items() if "data" in key} for line in of_run] for of_run in lines]
    assert data[0] == data[1] and len(set(map(str, data[0]))) == 3


def test_a_part_that_is_called_again_begins_a_pass_and_evaluations_have_their_own(tmp_path: Path):
    torch.manual_seed(0)
    model = Model()
    with Recorder(tmp_path, evaluation=True) as recorder, instrument(model, RECIPE, recorder, backend="torch"):
        for number in range(2):  # two passes with one backward pass
            (model.in_parts(tokens_of(0)) if number else model.in_layers(tokens_of(0))).sum()
        with torch.no_grad():
            model.in_parts(tokens_of(0))
        model.in_parts(tokens_of(0)).sum().backward()
    found = rows(tmp_path, values=False, tensor_name="output", module="out")
    assert found[["operation", "micro_batch"]].values.tolist() == [
        ["forward", 0],
        ["forward", 1],
        ["evaluation", 0],
        ["forward", 2],
    ]


def test_a_part_that_cannot_be_intercepted_is_refused_when_it_is_called():
    class Sly(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,oi->bo", x, self.weight)

    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": Sly(8, 8)})
    with instrument(model, "mxfp8", backend="torch"):
        x = model["a"](torch.randn(4, 8))
        with pytest.raises(InstrumentError, match=r"b \(Sly\) did not multiply"):
            model["b"](x)
    assert not model["a"]._forward_hooks and not model["a"]._forward_pre_hooks


def test_a_loop_of_accelerate_counts_iterations(tmp_path: Path):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(module := Model(), torch.optim.AdamW(module.parameters()))
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        for number in range(4):
            with accelerator.accumulate(model):
                hidden = accelerator.unwrap_model(model).body(module.embed(tokens_of(number)))
                accelerator.backward(F.mse_loss(module.out(hidden), torch.zeros(8, 16)))
                optimizer.step()
                optimizer.zero_grad()
    found = rows(tmp_path, values=False, tensor_name="grad_weight", module="out")
    assert found[["iteration", "micro_batch"]].values.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
