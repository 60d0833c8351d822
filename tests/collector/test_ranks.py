"""Several ranks: tensor, sequence and data parallelism against a single rank, by the model and by the command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from scipy.stats import kurtosis

from binade.data.index.catalog import Catalog, CatalogError
from binade.data.run.directory import RankStatus, list_runs, rank_statuses
from binade.data.run.losses import read_losses
from binade.data.run.store import process_start
from binade.data.run.tensor_kinds import Other, tensor_names
from binade.data.words.filter import Filter
from tests.collector import ranks_worker
from tests.collector.forked import forked, ranks_of, run_forked
from tests.collector.ranks_worker import CASES, Case
from tests.conftest import MadeOnce, ended, run_python, start_binade, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(made_once: MadeOnce) -> Path:
    """What ranks_worker saves, on one rank and on two."""

    def make(where: Path) -> None:
        assert forked(lambda: ranks_worker.main(where), {}, *ranks_of(where / "store", 2)) == [0, 0, 0]

    return made_once("ranks trained", make)


def joined(parts: list[torch.Tensor], axis: int, stride: int) -> torch.Tensor:
    """The ranks' parts as one; with stride 2 each is (gate, up) one after the other."""
    halves = [part.chunk(stride, axis) for part in parts]
    return torch.cat([halves[rank][half] for half in range(stride) for rank in range(len(parts))], axis)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_train_as_one(trained: Path, case: Case):
    one = torch.load(trained / f"{case.single.name}.pt", weights_only=True)
    two = [torch.load(trained / f"{case.name} rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert two[0]["losses"] == two[1]["losses"]
    assert two[0]["losses"] == pytest.approx(one["losses"], rel=1e-6)  # float32 sums in another order
    assert one["losses"][1] < one["losses"][0]
    for name, whole in one["gradients"].items():
        parts = [rank["gradients"][name] for rank in two]
        if name in two[0]["divided"]:
            assert sum(p.numel() for p in parts) == whole.numel()
            got = joined(parts, *two[0]["divided"][name])
        else:
            assert torch.equal(*parts), f"{name} differs between the ranks"
            got = parts[0]
        assert (got - whole).norm() <= 5e-6 * whole.norm(), name
    for name in one["weights"]:
        if name not in two[0]["divided"]:
            assert torch.equal(two[0]["weights"][name], two[1]["weights"][name]), name


@pytest.mark.parametrize("model", ["llama32-1b", "deepseek2_lite"])
def test_what_is_divided(trained: Path, model: str):
    divided = torch.load(trained / f"{Case(model, tp=2).name} rank0.pt", weights_only=True)["divided"]
    assert any(name.endswith("linear_fc1.weight") and how == (0, 2) for name, how in divided.items())
    assert any(name.endswith("linear_proj.weight") and how == (1, 1) for name, how in divided.items())
    assert not any("router" in name or "kv_down" in name for name in divided)


# The command line

OPTIONS = (
    "--layers", "1", "--micro-batch-size", "1", "--sequence-length", "64",
    "--backend", "torch", "--scores", "mxfp4", "--control-iter", "2",
)  # fmt: skip
ABSENT = {"router_load", *tensor_names(Other.NEWTON_SCHULZ)}
EVERY = ("--tensors", ",".join(name for name in tensor_names() if name not in ABSENT))


@pytest.fixture(scope="module")
def runs(root_once: MadeOnce) -> Path:
    """A root with a run on one rank, one on two tensor-parallel ranks and one on two replicas, started by torchrun."""
    return root_once("runs on ranks", run_on_ranks)


def run_on_ranks(root: Path) -> None:
    assert run_forked(root, *OPTIONS, *EVERY) == 0
    assert run_forked(root, *OPTIONS, *EVERY, "--tp", "2", "--sequence-parallel", ranks=2) == 0
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "binade")
    done = run_python(*torchrun, "run", *OPTIONS, *EVERY, "--dp", "2", "--tensor-save-dir", root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("iteration 1 ") == 1  # rank 0 speaks for all


@pytest.fixture(scope="module")
def catalog(runs: Path) -> Iterator[Catalog]:
    with Catalog.open(runs) as catalog:
        yield catalog


def test_losses_of_the_command(runs: Path):
    one, tensor, data = ([line["loss"] for line in read_losses(run.directory)] for run in list_runs(runs)[0])
    assert tensor == pytest.approx(one, rel=2e-3)  # partial sums are rounded to bfloat16 before they are added
    assert len(data) == 2 and data[0] != one[0]  # twice the data


def test_each_rank_writes_its_own_segments(runs: Path):
    one, tensor, data = list_runs(runs)[0]
    for run in (tensor, data):
        assert {name[:6] for name in run.segments} == {"rank00", "rank01"}
        assert run.status.state == "done"
        assert (
            run.status.tensors == 2 * one.status.tensors == sum(rank.tensors for rank in rank_statuses(run.directory))
        )
        assert run.status.bytes == sum(path.stat().st_size for path in run.directory.glob("tensors/*/*.pt"))


@pytest.mark.thorough
def test_merged_ranks_are_the_ranks_together(runs: Path, catalog: Catalog, tmp_path: Path):
    options = (*OPTIONS, "--tensors", "input,weight,grad_input,master_weight")
    assert run_forked(tmp_path, *options, "--dp", "2", "--merge-ranks", "on", ranks=2) == 0
    (run,), data = list_runs(tmp_path)[0], list_runs(runs)[0][2].run_id
    assert {name[:6] for name in run.segments} == {"rank00"} and run.status.bytes == 0
    with Catalog.open(tmp_path) as merged:
        rows = merged.tensors()
        keys = ["iteration", "module", "tensor_name"]
        assert not rows.duplicated(keys).any() and set(rows["tensor_name"]) == set(options[-1].split(","))
        for row in rows.itertuples():
            same = Filter(run_id=[data], iteration=[row.iteration], module=[row.module], tensor_name=[row.tensor_name])
            parts = [catalog.load(each).flatten().double() for each in catalog.tensors(same)["tensor_id"]]
            if "weight" in row.tensor_name:
                assert torch.equal(*parts)
                parts = parts[:1]
            x = torch.cat(parts).numpy()
            assert row.numel == x.size and row.absmax == abs(x).max()
            assert row.kurtosis == pytest.approx(kurtosis(x, fisher=False), rel=1e-5)
            assert merged.distribution(tensor_ids=[row.tensor_id])["count"].sum() == x.size


def test_what_tensor_parallel_ranks_have_in_common_is_merged_once(runs: Path, catalog: Catalog, tmp_path: Path):
    options = (*OPTIONS, "--tensors", "weight,norm_input,logits")
    assert run_forked(tmp_path, *options, "--tp", "2", "--merge-ranks", "on", ranks=2) == 0
    one = catalog.tensors(Filter(run_id=[list_runs(runs)[0][0].run_id], tensor_name=["weight"], iteration=[0]))
    with Catalog.open(tmp_path) as merged:
        rows = merged.tensors(Filter(iteration=[0])).groupby("tensor_name")
        assert sorted(rows.get_group("weight")["numel"]) == sorted(one["numel"])
        ((logits, norm),) = zip(
            rows.get_group("logits")["shape"], rows.get_group("norm_input")["shape"][:1], strict=True
        )
        assert [*logits[:2]] == [*norm[1::-1]] and logits[-1] == 384


def test_rows_tell_rank_and_shard(runs: Path, catalog: Catalog):
    one, tensor, data = (run.run_id for run in list_runs(runs)[0])
    rows = catalog.tensors(Filter(run_id=[tensor], module=["fc1"], tensor_name=["weight"], iteration=[0]))
    assert rows["rank"].tolist() == rows["tp_rank"].tolist() == [0, 1]
    assert rows["tp_size"].tolist() == [2, 2] and rows["dp_rank"].tolist() == [0, 0]
    assert set(rows["shard"]) == {"slice"} and set(rows["shard_stride"]) == {2}
    rows = catalog.tensors(Filter(run_id=[data], module=["fc1"], tensor_name=["weight"], iteration=[0]))
    assert rows["dp_rank"].tolist() == [0, 1] and rows["tp_size"].tolist() == [1, 1]
    assert set(catalog.tensors(Filter(run_id=[one]))["shard"]) == {"whole"}


@pytest.mark.thorough
def test_the_unsharded_tensor_is_the_one_ranks(runs: Path, catalog: Catalog):
    one, tensor, _ = (run.run_id for run in list_runs(runs)[0])
    words = ["module", "operation", "phase", "tensor_name"]
    whole = catalog.tensors(Filter(run_id=[one], iteration=[0])).set_index(words)["tensor_id"]
    parts = catalog.tensors(Filter(run_id=[tensor], iteration=[0], rank=[1])).set_index(words)
    assert sorted(whole.index) == sorted(parts.index) and set(parts["shard"]) == {"whole", "slice", "partial"}
    for key, row in parts.iterrows():
        expected, got = catalog.load(whole[key]), catalog.unsharded(row["tensor_id"])
        if key[-1] == "update_ratio":  # of the part of each row that the rank has
            continue
        assert got.shape == expected.shape and got.dtype == expected.dtype, key
        if key[-1] == "update":  # of the first step: about the learning rate times the sign of the gradient
            continue
        if (key[0] == "qkv" and key[1] == "forward") or key[-1] in ("weight", "norm_gain"):
            assert torch.equal(got, expected), key
        else:  # behind a sum of two partial results in bfloat16, whose ulp is up to 2^-7
            ulps = 2 if key[-1] == "exp_avg_sq" else 1
            assert (got.float() - expected.float()).norm() <= ulps * 2**-7 * expected.float().norm(), key


@pytest.mark.thorough
def test_a_batch_on_two_ranks_of_which_one_records(command, tmp_path: Path):
    """Ranks leave one run for the next at different times."""
    options = ("--quantization", "bf16,mxfp8", "--tp", "2", "--ranks", "1", "--max-bytes", "3M")
    assert command("batch", *OPTIONS, *options) == 0
    runs = list_runs(tmp_path / "runs")[0]
    assert [run.status.state for run in runs] == ["done", "done"]
    for run in runs:
        assert {name[:6] for name in run.segments} == {"rank01"}
        assert 2e6 < run.status.bytes < 3 << 20 and run.status.tensors_without_raw  # the budget is all its own
    with Catalog.open(tmp_path / "runs") as catalog:
        assert set(catalog.tensors()["rank"]) == {1}
        row = catalog.tensors(Filter(module=["fc1"], tensor_name=["weight"])).iloc[0]
        with pytest.raises(CatalogError, match="tensor-parallel rank 0 was not recorded"):
            catalog.unsharded(row["tensor_id"])


# Ends of a run on two ranks


def start(root: Path) -> tuple[subprocess.Popen, Path]:
    """Two ranks that train for a long time: the launcher, once an iteration has been recorded, and the run."""
    endless = ("--control-iter", "5000", "--no-raw", "--tp", "2", "--tensor-save-dir", root)
    launcher = start_binade("run", *OPTIONS, *endless, stdout=subprocess.DEVNULL)

    def recorded() -> bool:
        assert launcher.poll() is None, launcher.communicate()[1]
        runs = list_runs(root)[0]
        return bool(runs) and len(runs[0].segments) >= 4 and len(rank_statuses(runs[0].directory)) == 2

    try:
        until(recorded, "an iteration of both ranks")
    except AssertionError:
        launcher.kill()
        raise
    return launcher, list_runs(root)[0][0].directory


def alive(rank: RankStatus) -> bool:
    return process_start(rank.pid) == rank.pid_started


def end_of_ranks(directory: Path) -> None:
    ranks = rank_statuses(directory)
    assert len(ranks) == 2
    until(lambda: not any(map(alive, ranks)), "the ranks to end")


@pytest.mark.thorough
def test_cancelling_ends_every_rank(tmp_path: Path):
    """By Ctrl-C; jobs are cancelled by SIGTERM, and a rank dies, in test_jobs."""
    launcher, directory = start(tmp_path)
    launcher.send_signal(signal.SIGINT)
    done = ended(launcher)
    assert (done.returncode, done.stderr) == (130, "binade: cancelled; what was recorded is kept\n")
    end_of_ranks(directory)
    assert list_runs(tmp_path)[0][0].status.state == "cancelled"


@pytest.mark.thorough
def test_no_state_is_shown_before_the_launcher_has_decided(tmp_path: Path):
    """Rank 0 ends because it is asked to, rank 1 because rank 0 is gone: which of them was first the launcher knows."""
    launcher, directory = start(tmp_path)
    os.kill(launcher.pid, signal.SIGSTOP)
    os.kill(rank_statuses(directory)[0].pid, signal.SIGTERM)
    try:
        end_of_ranks(directory)
        status = list_runs(tmp_path)[0][0].status
    finally:
        os.kill(launcher.pid, signal.SIGCONT)
    assert launcher.wait(120) == 1
    assert (status.state, status.reason) == ("running", None)
    assert list_runs(tmp_path)[0][0].status.state == "failed"


@pytest.mark.thorough
def test_ranks_do_not_outlive_their_launcher(tmp_path: Path):
    """Nor has the run ended while one of them lives, and rank 0, which misses the other before it looks for the
    launcher, does not blame it."""
    launcher, directory = start(tmp_path)
    first, second = rank_statuses(directory)
    os.kill(first.pid, signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    until(lambda: not alive(second), "rank 1 to end")
    assert list_runs(tmp_path)[0][0].status.state == "running"
    os.kill(first.pid, signal.SIGCONT)
    end_of_ranks(directory)
    status = list_runs(tmp_path)[0][0].status
    assert (status.state, status.reason) == ("failed", "the process that started the ranks has exited")


@pytest.mark.thorough
def test_a_rank_that_cannot_write_is_named(tmp_path: Path):
    """Rank 1's segment cannot be published: a file is in its way. Until then ranks listen on loopback alone."""
    launcher, directory = start(tmp_path)
    pids = (launcher.pid, *(rank.pid for rank in rank_statuses(directory)))
    addresses = [address for pid in pids for address in listening(pid)]
    assert addresses and set(addresses) == {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}
    while True:  # in the place of a file that is replaced again and again
        (directory / "ranks" / "rank01.json").unlink(missing_ok=True)
        with suppress(FileExistsError):
            (directory / "ranks" / "rank01.json").mkdir()
            break
    done = ended(launcher)
    assert done.returncode == 1 and done.stderr.startswith("binade: the run failed: rank 1: Is a directory")
    assert list_runs(tmp_path)[0][0].status.reason.startswith("rank 1: Is a directory")


def listening(pid: int) -> list[str]:
    """The addresses, as the kernel writes them, of the sockets that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "3"), "--tp is 3: it must divide llama32-1b tiny's 8 heads"),
        (("--tp", "4"), "--tp is 4: it must divide llama32-1b tiny's 2 KV groups"),
        (("--model", "deepseek2_lite", "--tp", "16"), "--tp is 16: it must divide deepseek2_lite tiny's 8 heads"),
        (("--sequence-parallel",), "--sequence-parallel splits sequences among tensor-parallel ranks: it needs --tp 2"),
        (
            ("--tp", "2", "--sequence-parallel", "--sequence-length", "33"),
            "--sequence-length is 33: --sequence-parallel",
        ),
        (("--tp", "0"), "--tp is 0: it must be 1 or more"),
        (("--tp", "2", "--ranks", "0,2"), "--ranks has 2: the ranks of the run are 0 to 1"),
        (("--dp", "-1"), "--dp is -1: it must be 1 or more"),
    ],
)
def test_impossible_ranks(command, capsys, tmp_path: Path, options: tuple[str, ...], message: str):
    assert command("run", *options) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"binade: {message}") and said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("tp", "rank", "size", "message"),
    [
        ("2", "0", "3", "--tp 2 times --dp 1 is 2 ranks, but torchrun started 3"),
        ("1", "0", "x", "the environment's WORLD_SIZE is 'x'"),
        ("1", "", "1", "the environment's RANK is ''"),
        ("1", "1", "1", "RANK is 1"),
    ],
)
def test_torchrun_with_another_number_of_ranks(
    command, capsys, monkeypatch, tmp_path: Path, tp: str, rank: str, size: str, message: str
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    assert command("run", "--backend", "torch", "--tp", tp) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"binade: {message}")
    assert said.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_run_json_holds_the_ranks(runs: Path):
    _, tensor, data = list_runs(runs)[0]
    assert json.loads((tensor.directory / "run.json").read_text())["tp"] == 2
    assert data.config["dp"] == 2 and data.config["tp"] == 1
