"""Backward passes that run in parts, twice, or over passes that are computed again: each product is recorded once, and
its operands enter the histories of delayed scaling once. Expected: what one backward pass after another records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from binade import Catalog, Filter, Recorder, instrument
from tests.collector.instrumented import BOTH_WAYS

WORDS = ["iteration", "micro_batch", "layer_index", "tensor_name"]


class Model(nn.Module):
    """Three layers, as they are, or in checkpoints: flat or nested, each reentrant or not."""

    def __init__(self, checkpoints: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.kind, *ways = checkpoints.split() or [""]
        self.reentrant = [way == "reentrant" for way in ways]

    def block(self, number: int, x: Tensor) -> Tensor:
        return x + F.gelu(self.layers[number](x))

    def first_two(self, x: Tensor) -> Tensor:
        for number in range(2):
            x = checkpoint(self.block, number, x, use_reentrant=self.reentrant[1])
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "nested":
            return self.block(2, checkpoint(self.first_two, x, use_reentrant=self.reentrant[0]))
        for number in range(3):
            again = self.kind == "flat"
            x = checkpoint(self.block, number, x, use_reentrant=self.reentrant[0]) if again else self.block(number, x)
        return x


def losses(model: Model, batches: Sequence[Tensor]) -> list[Tensor]:
    return [model(x).square().mean() for x in batches]


def one_after_the_other(model: Model, batches: Sequence[Tensor]) -> None:
    for x in batches:
        model(x).square().mean().backward()


def after_all_forward_passes(model: Model, batches: Sequence[Tensor]) -> None:
    for loss in losses(model, batches):
        loss.backward()


def from_the_last(model: Model, batches: Sequence[Tensor]) -> None:
    for loss in reversed(losses(model, batches)):
        loss.backward()


def of_the_sum(model: Model, batches: Sequence[Tensor]) -> None:
    torch.stack(losses(model, batches)).sum().backward()


def twice(model: Model, batches: Sequence[Tensor]) -> None:
    for x in batches:
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        loss.backward()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient


def in_parts(model: Model, batches: Sequence[Tensor]) -> None:
    for x in batches:
        loss, parameters = model(x).square().mean(), list(model.parameters())
        torch.autograd.grad(loss, [x], retain_graph=True)
        for some in (parameters[:2], parameters[2:]):
            for parameter, gradient in zip(some, torch.autograd.grad(loss, some, retain_graph=True), strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def without_bubbles(model: Model, batches: Sequence[Tensor]) -> None:
    """As ScheduleZBVZeroBubble: gradients of inputs first, those of weights later."""
    groups = []
    for x, loss in zip(batches, losses(model, batches), strict=True):
        groups.append(stage_backward_input([loss], None, [x], iter(model.parameters()))[1])
    for of_batch in groups:
        stage_backward_weight(iter(model.parameters()), of_batch)


Backward = Callable[[Model, Sequence[Tensor]], None]


def train(
    root: Path, recipe: str, backward: Backward, checkpoints: str, products: Any
) -> tuple[pd.Series, dict[str, Tensor], Tensor]:
    """The largest magnitude of each recorded tensor, the histories of delayed scaling, and the weights after two steps
    of two micro-batches."""
    torch.manual_seed(0)
    model, recorder = Model(checkpoints), Recorder(root, label="x", iterations=2, scores=(), measures=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder, instrument(model, recipe, recorder, products=products):
        for _ in range(2):
            backward(model, [torch.randn(8, 32).requires_grad_() for _ in range(2)])
            optimizer.step()
            optimizer.zero_grad()
    rows = Catalog.open(root).tensors(Filter())
    (run,) = (path for path in root.iterdir() if path.is_dir())
    histories = {name: x for file in run.glob("delayed_scales*") for name, x in load_file(file).items()}
    absmax = rows.set_index(WORDS)["absmax"].sort_index()
    return absmax, histories, torch.cat([p.detach().flatten() for p in model.parameters()])


CHECKPOINTS = ("flat not", "flat reentrant", "nested not not", "nested reentrant not", "nested not reentrant",
               "nested reentrant reentrant")  # fmt: skip
PARTIAL = (in_parts, without_bubbles)  # which reentrant checkpoints of torch do not support
REFUSED = r"Checkpointing is not compatible|is incompatible with \.grad\(\)|Failed to run stage backward"  # by torch
# What is the same, up to the order in which backward passes enter the histories.
LIKE: dict[Backward, Backward] = {
    after_all_forward_passes: after_all_forward_passes,
    without_bubbles: after_all_forward_passes,
    from_the_last: from_the_last,
    of_the_sum: from_the_last,
}


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", ["bf16", "te_delayed"])
@pytest.mark.parametrize("checkpoints", ["", *CHECKPOINTS], ids=lambda text: text or "none")
@pytest.mark.parametrize(
    "backward",
    [one_after_the_other, after_all_forward_passes, from_the_last, of_the_sum, twice, in_parts, without_bubbles],
    ids=lambda backward: backward.__name__.replace("_", "-"),
)
@BOTH_WAYS
def test_a_product_is_counted_once(
    tmp_path: Path, recipe: str, backward: Backward, checkpoints: str, products: Any
) -> None:
    if backward in PARTIAL and "reentrant" in checkpoints:
        with pytest.raises(RuntimeError, match=REFUSED):
            train(tmp_path, recipe, backward, checkpoints, products)
        return
    absmax, histories, weights = train(tmp_path / "plain", recipe, LIKE.get(backward, one_after_the_other), "", {})
    given, given_histories, given_weights = train(tmp_path / "given", recipe, backward, checkpoints, products)
    pd.testing.assert_series_equal(given, absmax, rtol=1e-6)
    assert bool(histories) == (recipe != "bf16")
    assert given_histories.keys() == histories.keys()
    for name, history in histories.items():
        torch.testing.assert_close(given_histories[name], history)
    torch.testing.assert_close(given_weights, weights)
