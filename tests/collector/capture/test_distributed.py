"""Models that torch divides or copies among ranks: DDP, FSDP1, FSDP2, tensor parallelism by DTensor, alone and with
checkpoints, mixed precision and accumulation. Two gloo processes train every case one after the other.

The table in docs/training_code.md has a row for each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from binade.collector import instrument
from binade.collector.capture.adapters.layer import InstrumentError, is_instrumented
from binade.data.index.catalog import Catalog
from tests.collector.forked import forked
from tests.collector.instrumented import CORE, LINEAR, Recorder, linear_products, names, same, score_products
from tests.conftest import MadeOnce

pytestmark = pytest.mark.slow
HIDDEN, HEAD, LENGTH, LAYERS, MICRO_BATCHES, EXPERTS = 64, 16, 8, 2, 2, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, h]
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(HIDDEN), Attention()
        self.up, self.down_proj = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.down_proj(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.t()


class Sparse(nn.Module):
    """transformers' Mixtral, whose routers and experts multiply by weights of their own."""

    def __init__(self) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        super().__init__()
        sizes = {"vocab_size": 50, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
        heads = {"num_attention_heads": HIDDEN // HEAD, "num_key_value_heads": HIDDEN // HEAD}
        self.model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=EXPERTS))

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.model.layers

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


def ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp1(model: nn.Module, mesh: DeviceMesh, orig: bool = False) -> nn.Module:
    one = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=orig)
    for at, block in enumerate(model.blocks):
        model.blocks[at] = one(block)
    return one(model)


def fsdp2(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy or MixedPrecisionPolicy())
    return model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, local: bool = True) -> nn.Module:
    """local: whether attention gets plain tensors."""
    for block in model.blocks:
        columns = {f"attn.{name}_proj": ColwiseParallel(use_local_output=local) for name in "qkv"}
        rows = {name: RowwiseParallel() for name in ("attn.out_proj", "down_proj")}
        parallelize_module(block, mesh["tp"], {**columns, "up": ColwiseParallel(), **rows})
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    for at, block in enumerate(model.blocks):
        model.blocks[at] = checkpoint_wrapper(block)
    return model


@dataclass(frozen=True)
class Case:
    """wrap what is done to the model; tp whether its layers are divided; before whether it is instrumented before that;
    recipe of its quantized run; context of each forward pass; sync False to reduce gradients with the last micro-batch
    only."""

    wrap: Wrap
    model: type[nn.Module] = Decoder
    tp: bool = False
    before: bool = False
    mesh: tuple[int, int] = (2, 1)
    context: Callable[[], Any] = ExitStack
    sync: bool = True
    exact: bool = True  # float32, and its results are those of one process
    plain: bool = True  # torch runs it unquantized on a CPU
    products: Any = field(default_factory=dict)  # how they are seen


TP = {"tp": True, "mesh": (1, 2)}
BFLOAT16 = partial(torch.autocast, "cpu", torch.bfloat16)
CASES = {
    "DDP": Case(ddp),
    "DDP, before": Case(ddp, before=True),
    "DDP, no_sync": Case(ddp, sync=False),
    "DDP, autocast": Case(ddp, context=BFLOAT16, exact=False),
    "FSDP1": Case(fsdp1),
    "FSDP1, use_orig_params, before": Case(partial(fsdp1, orig=True), before=True),
    "FSDP2": Case(fsdp2),
    "FSDP2, before": Case(fsdp2, before=True),
    "FSDP2, bfloat16": Case(partial(fsdp2, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), exact=False),
    "DDP, experts": Case(ddp, Sparse),
    "FSDP1, experts": Case(fsdp1, Sparse),
    "FSDP1, use_orig_params, experts, before": Case(partial(fsdp1, orig=True), Sparse, before=True),
    "FSDP2, experts": Case(fsdp2, Sparse),
    "FSDP2, checkpoint": Case(lambda model, mesh: fsdp2(checkpointed(model), mesh)),
    "TP": Case(tensor_parallel, **TP),
    "TP, before": Case(tensor_parallel, before=True, **TP),
    "TP, DTensors in attention": Case(partial(tensor_parallel, local=False), plain=False, **TP),
    "TP, checkpoint": Case(lambda model, mesh: checkpointed(tensor_parallel(model, mesh)), **TP),
    "TP and FSDP2": Case(lambda model, mesh: fsdp2(tensor_parallel(model, mesh), mesh), **TP),
}
BY_KERNELS = ("DDP", "FSDP1", "FSDP1, experts", "FSDP2, bfloat16", "FSDP2, checkpoint", "TP", "TP and FSDP2")
CASES |= {f"{name}, kernels": replace(CASES[name], products="kernel") for name in BY_KERNELS}


# Of each way to divide a model.
REPRESENTATIVES = (
    *("DDP", "DDP, experts", "TP", "DDP, before", "FSDP1", "FSDP2, checkpoint", "TP and FSDP2"),
    *("FSDP1, kernels", "TP and FSDP2, kernels"),
)


