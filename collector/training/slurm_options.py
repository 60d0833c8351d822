"""How a run is started: by this process, or as a Slurm job on other machines. No torch, no submitit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from binade.collector.errors import ConfigError
from binade.collector.training.config import Device, RunConfig
from binade.collector.training.option import Group, check_options, declared, option

# As sbatch reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
TIME = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}|UNLIMITED")
NAMES = re.compile(r"[\w.,:@/+-]+")
START = Group("How it starts", "All but --launcher and --dry-run need --launcher slurm.")


class Launcher(StrEnum):
    """What starts the ranks."""

    LOCAL = "local"  # this process
    SLURM = "slurm"  # a job on a cluster


@dataclass(frozen=True)
class SlurmOptions:
    """The launcher, and the machines of a Slurm job; None leaves a choice to the cluster."""

    # fmt: off
    launcher: Launcher = option(Launcher.LOCAL, group=START, metavar="NAME",
        help="local: on this machine; slurm: as a job on a cluster")
    nodes: int | None = option(None, group=START, metavar="N", minimum=1, help="Machines",
        default_help="one, or as many as the ranks take")
    ranks_per_node: int | None = option(None, group=START, metavar="N", minimum=1, help="Ranks on each machine",
        default_help="the ranks divided among the machines")
    gpus_per_node: int | None = option(None, group=START, metavar="N", minimum=1, help="GPUs of each machine")
    partition: str | None = option(None, group=START, metavar="NAME", help="Partition that the job is queued in",
        pattern=NAMES, expected="a name has letters, digits and . , : @ / + - _")
    account: str | None = option(None, group=START, metavar="NAME", help="Account that the job is charged to",
        pattern=NAMES, expected="a name has letters, digits and . , : @ / + - _")
    time: str | None = option(None, group=START, metavar="LIMIT", pattern=TIME,
        help="Time limit: 90 (minutes), 1:30:00 or 2-12:00 (days-hours:minutes)",
        expected="write 90 (minutes), 1:30:00 or 2-12:00")
    dry_run: bool = option(False, group=START, help="Print what would be done, operand by operand, and do nothing")
    # fmt: on

    def for_run(self, config: RunConfig) -> SlurmOptions | None:
        """Checked, with nodes and ranks_per_node filled in; None for --launcher local. Raises ConfigError."""
        check_options(self)
        if self.launcher == Launcher.LOCAL:
            for each in declared(SlurmOptions).values():
                if each.name not in ("launcher", "dry_run") and getattr(self, each.name) is not None:
                    raise ConfigError(f"{each.flag} needs --launcher slurm: add it, or leave {each.flag} out")
            return None
        nodes, ranks_per_node = _placed(config, self.nodes, self.ranks_per_node)
        if config.device == Device.CUDA and self.gpus_per_node is not None and self.gpus_per_node < ranks_per_node:
            raise ConfigError(
                f"--gpus-per-node is {self.gpus_per_node}, but a node has {ranks_per_node} ranks and each takes a GPU: "
                "raise it, or --nodes"
            )
        return replace(self, nodes=nodes, ranks_per_node=ranks_per_node)


def _placed(config: RunConfig, nodes: int | None, ranks_per_node: int | None) -> tuple[int, int]:
    """Nodes and ranks on each; the missing one is computed from the other."""
    ranks = config.world_size
    given = f"--tp {config.tp} times --dp {config.dp} is {ranks} ranks"
    if nodes is not None and ranks_per_node is not None and nodes * ranks_per_node != ranks:
        raise ConfigError(
            f"{given}, --nodes {nodes} times --ranks-per-node {ranks_per_node} is {nodes * ranks_per_node}: "
            "make them equal"
        )
    name, divisor = ("--ranks-per-node", ranks_per_node) if nodes is None else ("--nodes", nodes)
    if divisor is not None and ranks % divisor:
        raise ConfigError(f"{given}, which {name} {divisor} does not divide: every node has the same number of ranks")
    if nodes is None:
        nodes = ranks // (ranks_per_node or ranks)
    return nodes, ranks // nodes
