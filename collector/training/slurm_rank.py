"""binade as one task of a Slurm job: translates the variables that Slurm sets into those that torchrun sets.

Its argument is the directory of the job in the queue, whose job.json has the command line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from binade.cli import main
from binade.collector.cli.options import job_arguments
from binade.collector.errors import TimeLimitError


def run_rank(argv: Sequence[str]) -> int:
    """The exit status of the command."""
    if "SLURM_PROCID" not in os.environ or len(argv) != 1:
        print("binade: slurm_rank is for tasks of srun: use binade run --target NAME", file=sys.stderr)
        return 2
    signal.signal(signal.SIGUSR1, _end_in_time)
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
    directory = Path(argv[0])
    if os.environ["RANK"] == "0":
        from binade.collector.jobs.processes import Process, host
        from binade.collector.jobs.slurm import RankProcess
        from binade.data.json_files import write_json

        write_json(directory / "rank.json", RankProcess(host(), Process.current()))
    return main(job_arguments(json.loads((directory / "job.json").read_text())["arguments"]))


def _end_in_time(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise TimeLimitError("the job came near its time limit: what was recorded is kept")


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation: node07 for node[07-09,12],other."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", nodes)
    assert first  # the pattern always matches, possibly an empty text
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0])


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1:]))
