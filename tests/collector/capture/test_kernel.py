"""Products seen in kernels: losses, weights and recorded tensors against the same training with the adapters, and
against plain modules where the adapters refuse a model.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from binade.collector import instrument
from binade.collector.capture.adapters.layer import InstrumentError
from tests.collector.instrumented import Recorder, rows, same, state, train

pytestmark = pytest.mark.slow

PLACE = ["iteration", "micro_batch", "layer_index", "module", "expert", "operation", "phase", "quant_type"]
PLACE = [*PLACE, "tensor_name", "layer_type"]
WIDTH = 32


class Block(nn.Module):
    """A residual block with a linear layer with a bias, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Strided(Block):
    """Its first layer gets an input that is not contiguous, to which torch adds the bias later."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Checkpointed(Block):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Copied(Block):
    """As many tokens as outputs, and what autograd saves is copied, as where it is kept on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)
        self.square = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
            return super().forward(self.square(x))


class Attention(nn.Module):
    """Heads that share keys and values, and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return x + F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2)


class ReentrantAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attention, x, use_reentrant=True)


class Written(nn.Module):
    """Products with its own weights: a cast, an expanded weight, and one on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.cast = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.cast.to(x.dtype)).relu()
        return torch.bmm(x, self.weight[None].expand(len(x), -1, -1))


class Left(Written):
    def forward(self, x: Tensor) -> Tensor:
        return x + (self.weight @ x.flatten(0, -2).t()).t().reshape(x.shape) + F.linear(x, self.cast)


class Experts(nn.Module):
    """Stacked experts, each of which gets all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, WIDTH, 64) / 6), nn.Parameter(torch.randn(3, 64, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(1, -1, WIDTH).expand(3, -1, -1)
        return x + self.experts(tokens).sum(0).view(x.shape)

    def experts(self, tokens: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(tokens, self.up).relu(), self.down)


class Listed(Experts):
    def experts(self, tokens: Tensor) -> Tensor:
        return torch.stack([(tokens[i] @ self.up[i]).relu() @ self.down[i] for i in range(3)])


class Grouped(Experts):
    """The second expert gets no tokens."""

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([4, 4, len(x.flatten(0, -2))], dtype=torch.int32)
        hidden = F.grouped_mm(x.flatten(0, -2).bfloat16(), self.up.bfloat16(), offs=ends).relu()
        return x + F.grouped_mm(hidden, self.down.bfloat16(), offs=ends).view(x.shape).to(x.dtype)


class Shared(nn.Module):
    """Two layers with one weight, of which one runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.first(x)).relu())


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight.t()).relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad * (x @ weight.t() > 0)
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class InFunction(nn.Module):
    """A product in a custom autograd function, whose backward method computes it again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + Product.apply(x, self.weight)


class InModule(InFunction):
    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight.t()).relu()


class ByEinsum(InFunction):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("bsk,nk->bsn", x, self.weight).relu()


class ComputedAgain(InFunction):
    """A function whose backward method differentiates the product that it computes again."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return (x @ weight.t()).relu()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            saved = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            with torch.enable_grad():
                y = (saved[0] @ saved[1].t()).relu()
            return torch.autograd.grad(y, saved, grad)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.Again.apply(x, self.weight)


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def squares(model: nn.Module, micro_batch: int) -> Tensor:
    torch.manual_seed(micro_batch)
    return model(torch.randn(2, 8, WIDTH)).float().square().mean()


def of_leaf(model: nn.Module, micro_batch: int) -> Tensor:
    torch.manual_seed(micro_batch)
    return model(torch.randn(2, 8, WIDTH).requires_grad_()).square().mean()


