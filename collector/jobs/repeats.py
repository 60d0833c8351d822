"""Runs repeated with other seeds. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from binade.collector.errors import ConfigError, raising
from binade.collector.training.config import RunConfig, trained_config
from binade.collector.training.plan import Plan, plan


def trained_with(run_id: str, description: Mapping[str, Any]) -> Plan:
    """The plan that `binade run` or `batch` trained a run by. description: its run.json.

    Raises ConfigError for a run that was not trained so, or whose configuration no longer means the same.
    """
    if of := description.get("branch_of"):
        raise ConfigError(f"run {run_id} cannot be repeated here: it branched off from {of['run_id']}")
    with raising(ConfigError, f"run {run_id} cannot be repeated here", ValueError):
        planned = plan(trained_config(description))
    if planned.recipe.lines() != description.get("operands"):
        raise ConfigError(f"run {run_id} cannot be repeated here: its recipe has another meaning now")
    return planned


def with_further_seeds(runs: Iterable[RunConfig], seeds: int) -> list[Plan]:
    """The same runs with the next seeds, so that each has `seeds` of them: seed by seed. Raises ConfigError."""
    listed = list(runs)
    return [
        plan(config)
        for config in dict.fromkeys(
            replace(config, seed=config.seed + number) for number in range(1, seeds) for config in listed
        )
    ]