def peer(name: str) -> str:
    """The case that has the same losses."""
    case = CASES[name]
    return "TP" if case.tp else "DDP" if case.model is Decoder else "DDP, experts"


def param(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.thorough] * (name not in REPRESENTATIVES), id=name)


def part(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach().clone()


def train(case: Case, model: nn.Module, rank: int) -> list[Tensor]:
    """Losses of two steps, and this rank's part of every weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for micro_batch in range(MICRO_BATCHES):
            seed = micro_batch + (0 if case.tp else 100 * rank)
            tokens = torch.randint(50, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
            with ExitStack() as contexts:
                if not case.sync and micro_batch == 0:
                    contexts.enter_context(model.no_sync())
                with case.context():
                    logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                (loss / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(part(p) for p in model.parameters())]


def trained(name: str, directory: Path, recipe: str | None, rank: int) -> tuple[list[Tensor], nn.Module]:
    """Of bf16, values are kept of what is divided; of mxfp8, layer 2 is recorded."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("dp", "tp"))
    with ExitStack() as contexts:
        most = 4 << 30 if recipe == "mxfp8" or case.tp else 0
        options = {"config": {"model": name}, "max_bytes": most, "iterations": 1, "micro_batches": 1}
        recorder = contexts.enter_context(Recorder(directory, **options)) if recipe else None
        wrapped = model if case.before else case.wrap(model, mesh)
        if recipe:
            capture = "layer2" if recipe == "mxfp8" else None
            contexts.enter_context(
                instrument(wrapped, recipe, recorder, backend="torch", capture=capture, products=case.products)
            )
        wrapped = case.wrap(model, mesh) if case.before else wrapped
        return train(case, wrapped, rank), wrapped


class Hidden(nn.Module):
    """Computes with a weight of its own, which is intercepted if it is called `weight`."""

    def __init__(self, own: str = "hidden") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.known, self.own = nn.Linear(8, 8), own
        self.register_parameter(own, nn.Parameter(torch.randn(8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.known(x), getattr(self, self.own))


def placed(model: nn.Module) -> nn.Module:
    """Its linear layer's weight is a DTensor, and what comes in is not."""
    weight = distribute_tensor(model.known.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    model.known.weight = nn.Parameter(weight)
    return model


class SplitSequence(nn.Module):
    """Attends to tensors that are divided along the sequence."""

    def __init__(self, _: nn.Module) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", (2,))

    def forward(self, x: Tensor) -> Tensor:
        q = distribute_tensor(x.expand(1, 2, 4, 8), self.mesh, [Shard(2)])
        return F.scaled_dot_product_attention(q, q, q)


class Apart(nn.Module):
    """Multiplies by its part of a DTensor."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...] = (8, 8)) -> None:
        super().__init__()
        self.known = model.known
        self.own = nn.Parameter(distribute_tensor(torch.ones(shape), init_device_mesh("cpu", (2,)), [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        return self.known(x) @ self.own.to_local().mT


def refused(wrap: Callable[[nn.Module], nn.Module]) -> str:
    model = wrap(Hidden())
    with pytest.raises(InstrumentError) as caught, instrument(model, "mxfp8", backend="torch"):
        model(torch.ones(1, 8))
    return str(caught.value)


def with_own_weight(wrap: Callable[[nn.Module], nn.Module]) -> Tensor:
    model = wrap(Hidden("weight"))
    with instrument(model, "mxfp8", backend="torch"):
        return model(torch.linspace(-1, 1, 8).reshape(1, 8)).detach()


def _rank(rank: int, directory: Path, names: Iterable[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
    said: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        quantized, model = trained(name, directory, "mxfp8", rank)
        plain = [trained(name, directory, recipe, rank)[0] if case.plain else [] for recipe in (None, "bf16")]
        said[name] = {
            "same": same(*plain),
            "restored": not any(is_instrumented(module) for module in model.modules()),
            "losses": quantized[: 2 * MICRO_BATCHES],
        }
    flat = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    of_experts = partial(Apart, shape=(4, 8, 8))
    said["refused"] = [refused(wrap) for wrap in (flat, fully_shard, placed, SplitSequence, Apart, of_experts)]
    said["own weight"] = [with_own_weight(wrap) for wrap in (lambda model: model, flat, fully_shard)]
    torch.save(said, directory / f"said{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(root_once: MadeOnce, request: pytest.FixtureRequest) -> Path:
    """Of the cases that the chosen tests ask for."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = {item.callspec.params["name"] for item in items}
    names = sorted(names | {peer(name) for name in names})
    environments = [{"RANK": str(rank)} for rank in range(2)]

    def make(root: Path) -> None:
        assert forked(lambda: _rank(int(os.environ["RANK"]), root, names), *environments) == [0, 0]

    return root_once("distributed", make)


@pytest.fixture(scope="module")
def said(ranks) -> list[dict[str, Any]]:
    return [torch.load(ranks / f"said{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def single() -> dict[type[nn.Module], list[list[Tensor]]]:
    """The losses of one process, in mxfp8, on each rank's first two micro-batches."""
    alone = Case(lambda model, mesh: model)
    losses: dict[type[nn.Module], list[list[Tensor]]] = {}
    for kind in (Decoder, Sparse):
        for rank in range(2):
            torch.manual_seed(0)
            with instrument(model := kind(), "mxfp8", backend="torch"):
                losses.setdefault(kind, []).append(train(alone, model, rank))
    return losses


@pytest.fixture(scope="module")
def catalog(ranks) -> Iterator[Catalog]:
    with Catalog.open(ranks) as opened:
        yield opened


@pytest.fixture(scope="module")
def tensors(catalog) -> pd.DataFrame:
    return catalog.tensors()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*map(param, CASES)])
def test_trained_recorded_and_quantized(catalog, tensors, said, single, name):
    case = CASES[name]
    found = tensors[(tensors["model"] == name) & (tensors["recipe"] == "mxfp8")]
    for rank in range(2):
        seen = said[rank][name]
        assert seen["same"] and seen["restored"]
        if case.exact:  # before the first update
            given = torch.stack(seen["losses"][:MICRO_BATCHES])
            expected = torch.stack(single[case.model][0 if case.tp else rank][:MICRO_BATCHES])
            assert torch.allclose(given, expected, rtol=1e-6) if case.tp else torch.equal(given, expected)
        of_rank = found[found["rank"] == rank]
        of_experts = of_rank[of_rank["expert"].notna()]
        words = ("q", "k", "v", "proj", *(("up", "fc2") if case.model is Decoder else ("router",)))
        expected = {(2, word): LINEAR for word in words} | {(2, "core"): CORE}
        assert names(of_rank.drop(of_experts.index)) == {each: dict.fromkeys(of, 1) for each, of in expected.items()}
        assert set(of_rank["recomputed"]) == {"checkpoint" in name}
        if case.exact:
            of_rank = of_rank[of_rank["module"].isin(("proj", "core")) | of_rank["expert"].notna()]
            of_rank = of_rank.assign(tensor=[catalog.load(each) for each in of_rank["tensor_id"]])
            assert of_experts.empty == (case.model is Decoder)
            for expert in set(of_experts["expert"]):
                for module in ("fc1", "fc2"):
                    linear_products(of_rank, 2, module, expert=expert)
            linear_products(of_rank, 2, "proj")
            score_products(of_rank, 2, HEAD**-0.5)
    if case.exact:  # the update too
        losses = [torch.stack(said[0][each]["losses"]) for each in (name, peer(name))]
        assert torch.allclose(*losses, rtol=1e-5)
    assert set(found["shard"]) == ({"whole", "slice", "partial"} if case.tp else {"whole"})
    assert set(found["dp_rank"]) == ({0} if case.tp else {0, 1})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [param(name) for name, case in CASES.items() if case.tp and case.plain])
def test_parts_make_the_whole(catalog, tensors, name):
    found = tensors.query("model == @name and recipe == 'bf16' and rank == 0 and layer_index == 1")
    chosen = found[found["module"].isin(("q", "core", "fc2"))]
    of = {(row.module, row.tensor_name): catalog.unsharded(row.tensor_id) for row in chosen.itertuples()}
    for module in ("q", "fc2"):
        x, weight, grad = (of[module, each].flatten(0, -2) for each in ("input", "weight", "grad_output"))
        assert torch.allclose(of[module, "grad_weight"], grad.t() @ x, atol=1e-6)
        assert torch.allclose(of[module, "grad_input"].flatten(0, -2), grad @ weight, atol=1e-6)
    assert of["core", "query"].shape == (2, HIDDEN // HEAD, LENGTH, HEAD)


def test_what_cannot_be_intercepted_is_refused(said):
    flat, sharded, placed, split, apart, of_experts = said[0]["refused"]
    assert "computes a product with a weight [8, 8] by linear" in flat
    assert "computes a product with hidden by linear" in sharded
    assert placed == "known has a DTensor as its weight, and was called with a plain tensor"
    assert split.startswith("the model attends to DTensors placed as")
    assert "computes a product with own by matmul" in apart
    assert of_experts.startswith("the model has a three-dimensional DTensor as its own")


def test_a_weight_of_a_modules_own_is_intercepted_where_fsdp_replaces_it(said):
    for rank in range(2):
        plain, *wrapped = said[rank]["own weight"]
        assert all(torch.equal(plain, each) for each in wrapped)
        assert not torch.allclose(plain, Hidden("weight")(torch.linspace(-1, 1, 8).reshape(1, 8)), rtol=1e-3)
