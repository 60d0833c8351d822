"""The options of --launcher slurm: the machines that a job requests from the cluster."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from binade.collector.training.config import ConfigError, RunConfig

LAUNCHERS = ("local", "slurm")
# As sbatch reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
TIME = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}|UNLIMITED")
NAMES = re.compile(r"[\w.,:@/+-]+")


@dataclass(frozen=True)
class SlurmOptions:
    """The machines of one job: ranks_per_node ranks on each node. None leaves a choice to the cluster."""

    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """How the ranks are started. None of it is a part of the run."""
    start = parser.add_argument_group("how it is started", "All but --launcher are for --launcher slurm.")
    start.add_argument("--launcher", default="local", help=f"{', '.join(LAUNCHERS)} (a job on a cluster)")
    start.add_argument("--nodes", type=int, metavar="N", help="machines (default: one, or what the ranks take)")
    start.add_argument("--ranks-per-node", type=int, metavar="N", help="(default: the ranks divided among the nodes)")
    start.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs to ask for on each")
    start.add_argument("--partition", metavar="NAME", help="where the job queues")
    start.add_argument("--account", metavar="NAME", help="what it is charged to")
    start.add_argument("--time", metavar="LIMIT", help="as 90 (minutes), 1:30:00 or 2-12:00 (days-hours:minutes)")
    start.add_argument("--dry-run", action="store_true", help="print what would be done, operand by operand")


def slurm_options(given: argparse.Namespace, config: RunConfig) -> SlurmOptions | None:
    """What the command line requests from the cluster; None with --launcher local. Raises ConfigError."""
    if given.launcher not in LAUNCHERS:
        raise ConfigError(f"launcher {given.launcher!r} is unknown: {', '.join(LAUNCHERS)}")
    if given.launcher == "local":
        for name in SlurmOptions.__dataclass_fields__:
            if getattr(given, name) is not None:
                raise ConfigError(f"{_option(name)} is for --launcher slurm: add that, or leave {_option(name)} out")
        return None
    for name in ("nodes", "ranks_per_node", "gpus_per_node"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(f"{_option(name)} is {value}: it must be 1 or more")
    for name in ("partition", "account"):
        value = getattr(given, name)
        if value is not None and not NAMES.fullmatch(value):
            raise ConfigError(f"{_option(name)} {value!r} is no name: letters, digits and . , : @ / + - _ make one")
    if given.time is not None and not TIME.fullmatch(given.time):
        raise ConfigError(f"--time {given.time!r} is no limit: write 90 (minutes), 1:30:00 or 2-12:00")
    nodes, ranks_per_node = _divided(config, given.nodes, given.ranks_per_node)
    if config.device == "cuda" and given.gpus_per_node is not None and given.gpus_per_node < ranks_per_node:
        raise ConfigError(
            f"--gpus-per-node is {given.gpus_per_node}, but a node has {ranks_per_node} ranks and each takes a GPU: "
            "raise it, or --nodes"
        )
    return SlurmOptions(nodes, ranks_per_node, given.gpus_per_node, given.partition, given.account, given.time)


def _divided(config: RunConfig, nodes: int | None, ranks_per_node: int | None) -> tuple[int, int]:
    """Nodes and ranks per node; the one that is not given follows from the other."""
    ranks = config.world_size
    requested = f"--tp {config.tp} times --dp {config.dp} is {ranks} ranks"
    if nodes is not None and ranks_per_node is not None and nodes * ranks_per_node != ranks:
        raise ConfigError(
            f"{requested}, --nodes {nodes} times --ranks-per-node {ranks_per_node} is {nodes * ranks_per_node}: "
            "make them equal"
        )
    option, divisor = ("--ranks-per-node", ranks_per_node) if nodes is None else ("--nodes", nodes)
    if divisor is not None and ranks % divisor:
        raise ConfigError(f"{requested}, which {option} {divisor} does not divide: every node has as many ranks")
    if nodes is None:
        nodes = ranks // (ranks_per_node or ranks)
    return nodes, ranks // nodes


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
