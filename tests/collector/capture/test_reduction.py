"""Rows of several ranks as one: what it says is what the concatenated tensors say."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from binade.collector import Merge, Recorder, Watch, instrument
from binade.collector.capture.reduction import reduced
from binade.collector.models.parallel import RowParallelLinear
from binade.collector.models.site import Site
from binade.collector.ranks import RankGroup, Ranks
from binade.data.index.catalog import Catalog
from binade.data.run.columns import Shard
from binade.data.words.filter import Filter
from binade.quant import fake_quantize
from tests.conftest import MadeOnce
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
    bins, counts = np.unique(x[x.isfinite()].numpy().view(np.uint32) >> 20, return_counts=True)
    assert found.summary.bins.tolist() == bins.tolist() and found.summary.counts.tolist() == counts.tolist()
    for name in ("mxfp4", "hifp8") if fmt else ():
        (score,) = (each for each in found.scores if each.format == name)
        q, kept = fake_quantize(x, name), x.isfinite()
        noise = float((q - x)[kept].double().square().sum())
        assert score.error.mse * kept.sum().item() == pytest.approx(noise, rel=1e-6, nan_ok=True)
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


def test_partial_sums_are_not_called_whole():
    """The rms of the parts together is 1; that of the tensor, which is their sum, is the square root of 2."""
    random = torch.Generator().manual_seed(1)
    halves = torch.randn(2, 64, 64, generator=random)
    parts = [
        replace(row("run", n, x, None, tensor_name="output", rank=n), shard=Shard(n, 2, "partial"))
        for n, x in enumerate(halves)
    ]
    (found,) = reduced(parts)
    assert found.summary.rms == pytest.approx(float(halves.double().square().mean().sqrt()), rel=1e-6)
    assert float(halves.double().sum(0).square().mean().sqrt()) == pytest.approx(math.sqrt(2), rel=0.05)
    assert found.shard == Shard(found.identity.rank, 2, "partial") and found.shape[1:] == (64,)


def test_each_call_of_a_module_has_its_row():
    parts = tensors()["normal"].chunk(4)
    rows = [replace(row("run", n, x, None, rank=n // 2), shard=Shard(replica=n // 2)) for n, x in enumerate(parts)]
    first, second = reduced(rows)
    assert first.summary.absmax == float(torch.cat((parts[0], parts[2])).abs().max())
    assert second.summary.absmax == float(torch.cat((parts[1], parts[3])).abs().max())


def test_the_blocks_of_replicas_add():
    x = tensors()["normal"]
    parts = []
    for rank, part in enumerate(x.chunk(2)):
        made = row("run", rank, part, None, format="mxfp4", rank=rank)
        blocks = {"sqnr_db": (np.array([3, 5 + rank], np.int16), np.array([2, 10]))}
        scores = [replace(each, blocks=blocks) for each in made.scores]
        parts.append(replace(made, scores=scores, shard=Shard(replica=rank)))
    (found,) = reduced(parts)
    for each in found.scores:
        bins, counts = each.blocks["sqnr_db"]
        assert (bins.tolist(), counts.tolist()) == ([3, 5, 6], [4, 10, 10])
    same = [replace(part, identity=replace(part.identity, tensor_name="weight")) for part in parts]
    (found,) = reduced(same)
    assert found.summary == same[0].summary
    (found,) = reduced([parts[0], replace(parts[1], scores=parts[1].scores[:1])])
    assert [each.format for each in found.scores] == [parts[0].scores[0].format]


@pytest.mark.parametrize("broken", ["absmax", "error", "nan", None])
def test_a_replica_that_stands_out_keeps_its_row(broken: str | None):
    random = torch.Generator().manual_seed(0)
    parts = [torch.randn(32, 64, generator=random) for _ in range(5)]
    if broken == "absmax":
        parts[3] *= 30
    elif broken == "nan":
        parts[3][5, 5] = torch.nan
    rows = [
        replace(row("run", rank, x, None, format="mxfp4", rank=rank), shard=Shard(replica=rank))
        for rank, x in enumerate(parts)
    ]
    if broken == "error":
        rows[3] = replace(rows[3], error=replace(rows[3].error, sqnr_db=1.0))
    found = reduced(rows, keep_outlying=True)
    assert [each.identity.rank for each in found[:-1]] == ([3] if broken else [])
    assert sum(each.summary.numel for each in found) == 5 * 2048


def test_slices_are_merged_where_a_replica_has_all_of_them():
    slices = tensors()["normal"].chunk(4)
    shards = [Shard(index, 2, "slice", 0, replica=replica) for replica in range(2) for index in range(2)]
    rows = [replace(row("run", n, slices[n], None, rank=n), shard=shards[n]) for n in range(4)]
    (found,) = reduced(rows)
    assert found.shape == (64, 64) and found.shard == Shard()
    *rest, one = reduced(rows[:3])
    assert one.shape == (32, 64) and rest == [rows[2]]


def train(root: Path, x: torch.Tensor, watch: str | None = "every 2 steps") -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    with Recorder(root, watch=Watch(watch, ring=1), iterations=0) as recorder, instrument(model, "mxfp8", recorder):
        for _ in range(4):
            model(x).square().sum().backward()
            recorder.step()


def record(root: Path, x: torch.Tensor, **options: object) -> None:
    """Two iterations, recorded in full."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    with Recorder(root, iterations=2, scores=("mxfp4",), **options) as recorder, instrument(model, "bf16", recorder):
        for _ in range(3):
            model(x).square().sum().backward()
            recorder.step()


