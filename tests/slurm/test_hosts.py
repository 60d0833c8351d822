"""torchrun on two hosts: two network namespaces of this machine that a pair of virtual interfaces connects."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from binade.data.index.catalog import Catalog
from binade.data.run.directory import list_runs, rank_statuses
from tests.conftest import PROJECT, until

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

NAMES = {f"binade-{os.getpid()}-{letter}": f"10.213.77.{number}" for number, letter in enumerate("ab", 1)}
LINKS = {name: f"bd{os.getpid()}{name[-1]}" for name in NAMES}
FIRST = NAMES[next(iter(NAMES))]
SMALL = ("--layers", "1", "--sequence-length", "32", "--backend", "torch", "--scores", "", "--no-raw", "--tp", "2")


@pytest.fixture(scope="module", autouse=True)
def hosts() -> Iterator[None]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip: apt-get install iproute2")
    first, second = NAMES
    steps = [
        *(f"ip netns add {name}" for name in NAMES),
        f"ip link add {LINKS[first]} netns {first} type veth peer name {LINKS[second]} netns {second}",
        *(f"ip -n {name} address add {address}/24 dev {LINKS[name]}" for name, address in NAMES.items()),
        *(f"ip -n {name} link set {device} up" for name in NAMES for device in ("lo", LINKS[name])),
    ]
    try:
        for step in steps:
            done = subprocess.run(step.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"this machine makes no network namespaces: {done.stderr.strip()}")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def start(root: Path, log: Path, *arguments: str) -> list[subprocess.Popen[bytes]]:
    """torchrun on both hosts, each with a host name of its own."""
    started = []
    for number, name in enumerate(NAMES):
        rendezvous = f"--nnodes 2 --node-rank {number} --nproc-per-node 1 --master-addr {FIRST} --master-port 29500"
        command = [sys.executable, "-m", "torch.distributed.run", *rendezvous.split(), "-m", "binade", "run"]
        command += [*SMALL, *arguments, "--tensor-save-dir", str(root)]
        named = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": LINKS[name]}
        with open(f"{log}{number}", "ab") as output:
            started.append(
                subprocess.Popen([*named, *command], cwd=PROJECT, env=environment, stdout=output, stderr=output)
            )
    return started


def end(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        kill(process)
        process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """With every process that it has started."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            each.send_signal(signal.SIGKILL)


def test_the_rows_of_both_hosts_arrive(tmp_path: Path):
    root, log = tmp_path / "runs", tmp_path / "log"
    started = start(root, log)
    try:
        assert [process.wait(200) for process in started] == [0, 0], Path(f"{log}0").read_text()
    finally:
        end(started)
    (run,), refused = list_runs(root)
    assert run.status.state == "done" and not refused
    assert [rank.host for rank in rank_statuses(run.directory)] == list(NAMES)
    with Catalog.open(root) as catalog:
        ranks = list(catalog.tensors()["rank"])
    assert set(ranks) == {0, 1} and len(ranks) == run.status.tensors


@pytest.mark.parametrize("unplugged", [False, True], ids=["killed", "unplugged"])
def test_the_loss_of_a_host_ends_the_run_with_its_reason(tmp_path: Path, unplugged: bool):
    root, log = tmp_path / "runs", tmp_path / "log"
    started = start(root, log, "--control-iter", "1000000", "--capture-every", "100000")
    second = list(NAMES)[1]
    link = ["ip", "-n", second, "link", "set", LINKS[second]]
    try:
        until(lambda: any(run.status.iteration >= 0 for run in list_runs(root)[0]), "an iteration", 200)
        if unplugged:  # gloo waits for the other host without noticing
            subprocess.run([*link, "down"], check=True)
            assert started[1].wait(200) != 0
        else:
            kill(started[1])
        assert started[0].wait(200) != 0
    finally:
        end(started)
        subprocess.run([*link, "up"], check=True)
    (run,), _ = list_runs(root)
    assert (run.status.state, run.status.tensors > 0) == ("failed", True)
    assert "lost the connection to another rank" in run.status.reason
