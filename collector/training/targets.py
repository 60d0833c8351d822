"""Targets: clusters on which runs are started, described in a file binade.toml.

    [targets.gpu]
    launcher = "slurm"
    partition = "a100"
    setup = ["module load cuda"]

The file is the one that $BINADE_CONFIG names, else binade.toml in the working directory, else
~/.config/binade/binade.toml. The root of the runs is not searched: a shell runs a target's `setup`, and a root may come
from somebody else. No torch.
"""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import field
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from binade.collector.errors import ConfigError
from binade.data.run.json_files import STRICT, parse_json
from binade.data.run.store import read_text

CONFIG = "BINADE_CONFIG"
FILE = "binade.toml"


@dataclass(frozen=True, config=STRICT)
class Target:
    """How a job is started on a cluster; None leaves a choice to it.

    partition to at_once are the command line's options of the same names. options are further ones of sbatch, such as
    "--qos=high"; setup are lines that the job's shell runs first. python is the one that has Binade in the job, by
    default this one. container is an image, for pyxis (--container-image of srun) or Apptainer; container_options are
    those of srun or of `apptainer exec`.
    """

    launcher: Literal["slurm"] = "slurm"
    nodes: int | None = None
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    at_once: int | None = None
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str | None = None
    container: str | None = None
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    container_options: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ConfigError for text that a job's script cannot contain."""
        for name in ("options", "setup", "container_options"):
            for text in getattr(self, name):
                if not text.isprintable():
                    raise ConfigError(f"{name} has {text!r}: write one line without control characters per entry")
        for text in self.options:
            if not text.startswith("--"):
                raise ConfigError(f"options has {text!r}: write sbatch options, such as --qos=high")


@dataclass(frozen=True, config=STRICT)
class ConfigFile:
    """binade.toml."""

    targets: dict[str, Target] = field(default_factory=dict)


def targets_file() -> Path | None:
    """The file of the targets; None if there is none. Raises ConfigError if $BINADE_CONFIG does not name a file."""
    if named := os.environ.get(CONFIG):
        if not Path(named).is_file():
            raise ConfigError(f"${CONFIG} is {named!r}, which is not a file: set it to a {FILE}, or unset it")
        return Path(named)
    home = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))  # no home: no such file
    return next((path for path in (Path(FILE).absolute(), home / "binade" / FILE) if path.is_file()), None)


def read_config(path: Path) -> ConfigFile:
    """Raises ConfigError for an invalid file."""
    try:
        tables = tomllib.loads(read_text(path))
        config = parse_json(ConfigFile, json.dumps(tables, default=str).encode())
        for name, target in config.targets.items():
            try:
                target.check()
            except ConfigError as error:
                raise ConfigError(f"targets.{name}.{error}") from None
        return config
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {reason}; docs/clusters.md describes the file") from None


def read_targets() -> dict[str, Target]:
    """The targets by name. Raises ConfigError for an invalid file."""
    path = targets_file()
    return read_config(path).targets if path else {}


def find_target(name: str) -> Target:
    """Raises ConfigError."""
    known = read_targets()
    if name not in known:
        path = targets_file()
        where = f"{path} has {', '.join(known) or 'none'}" if path else f"there is no {FILE}; see docs/clusters.md"
        raise ConfigError(f"there is no target {name!r}: {where}")
    return known[name]
