"""Options for where a run is started: in this process, or as a Slurm job on other machines. No torch, no submitit."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from binade.collector.errors import ConfigError, raising
from binade.collector.settings import DeviceName, OptionGroup, check_options, declared, option
from binade.collector.training.config import RunConfig
from binade.collector.training.targets import Target, find_target

# In sbatch's notation: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
TIME = re.compile(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}|UNLIMITED")
NAMES = re.compile(r"[\w.,:@/+-]+")
START = OptionGroup("Cluster", "Except for --dry-run, these options require --target or --launcher slurm.")


class Launcher(StrEnum):
    """The program that starts the ranks."""

    LOCAL = "local"  # this process
    SLURM = "slurm"  # a job on a cluster


@dataclass(frozen=True)
class SlurmOptions:
    """The launcher, and the machines of a Slurm job; None leaves a choice to the cluster."""

    # fmt: off
    launcher: Launcher = option(Launcher.LOCAL, group=START, metavar="NAME",
        help="local: on this machine; slurm: as a job on a cluster")
    target: str | None = option(None, group=START, metavar="NAME", pattern=NAMES,
        expected="expected a name in binade.toml", help="Name of a cluster in binade.toml; options below override it")
    nodes: int | None = option(None, group=START, metavar="N", minimum=1, help="Number of nodes",
        default_help="one, or as many as the ranks need")
    ranks_per_node: int | None = option(None, group=START, metavar="N", minimum=1, help="Ranks per node",
        default_help="the ranks divided by the nodes")
    gpus_per_node: int | None = option(None, group=START, metavar="N", minimum=1, help="GPUs per node")
    partition: str | None = option(None, group=START, metavar="NAME", help="Partition that the job is queued in",
        pattern=NAMES, expected="a name has letters, digits and . , : @ / + - _")
    account: str | None = option(None, group=START, metavar="NAME", help="Account that the job is charged to",
        pattern=NAMES, expected="a name has letters, digits and . , : @ / + - _")
    time: str | None = option(None, group=START, metavar="LIMIT", pattern=TIME,
        help="Time limit: 90 (minutes), 1:30:00 or 2-12:00 (days-hours:minutes)",
        expected="write 90 (minutes), 1:30:00 or 2-12:00")
    at_once: int | None = option(None, group=START, metavar="N", minimum=1,
        help="Maximum number of runs of a batch that run at the same time",
        default_help="as many as the cluster allows")
    dry_run: bool = option(False, group=START, help="Print what would be done, operand by operand, and do nothing")
    # fmt: on

    @property
    def on_cluster(self) -> bool:
        return self.launcher == Launcher.SLURM or self.target is not None

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, without --dry-run."""
        known = {name: getattr(self, name) for name in declared(SlurmOptions) if name != "dry_run"}
        return {name: value for name, value in known.items() if value not in (None, Launcher.LOCAL)}

    def arguments(self) -> list[str]:
        """These options as command-line arguments."""
        options = declared(SlurmOptions)
        return [word for name, value in self.given.items() for word in (options[name].flag, str(value))]

    def for_run(self, config: RunConfig) -> Target | None:
        """The checked target, with these options replacing its own, and with nodes and ranks_per_node filled in; None
        for this machine. Raises ConfigError."""
        check_options(self)
        given = self.given
        if not self.on_cluster:
            for name in given:
                flag = declared(SlurmOptions)[name].flag
                raise ConfigError(f"{flag} needs --target or --launcher slurm: add one, or leave {flag} out")
            return None
        described = find_target(self.target) if self.target else Target()
        names = [name for name in declared(SlurmOptions) if hasattr(described, name) and name != "launcher"]
        merged = {name: given.get(name, getattr(described, name)) for name in names}
        with raising(ConfigError, f"target {self.target}", ConfigError):
            check_options(SlurmOptions(**merged))
        try:
            nodes, ranks_per_node = _placed(config, merged["nodes"], merged["ranks_per_node"], merged["gpus_per_node"])
        except ConfigError as error:
            machines = ("nodes", "ranks_per_node", "gpus_per_node")
            if all(name in given or merged[name] is None for name in machines):
                raise
            raise ConfigError(f"with target {self.target}, {error}") from None
        return replace(described, **merged | {"nodes": nodes, "ranks_per_node": ranks_per_node})


def _placed(config: RunConfig, nodes: int | None, ranks_per_node: int | None, gpus: int | None) -> tuple[int, int]:
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
        raise ConfigError(f"{given}, not a multiple of {name} {divisor}: every node needs the same number of ranks")
    if nodes is None:
        nodes = ranks // (ranks_per_node or ranks)
    ranks_per_node = ranks // nodes
    if config.device == DeviceName.CUDA and gpus is not None and gpus < ranks_per_node:
        raise ConfigError(
            f"--gpus-per-node is {gpus}, but a node has {ranks_per_node} ranks and each takes a GPU: "
            "raise --gpus-per-node or --nodes"
        )
    return nodes, ranks_per_node
