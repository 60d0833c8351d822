"""What the tests of instrumented models share: the exact state of a model, training, and what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from binade import collector, quant
from binade.data.index.catalog import Catalog

Recorder = partial(collector.Recorder, scores=())  # these tests look at values: scores would take a third of their time

LINEAR = {"input", "weight", "output", "grad_output", "grad_input", "grad_weight"}
CORE = {
    *("query", "key", "value", "attention_scores", "attention_probs", "output"),
    *("grad_output", "grad_scores", "grad_query", "grad_key", "grad_value"),
}
FORWARD_LINEAR = {"input", "weight", "output"}
BOTH_WAYS = pytest.mark.parametrize("products", [{}, "kernel"], ids=["adapters", "kernels"])  # to see products


def state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Every attribute of every module by identity; of dictionaries (parameters, hooks, children) what they hold."""
    return {
        name: {
            key: list(value.items()) if isinstance(value, dict) else id(value) for key, value in vars(module).items()
        }
        for name, module in model.named_modules()
    }


Loss = Callable[[nn.Module, int], Tensor]  # of a model, on the micro-batch of that number


def train(model: nn.Module, loss: Loss, steps: int = 2, micro_batches: int = 1, after: Callable = lambda: None) -> list:
    """Losses and, at the end, every weight: what must not change by a bit. `after` is called after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            value = loss(model, micro_batch)
            (value / micro_batches).backward()
            losses.append(value.detach())
        optimizer.step()
        after()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def same(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rows(root: Path, *, values: bool = True, **words: Any) -> pd.DataFrame:
    """The rows of what was recorded that have these words, with their values, if kept, in a column `tensor`."""
    with Catalog.open(root) as catalog:
        found = catalog.tensors()
        for word, value in words.items():
            found = found[found[word] == value]
        return found.assign(tensor=[catalog.load(each).clone() for each in found["tensor_id"]]) if values else found


def names(found: pd.DataFrame) -> dict[tuple[int, str], dict[str, int]]:
    """By layer and module, how often each tensor name was recorded."""
    counted: dict[tuple[int, str], dict[str, int]] = {}
    for row in found.itertuples():
        of_module = counted.setdefault((row.layer_index, row.module), {})
        of_module[row.tensor_name] = of_module.get(row.tensor_name, 0) + 1
    return counted


def value(found: pd.DataFrame, layer: int, module: str, name: str, **words: Any) -> Tensor:
    """The one tensor of that layer, module and name."""
    chosen = found[(found.layer_index == layer) & (found.module == module) & (found.tensor_name == name)]
    for word, wanted in words.items():
        chosen = chosen[chosen[word] == wanted]
    (tensor,) = chosen["tensor"]
    return tensor


def rounded(x: Tensor, fmt: str, dim: int = -1) -> Tensor:
    return quant.fake_quantize(x, fmt, dim=dim, backend="torch")


def linear_products(
    found: pd.DataFrame, layer: int, module: str, bias: Tensor | float | None = None, **words: Any
) -> None:
    """Assert that a linear layer's three results are those of its recorded operands, rounded to MXFP8."""

    def of(name: str) -> Tensor:
        return value(found, layer, module, name, **words)

    x, w, dy = of("input"), of("weight"), of("grad_output")
    y = rounded(x, "mxfp8") @ rounded(w, "mxfp8").t()
    assert torch.equal(of("output"), y if bias is None else y + bias)
    assert torch.equal(of("grad_input"), rounded(dy, "mxfp8_e5m2") @ rounded(w, "mxfp8", 0))
    tokens = rounded(dy.flatten(0, -2), "mxfp8_e5m2", 0).t()
    assert torch.equal(of("grad_weight"), tokens @ rounded(x.flatten(0, -2), "mxfp8", 0))


def score_products(found: pd.DataFrame, layer: int, scale: float, **words: Any) -> None:
    """Assert that the recorded scores are those of the recorded query and key, rounded to MXFP8, and so the context."""

    def of(name: str) -> Tensor:
        return value(found, layer, "core", name, **words)

    query, key = rounded(of("query"), "mxfp8"), rounded(of("key"), "mxfp8")
    assert torch.equal(of("attention_scores"), (query @ key.mT) * scale)
    context = rounded(of("attention_probs"), "mxfp8") @ rounded(of("value"), "mxfp8", -2)
    assert torch.equal(of("output"), context)
    dprobs_operand = rounded(of("grad_output"), "mxfp8_e5m2", -2)
    assert torch.equal(of("grad_value"), rounded(of("attention_probs"), "mxfp8", -2).mT @ dprobs_operand)
