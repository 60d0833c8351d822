"""Watched statistics of several ranks are those of the concatenated tensors."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from binade.collector import Recorder, instrument
from binade.collector.capture.reduction import reduced
from binade.data.catalog import Catalog
from binade.data.segment import Shard
from tests.data.builder import row

COLUMNS = ("numel", "zeros", "absmax", "min", "max", "rms", "std", "mean", "sqnr_db", "flush_to_zero", "saturated")


def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 64, generator=random)
    spread = normal * torch.logspace(-6, 6, 64)[:, None]
    odd = spread.clone()
    odd[3, :7], odd[40, 5], odd[:10, 8] = 0.0, torch.nan, torch.inf
    half = torch.cat((torch.full((32, 64), torch.nan), normal[:32]))
    return {"normal": normal, "spread": spread, "odd": odd, "half": half, "zeros": torch.zeros(64, 64)}


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("fmt", ["mxfp4", None])
def test_parts_have_the_statistics_of_the_whole(name: str, fmt: str | None):
    x = tensors()[name]
    whole = row("run", 9, x, None, format=fmt)
    parts = [
        replace(row("run", rank, part, None, format=fmt, rank=rank), shard=Shard(replica=rank))
        for rank, part in enumerate(x.split((16, 48)))
    ]
    (found,) = reduced(parts)
    assert found.shape == (64, 64) and found.identity.rank in (0, 1)
    expected = asdict(whole.summary) | (asdict(whole.error) if whole.error else {})
    given = asdict(found.summary) | (asdict(found.error) if found.error else {})
    for key in set(expected) - {"bins", "counts"}:
        assert given[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-12, nan_ok=True), key
    worst = parts[found.identity.rank]
    if fmt and not math.isnan(worst.error.sqnr_db):
        assert worst.error.sqnr_db == min(p.error.sqnr_db for p in parts if not math.isnan(p.error.sqnr_db))


def test_what_ranks_have_in_common_counts_once():
    x = tensors()["normal"]
    ranks = [(n, row("run", n, x, None, tensor_name="output", rank=n)) for n in range(2)]
    copies = [replace(each, shard=Shard(n, 2)) for n, each in ranks]
    ranks = [(n, row("run", n, x, None, tensor_name="weight", rank=n)) for n in range(2)]
    weights = [replace(each, shard=Shard(replica=n)) for n, each in ranks]
    assert [found.summary.numel for found in reduced([*copies, *weights])] == [x.numel(), x.numel()]


def test_each_call_of_a_module_has_its_row():
    parts = tensors()["normal"].chunk(4)
    rows = [replace(row("run", n, x, None, rank=n // 2), shard=Shard(replica=n // 2)) for n, x in enumerate(parts)]
    first, second = reduced(rows)
    assert first.summary.absmax == float(torch.cat((parts[0], parts[2])).abs().max())
    assert second.summary.absmax == float(torch.cat((parts[1], parts[3])).abs().max())


def train(root: Path, x: torch.Tensor, watch: str | None = "every 2 steps") -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    with Recorder(root, watch=watch, iterations=0, ring=1) as recorder, instrument(model, "mxfp8", recorder):
        for _ in range(4):
            model(x).square().sum().backward()
            recorder.step()


def batch() -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def _rank(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
    train(directory / "ranks", batch().chunk(2)[rank])
    train(directory / "first", batch(), None if rank else "every 2 steps")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_write_what_one_would(tmp_path: Path):
    torch.multiprocessing.start_processes(_rank, (tmp_path,), nprocs=2, start_method="fork")
    train(tmp_path / "one", batch())
    keys = ["iteration", "layer_index", "module", "tensor_name"]
    tables = []
    for root in ("ranks", "one", "first"):  # first: only one of two ranks watches
        with Catalog.open(tmp_path / root) as catalog:
            table = catalog.tensors()
            tables.append(table[table["tensor_name"] != "grad_weight"].set_index(keys).sort_index())
    found, expected, first = tables
    assert first.index.equals(expected.index)
    assert expected.index.is_unique
    assert found.index.equals(expected.index) and set(found.index.get_level_values(0)) == {0, 2}
    for name in COLUMNS:
        assert found[name].tolist() == pytest.approx(expected[name].tolist(), rel=1e-5, abs=1e-7, nan_ok=True), name
    assert found["shape"].map(list).tolist() == expected["shape"].map(list).tolist()
