"""The Collect page without Streamlit: its fields, the presets, and the runs that they make.

The fields are the options of RunConfig that have a label. Options without one (an operand's own format, a checkpoint)
are kept when a job is cloned, and shown.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from binade.collector.jobs import TEN_RECIPES, arguments_of, parse_runs
from binade.collector.training.config import ConfigError, RunConfig, declared, defaults
from binade.quant.formats import FORMATS

MEGABYTE = 1 << 20
OPTIONS = declared(RunConfig)
# The fields of the page: the options with a label. "budget" stands for max_bytes, in MiB.
FIELDS = tuple(name for name, each in OPTIONS.items() if each.option.label and name != "max_bytes")


@dataclass(frozen=True)
class Preset:
    """A way to fill the page. recipes is None where the chosen ones stay."""

    title: str
    icon: str
    help: str
    config: RunConfig
    recipes: tuple[str, ...]


def presets() -> dict[str, Preset]:
    """By name."""
    quick = defaults("quick")
    one = "^(?!layer1[.]fc1$)"  # a pattern that every other place of the model matches
    sweep = replace(
        quick,
        capture_layers="first",
        modules=("fc1",),
        tensors=("input",),
        skip_layers=one,
        scores=tuple(FORMATS),
    )
    formats = tuple(f"linear_{name}" for name in FORMATS if name != "bf16")
    return {
        "quick": Preset(
            "Quick",
            ":material/bolt:",
            "The smallest useful run: 128 tokens, one iteration",
            quick,
            ("mxfp8",),
        ),
        "ten": Preset(
            "All ten recipes",
            ":material/balance:",
            "bf16; attention, linear layers and both in mxfp8, mxfp4 and hifp8, to compare loss and gradients",
            replace(RunConfig(), warmup_iterations=12, control_iter=2),
            TEN_RECIPES,
        ),
        "sweep": Preset(
            "Formats on one tensor",
            ":material/tune:",
            "Each format in one layer alone, everything else in bf16; only that layer’s input is recorded",
            sweep,
            ("bf16", *formats),
        ),
    }


def widgets_of(config: RunConfig) -> dict[str, Any]:
    """The values of the page's fields for a configuration."""
    values = {name: getattr(config, name) for name in FIELDS}
    values |= {name: list(value) for name, value in values.items() if OPTIONS[name].is_list}
    return values | {"budget": max(1, config.max_bytes // MEGABYTE)}


def config_of(values: Mapping[str, Any], base: RunConfig) -> RunConfig:
    """A configuration from the page's fields; what the page has no field for is base's."""
    chosen = {name: values[name] for name in FIELDS if name in values}
    chosen |= {name: tuple(value) for name, value in chosen.items() if OPTIONS[name].is_list}
    texts = {name: text.strip() for name, text in chosen.items() if isinstance(text, str)}
    return replace(base, **chosen | texts, max_bytes=int(values.get("budget", base.max_bytes // MEGABYTE)) * MEGABYTE)


def runs_of(values: Mapping[str, Any], recipes: list[str], base: RunConfig) -> list[RunConfig]:
    """A checked run for each recipe. Raises ConfigError, RecipeError or UnknownFormatError for the first that cannot be
    run."""
    if not recipes:
        raise ConfigError("choose at least one recipe")
    config = config_of(values, base)
    return [run for recipe in recipes for run in parse_runs(arguments_of(replace(config, recipe=recipe)))]


def kept_beside(base: RunConfig) -> list[str]:
    """The options of a configuration that the page has no field for, as a command line has them."""
    plain = RunConfig()
    shown = {name: getattr(plain, name) for name in (*FIELDS, "max_bytes", "recipe")}
    return arguments_of(replace(base, **shown))[3:]


def title_of(given: str, run: RunConfig, runs: list[RunConfig]) -> str:
    """A job's title: the given one, with the recipe where there are several; "" for the default."""
    given = given.strip()
    return f"{given} · {run.recipe}" if given and len(runs) > 1 else given


def wrapped(command: str, letters: int) -> str:
    """A command on lines of about so many letters, broken before options, as a shell takes it."""
    words = shlex.split(command)
    starts = [0, *(index for index, word in enumerate(words) if word.startswith("--")), len(words)]
    options = [shlex.join(words[start:end]) for start, end in pairwise(starts)]
    lines = [options[0]]
    for option in options[1:]:
        if len(lines[-1]) + 1 + len(option) > letters:
            lines[-1] += " \\"
            lines.append(f"    {option}")
        else:
            lines[-1] += f" {option}"
    return "\n".join(lines)


def duration_text(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 5 min."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 else f"{round(whole / 60)} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
