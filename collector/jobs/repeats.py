"""Runs repeated with other seeds, from the command lines in their run.json. No torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from binade.collector.errors import ConfigError
from binade.collector.jobs.command_line import parse_runs
from binade.collector.training.config import RunConfig, check

# Fields that run.json describes in other words than the configuration does.
DESCRIBED = ("model", "recipe", "device", "backend")


def trained_with(run_id: str, description: Mapping[str, Any]) -> RunConfig:
    """The configuration that `binade run` or `batch` trained a run with. description: its run.json.

    Raises ConfigError for a run that was not trained so, or whose command line no longer means the same.
    """
    command = description.get("command")
    if "recipe_toml" not in description or not isinstance(command, str):
        raise ConfigError(f"run {run_id} was not trained by binade run")
    try:
        runs = parse_runs(shlex.split(command)[1:])
    except ValueError as error:
        raise ConfigError(f"run {run_id} cannot be repeated here: {error}") from None
    for config in runs:
        if _is_same(config, description):
            return config
    raise ConfigError(f"run {run_id} cannot be repeated here: its command line does not give the settings in run.json")


def _is_same(config: RunConfig, description: Mapping[str, Any]) -> bool:
    if config.parsed_recipe().name != description.get("recipe"):
        return False
    stated = json.loads(json.dumps(config.to_dict()))
    return all(description.get(name, value) == value for name, value in stated.items() if name not in DESCRIBED)


def with_further_seeds(runs: Iterable[RunConfig], seeds: int) -> list[RunConfig]:
    """The same runs with the next seeds, so that each has `seeds` of them, all checked: seed by seed, each once.

    Raises ConfigError.
    """
    listed = list(runs)
    made = [replace(config, seed=config.seed + number) for number in range(1, seeds) for config in listed]
    made = list(dict.fromkeys(made))
    for config in made:
        check(config)
    return made
