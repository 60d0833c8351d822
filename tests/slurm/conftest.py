"""A real Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd on loopback.

Everything lies in the test's own directory and listens on free ports; nothing touches /etc/slurm. The nodes are named
n1 and n2. slurmd runs in a mount namespace of its own, where /etc/hosts says that these names are this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import until

NEEDED = ("sbatch", "srun", "slurmctld", "slurmd", "munged", "unshare")
# JobAcctGather ends what takes more memory than it requested: cgroups, which do it elsewhere, may be missing here.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,sched_min_interval=0
SchedulerType=sched/builtin
KillWait=5
CompleteWait=0
SlurmdTimeout=6
MessageTimeout=5
TCPTimeout=2
ReturnToService=2
MpiDefault=none
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2 RealMemory=16000
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=60 State=UP DefMemPerCPU=4000
"""


def free_ports() -> list[int]:
    """Three ports, the last two in a row, as slurm.conf wants those of the nodes."""
    for first in range(17_100, 30_000, 7):
        with ExitStack() as held:
            try:
                for port in range(first, first + 3):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return [first, first + 1, first + 2]
    raise AssertionError("no free ports")


@dataclass
class Cluster:
    """folder: configuration, logs and state; nodes: the slurmd of each node."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self.folder / "daemons.log", "ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.started.append(process)
        return process

    def start_node(self, name: str) -> None:
        inside = (
            f'mount --bind "{self.folder}/hosts" /etc/hosts && exec slurmd -D -f "{self.folder}/slurm.conf" -N {name}'
        )
        self.nodes[name] = self.start("unshare", "--mount", "--propagation", "private", "sh", "-c", inside)

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster, with both nodes idle; SLURM_CONF names it for as long as it lives."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        pytest.skip(f"a cluster needs {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("slurmd needs root and a mount namespace")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 n1 n2\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, ports=free_ports()))
    found = Cluster(folder)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        munge = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munged.log"}
        munge |= {"seed-file": "munge.seed"}
        files = [f"--{option}={folder / name}" for option, name in munge.items()]
        found.start("munged", "--force", "--foreground", "--num-threads=1", *files)
        until(lambda: (folder / "munge.sock").exists(), "munged", 20)
        found.start("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for name in ("n1", "n2"):
            found.start_node(name)
        deadline = time.monotonic() + 60
        while "idle" not in (state := sinfo()) or "," in state:
            assert time.monotonic() < deadline, f"{state}\n{found.logs()}"
            time.sleep(0.2)
        yield found
    finally:
        for process in reversed(found.started):  # the nodes first: each waits for its jobs' processes
            _end(process)
        os.environ.pop("SLURM_CONF")
        if before is not None:
            os.environ["SLURM_CONF"] = before


def sinfo() -> str:
    """The states of the nodes, each once."""
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%t"], capture_output=True, text=True, timeout=60)
    return ",".join(sorted(set(done.stdout.split())))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
