"""Tensor parallelism: two gloo ranks in two processes against nn.Linear on one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from binade.collector.models.parallel import ColumnParallelLinear, RowParallelLinear, copy_to_ranks
from binade.collector.models.site import Site
from binade.collector.ranks import RankGroup
from tests.collector.forked import forked, ranks_of

pytestmark = pytest.mark.slow
RANKS = 2
INPUTS, MIDDLE, OUTPUTS = 24, 64, 40


def work(where: Path) -> None:
    """Each rank: its chunks of the weights, the same input; saves what it sees."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{where}/store", rank=rank, world_size=RANKS)
    given = torch.load(where / "given.pt", weights_only=True)
    group = RankGroup(dist.group.WORLD)
    first = ColumnParallelLinear(Site(1, "fc1"), INPUTS, MIDDLE, group)
    second = RowParallelLinear(Site(1, "fc2"), MIDDLE, OUTPUTS, group)
    first.weight.data.copy_(given["w1"].chunk(2)[rank])
    second.weight.data.copy_(given["w2"].chunk(2, 1)[rank])
    x = given["x"].clone().requires_grad_()
    h = first(x)
    h.retain_grad()
    y = second(torch.relu(h))
    before = given["grad"].clone()
    y.backward(given["grad"])
    assert torch.equal(before, given["grad"])
    seen = {"h": h.detach(), "dh": h.grad, "y": y.detach(), "dx": x.grad}
    (of_square,) = torch.autograd.grad(copy_to_ranks(x, group).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):  # autograd does not see the sum over the ranks
        of_square.sum().backward()
    torch.save(seen | {"dw1": first.weight.grad, "dw2": second.weight.grad}, where / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, list[dict]]:
    where = tmp_path_factory.mktemp("ranks")
    generator = torch.Generator().manual_seed(0)
    given = {
        "x": torch.randn(5, 3, INPUTS, generator=generator),
        "w1": torch.randn(MIDDLE, INPUTS, generator=generator),
        "w2": torch.randn(OUTPUTS, MIDDLE, generator=generator),
        "grad": torch.randn(5, 3, OUTPUTS, generator=generator),
    }
    torch.save(given, where / "given.pt")
    assert forked(lambda: work(where), *ranks_of(where / "store", RANKS)) == [0, 0]
    return given, [torch.load(Path(where) / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def whole(two_ranks) -> dict[str, torch.Tensor]:
    """The same on one rank, in nn.Linear."""
    given, _ = two_ranks
    first, second = nn.Linear(INPUTS, MIDDLE, bias=False), nn.Linear(MIDDLE, OUTPUTS, bias=False)
    first.weight.data.copy_(given["w1"])
    second.weight.data.copy_(given["w2"])
    x = given["x"].clone().requires_grad_()
    h = first(x)
    h.retain_grad()
    y = second(torch.relu(h))
    y.backward(given["grad"])
    return {"h": h, "dh": h.grad, "y": y, "dx": x.grad, "dw1": first.weight.grad, "dw2": second.weight.grad}


@pytest.mark.parametrize(
    ("name", "axis"),
    [("h", -1), ("dh", -1), ("y", None), ("dx", None), ("dw1", 0), ("dw2", 1)],
    ids=["column forward", "row dX", "row forward", "column dX", "column dW", "row dW"],
)
def test_two_ranks_agree_with_one(two_ranks, whole, name, axis):
    parts = [rank[name] for rank in two_ranks[1]]
    if axis is None:
        assert torch.equal(*parts)
        torch.testing.assert_close(parts[0], whole[name], rtol=1e-5, atol=1e-5)
    else:
        assert all(part.shape[axis] * RANKS == whole[name].shape[axis] for part in parts)
        torch.testing.assert_close(torch.cat(parts, axis), whole[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_one_rank_is_the_identity(kind):
    layer = kind(Site(1, "fc1"), 12, 20)
    nn.init.normal_(layer.weight)
    assert layer.weight.shape == (20, 12)
    x = torch.randn(4, 12)
    torch.testing.assert_close(layer(x), x @ layer.weight.t())


def test_a_bf16_input_uses_the_master_weight_in_bf16():
    layer = ColumnParallelLinear(Site(1, "fc1"), 12, 20)
    nn.init.normal_(layer.weight)
    x = torch.randn(4, 12).bfloat16()
    y = layer(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, x @ layer.weight.detach().bfloat16().t())
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
