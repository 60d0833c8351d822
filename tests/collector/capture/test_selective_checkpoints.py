"""Selective checkpoints save results by operation and return them in order when a block is computed again. Recording
must not change that order: gradients are those of torch, bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from binade import Recorder, instrument

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default
Decide = Callable[[Any, int], bool]  # given the operation, and how many the policy was asked about before
POLICIES: dict[str, Decide] = {
    "products": lambda op, number: op in PRODUCTS,
    "torchtitan": lambda op, number: op in PRODUCTS | {SDPA, aten.max.default, aten.amax.default},
    "alternate": lambda op, number: number % 2 == 0,
    "third": lambda op, number: number % 3 == 1,
    "but gelu": lambda op, number: op not in (aten.gelu.default, aten.native_layer_norm.default),
    "clones": lambda op, number: op in PRODUCTS | {aten.clone.default, aten._to_copy.default, aten.empty_like.default},
    "views": lambda op, number: op in (aten.view.default, aten.t.default, aten.sum.default, aten.abs.default),
    "everything": lambda op, number: True,
    "nothing": lambda op, number: False,
}


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, policy: str = "", prefers: bool = False) -> None:
        super().__init__()
        self.layers, self.policy, self.prefers = nn.ModuleList(Block() for _ in range(2)), policy, prefers

    def contexts(self) -> Any:
        numbers = Counter[bool]()

        def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            save = POLICIES[self.policy](op, numbers[ctx.is_recompute])
            numbers[ctx.is_recompute] += 1
            if self.prefers:
                return CheckpointPolicy.PREFER_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts) if self.policy else block(x)
        return x


def gradients(model: Model, root: Path | None, recipe: str = "bf16", tensors: Any = None) -> list[Tensor]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn(2, 16, 32, requires_grad=True)
    if root is None:
        model(x).square().mean().backward()
    else:
        with Recorder(root, label="x", iterations=1) as recorder, instrument(model, recipe, recorder):
            model(x).square().mean().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.sampled
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefers", [False, True], ids=["must", "prefer"])
def test_gradients_under_bf16_are_those_of_torch(tmp_path: Path, policy: str, prefers: bool) -> None:
    expected = gradients(Model(), None)
    assert all(map(torch.equal, gradients(Model(policy, prefers), None), expected))
    assert all(map(torch.equal, gradients(Model(policy, prefers), tmp_path), expected))


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", ["mxfp8", "nvidia_nvfp4", "te_delayed", "FA_linear_mxfp4"])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_under_a_recipe_are_those_without_checkpoints(tmp_path: Path, policy: str, recipe: str) -> None:
    expected = gradients(Model(), tmp_path / "plain", recipe)
    assert all(map(torch.equal, gradients(Model(policy), tmp_path / "given", recipe), expected))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not aten.detach.default:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_callers_modes_see_the_operations_of_the_model_alone(tmp_path: Path) -> None:
    model, x = Model(), torch.ones(2, 16, 32)
    with Operations() as plain:
        model(x)
    recorder = Recorder(tmp_path, label="x", iterations=1)
    with recorder, instrument(model, "bf16", recorder), Operations() as seen:
        model(x)
    assert seen.names == plain.names
