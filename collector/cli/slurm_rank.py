"""binade slurm-rank, one task of a Slurm job: turns the variables that Slurm sets into those that torchrun sets."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from binade.collector.cli.train import collect
from binade.collector.errors import ConfigError, TimeLimitError, raising
from binade.collector.training.plan import plan
from binade.terminal import Command, resolve_root


def _run(directory: Path) -> None:
    """Train a queued run. DIRECTORY is that of the run."""
    from binade.collector.jobs.directory import Job
    from binade.data.run.directory import JOB_FILE
    from binade.data.run.json_files import read_json
    from binade.data.run.run_writer import RUN_VARIABLE

    if "SLURM_PROCID" not in os.environ:
        raise ConfigError("slurm-rank is for tasks of srun: use binade run --target NAME")
    signal.signal(signal.SIGUSR1, _end_in_time)
    number, ranks, nodes = (int(os.environ[f"SLURM_{name}"]) for name in ("JOB_ID", "NTASKS", "JOB_NUM_NODES"))
    with raising(ConfigError, f"{directory / JOB_FILE} cannot be read", OSError, ValueError):
        job = read_json(Job, directory / JOB_FILE)
    os.environ |= {
        RUN_VARIABLE: os.path.realpath(directory),
        "MASTER_ADDR": first_host(os.environ.get("SLURM_JOB_NODELIST", "")) or socket.gethostname(),
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(ranks // nodes),
    }
    os.environ.setdefault("MASTER_PORT", str(20_000 + number % 40_000))  # jobs on the same node need different ones
    # One core per task unless the job requested more; torch would use all that it sees.
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    if nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other machine takes part
    if job.config is None:
        raise ConfigError(f"{directory / JOB_FILE} has no configuration of a run")
    collect([plan(job.config)], resolve_root(None))


def _end_in_time(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise TimeLimitError("the job came near its time limit: what was recorded is kept")


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation: node07 for node[07-09,12],other."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", nodes)
    assert first  # the pattern always matches, possibly an empty text
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0])


slurm_rank = Command(
    "slurm-rank",
    params=[click.Argument(["directory"], type=Path)],
    callback=_run,
    hidden=True,
    cancelled="cancelled; what was recorded is kept",
    failed="the run failed",
)