def record_row_parallel(root: Path, rank: int) -> None:
    root.mkdir(exist_ok=True)
    group = RankGroup(dist.group.WORLD)
    layer = RowParallelLinear(Site(1, "fc2"), 64, 32, group)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(rank))
    x = batch()[:, 16 * rank : 16 * rank + 16].repeat(1, 2)
    merge = Merge("on", ranks=Ranks(rank, 2, tensor=group))
    with Recorder(root, iterations=1, merge=merge) as recorder, instrument(layer, "bf16", recorder):
        torch.save(layer(x).detach(), root / f"sum{rank}.pt")


def batch() -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def _rank(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
    train(directory / "ranks", batch().chunk(2)[rank])
    train(directory / "first", batch(), None if rank else "every 2 steps")
    record(directory / "merged", batch().chunk(2)[rank], merge=Merge("on"))
    record(directory / "kept", batch().chunk(2)[rank], merge=Merge("on", unmerged=(1,)))
    record_row_parallel(directory / "partial", rank)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(root_once: MadeOnce) -> Path:
    """What two ranks have recorded."""
    start = torch.multiprocessing.start_processes
    return root_once("reduction", lambda made: start(_rank, (made,), nprocs=2, start_method="fork"))


@pytest.mark.slow
def test_two_processes_write_what_one_would(ranks: Path):
    tmp_path = ranks
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


@pytest.mark.slow
def test_merged_ranks_have_one_row_of_all_values(ranks: Path, tmp_path: Path):
    record(tmp_path, batch())
    keys = ["iteration", "layer_index", "module", "tensor_name"]
    with Catalog.open(ranks / "merged") as merged, Catalog.open(tmp_path) as one:
        found, expected = (each.tensors().set_index(keys).sort_index() for each in (merged, one))
        assert found.index.is_unique and found.index.equals(expected.index)
        assert found["path"].isna().all() and expected["path"].notna().all()
        for key, given in expected.drop("grad_weight", level="tensor_name").iterrows():  # that of each rank is a part
            x = one.load(given["tensor_id"]).double().numpy().ravel()
            statistics = {"mean": x.mean(), "std": x.std(), "absmax": np.abs(x).max(), "zeros": (x == 0).sum()}
            statistics |= {"kurtosis": scipy.stats.kurtosis(x, fisher=False), "skewness": scipy.stats.skew(x)}
            for name, value in statistics.items():
                assert found.loc[key, name] == pytest.approx(value, rel=1e-5, abs=1e-7), (key, name)
            bins, counts = np.unique(x.astype(np.float32).view(np.uint32) >> 20, return_counts=True)
            sketch = merged.distribution(tensor_ids=[found.loc[key, "tensor_id"]]).sort_values("bin")
            assert sketch["bin"].tolist() == bins.tolist() and sketch["count"].tolist() == counts.tolist()
        where = Filter(operation=["forward"])
        scores, wanted = (each.errors("mxfp4", keys, where).set_index(keys) for each in (merged, one))
        for name in ("sqnr_db", "flush_to_zero"):
            assert scores[name].tolist() == pytest.approx(wanted[name].tolist(), rel=1e-5)


@pytest.mark.slow
def test_the_ranks_summands_of_a_result_are_merged_as_partial(ranks: Path):
    whole = torch.load(ranks / "partial" / "sum0.pt", weights_only=True)
    with Catalog.open(ranks / "partial") as catalog:
        found = catalog.tensors().set_index("tensor_name")
    assert found["shard"].to_dict() == {"input": "whole", "weight": "whole", "output": "partial"}
    assert found.index.is_unique and found.loc["output", "numel"] == 2 * whole.numel()
    assert found.loc["output", "rms"] < 0.8 * float(whole.square().mean().sqrt())  # that of the summands


@pytest.mark.slow
def test_unmerged_ranks_keep_rows_and_values(ranks: Path):
    with Catalog.open(ranks / "kept") as catalog:
        rows = catalog.tensors(Filter(tensor_name=["input"], layer_index=[1], iteration=[1])).set_index("rank")
        assert rows.index.tolist() == [0, 1] and rows["path"].isna().tolist() == [True, False]
        assert torch.equal(catalog.load(rows.loc[1, "tensor_id"]), batch().chunk(2)[1])
        assert rows.loc[0, "absmax"] == float(batch().chunk(2)[0].abs().max())