def under_autocast(model: nn.Module, micro_batch: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return squares(model, micro_batch)


Loss = Callable[[nn.Module, int], Tensor]


def on_another_thread(loss: Tensor) -> None:
    """A backward pass as on an accelerator, for which autograd has a thread."""
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def trained(root: Path, block: type[nn.Module], recipe: str, loss: Loss, **options: Any) -> tuple[list, pd.DataFrame]:
    torch.manual_seed(0)
    model = Stack(block)
    before = state(model)
    with Recorder(root) as recorder, instrument(model, recipe, recorder, **options):
        results = train(model, loss, micro_batches=2)
    after = state(model)
    assert {name: list(of_module) for name, of_module in after.items()} == {name: list(d) for name, d in before.items()}
    return results, rows(root)


def test_a_linear_layer_whose_product_is_not_seen_is_named() -> None:
    class Vector(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.mv(self.weight, x)

    model = nn.Sequential(Vector(WIDTH, WIDTH), Vector(WIDTH, WIDTH))
    with instrument(model, "mxfp8", products="kernel"):
        with pytest.warns(UserWarning, match=r"0 and 1 more \(Vector\) multiplies where products="):
            model(torch.randn(WIDTH))
        with pytest.raises(InstrumentError, match="already instrumented"):
            instrument(model, "mxfp8").__enter__()


def assert_same(adapters: pd.DataFrame, kernel: pd.DataFrame, kind: str = "") -> None:
    """The same tensors were recorded, as often and in the same order, with the same values."""
    if kind == "checkpoints, autocast":  # of which the adapters record some tensors twice
        adapters = adapters.drop_duplicates(PLACE)
    numbered = [found.assign(call=found.groupby(PLACE, dropna=False).cumcount()) for found in (adapters, kernel)]
    both = numbered[0].merge(numbered[1], "outer", [*PLACE, "call"], indicator=True)
    assert set(both["_merge"]) == {"both"}
    for left, right in zip(both["tensor_x"], both["tensor_y"], strict=True):
        assert torch.equal(left, right.view(left.shape) if kind == "weight on the left" else right)


KINDS = {
    "linear layers": (Block, squares),
    "autocast": (Block, under_autocast),
    "input not contiguous": (Strided, squares),
    "checkpoints": (Checkpointed, squares),
    "checkpoints, autocast": (Checkpointed, under_autocast),
    "reentrant checkpoints": (Reentrant, of_leaf),
    "copied saved tensors": (Copied, squares),
    "attention": (Attention, squares),
    "attention in a reentrant checkpoint": (ReentrantAttention, of_leaf),
    "cast and expanded weights": (Written, squares),
    "cast weights, autocast": (Written, under_autocast),
    "weight on the left": (Left, squares),
    "experts": (Experts, squares),
    "experts in a loop": (Listed, squares),
    "grouped experts": (Grouped, squares),
    "shared weights": (Shared, squares),
}


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_changes_no_bit(tmp_path: Path, kind: str) -> None:
    block, loss = KINDS[kind]
    torch.manual_seed(0)
    expected = train(Stack(block), loss, micro_batches=2)
    results, kernel = trained(tmp_path / "kernel", block, "bf16", loss, products="kernel")
    assert same(expected, results)
    if kind != "cast weights, autocast":  # of which the adapters change bits
        assert_same(trained(tmp_path / "adapters", block, "bf16", loss)[1], kernel, kind)


CASES = [(kind, "nvfp4(rounding=stochastic)") for kind in KINDS]
CASES += [("linear layers", "fp8_e4m3(history=4)"), ("checkpoints", "fp8_e4m3(history=4)")]
CASES += [("linear layers", "deepseek_v3"), ("attention", "FA_linear_mxfp8")]
CASES += [("attention in a reentrant checkpoint", "FA_linear_mxfp8")]


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_as_with_the_adapters(tmp_path: Path, kind: str, recipe: str) -> None:
    block, loss = KINDS[kind]
    expected, adapters = trained(tmp_path / "adapters", block, recipe, loss)
    results, kernel = trained(tmp_path / "kernel", block, recipe, loss, products="kernel")
    assert same(expected, results)
    assert_same(adapters, kernel, kind)


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4(rounding=stochastic)"])
@pytest.mark.parametrize("block", [Block, Checkpointed, Reentrant])
def test_backward_passes_on_other_threads(tmp_path: Path, block: type[nn.Module], recipe: str) -> None:
    """After two forward passes, of which each is computed again on a thread of its own."""
    results = []
    for name, backward in (("kernel", on_another_thread), ("adapters", Tensor.backward)):
        torch.manual_seed(0)
        model, options = Stack(block), {"products": name} if name == "kernel" else {}
        with Recorder(tmp_path / name) as recorder, instrument(model, recipe, recorder, **options):
            for loss in [of_leaf(model, micro_batch) for micro_batch in range(2)]:
                backward(loss)
        results.append(([p.grad for p in model.parameters()], rows(tmp_path / name)))
    assert same(results[0][0], results[1][0])
    assert_same(results[1][1], results[0][1])


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4(rounding=stochastic)"])
@pytest.mark.parametrize("block", [InFunction, ComputedAgain, ByEinsum])
def test_as_a_plain_product(tmp_path: Path, block: type[nn.Module], recipe: str) -> None:
    expected, adapters = trained(tmp_path / "adapters", InModule, recipe, of_leaf)
    results, kernel = trained(tmp_path / "kernel", block, recipe, of_leaf, products="kernel")
    assert same(expected, results)
    assert_same(adapters, kernel)
    with pytest.raises(InstrumentError, match="no layer to instrument"):
        trained(tmp_path / "refused", block, recipe, squares)


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
FAMILIES = {"Llama": {}, "Mixtral": {"num_local_experts": 4, "num_key_value_heads": 2}, "GPT2": {}, "Bert": {}}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_as_with_the_adapters(family: str, attention: str) -> None:
    def gradients(products: Any) -> list[Tensor]:
        torch.manual_seed(0)
        options = SIZES | FAMILIES[family] | {"attn_implementation": attention}
        model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**options))
        with instrument(model, "FA_linear_mxfp8", products=products):
            y = model(torch.arange(32).view(2, 16)).last_hidden_state
            y.square().mean().backward()
        return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*neither rounded nor recorded.*")
        assert same(gradients({}), gradients("kernel"))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["tensor parallel", "fully sharded"])
def test_distributed_layers_as_plain_ones(mesh: DeviceMesh, kind: str) -> None:
    """A mesh of one rank: all products have DTensors or gathered weights, and whole operands."""

    def gradients(distribute: bool, **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = Stack(Block)
        for block in model.layers if distribute else ():
            if kind == "tensor parallel":
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            else:
                fully_shard(block, mesh=mesh)
        with instrument(model, "mxfp8", **options):
            squares(model, 0).backward()
        found: list[Any] = [p.grad for p in model.parameters()]
        return [x.full_tensor() if distribute else x for x in found]

    assert same(gradients(False), gradients(True, products="kernel"))
