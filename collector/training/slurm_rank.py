"""binade as one task of a Slurm job: translates the variables that Slurm sets into those that torchrun sets."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Sequence

from binade.cli import main


def run_rank(argv: Sequence[str]) -> int:
    """The exit status of the command."""
    if "SLURM_PROCID" not in os.environ:
        print("binade: slurm_rank is for tasks of srun: use binade --launcher slurm", file=sys.stderr)
        return 2
    job, ranks, nodes = (int(os.environ[f"SLURM_{name}"]) for name in ("JOB_ID", "NTASKS", "JOB_NUM_NODES"))
    os.environ |= {
        "MASTER_ADDR": first_host(os.environ.get("SLURM_JOB_NODELIST", "")) or socket.gethostname(),
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(ranks // nodes),
    }
    os.environ.setdefault("MASTER_PORT", str(20_000 + job % 40_000))  # jobs on the same node need different ones
    # One core per task unless the job requested more; torch would use all that it sees.
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    if nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other machine takes part
    return main(argv)


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation: node07 of node[07-09,12],other."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", nodes)
    assert first  # the pattern matches an empty text
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0])


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1:]))
