"""The Collect page without Streamlit: its fields, the presets, and the runs that they make.

The fields are the options of RunConfig that have a label. Options without one (an operand's own format, a checkpoint)
are kept when a job is cloned, and shown.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

from pydantic.dataclasses import dataclass as checked

from binade.collector.errors import ConfigError
from binade.collector.jobs import TEN_RECIPES, Job
from binade.collector.recipes.ladder import ladder
from binade.collector.recipes.recipe import BF16
from binade.collector.settings import Size, declared
from binade.collector.training.config import RunConfig, defaults
from binade.collector.training.plan import Plan, plan
from binade.collector.training.slurm_options import SlurmOptions
from binade.data.compare.same_data import CONFIGURATION
from binade.data.run.json_files import STRICT, parse_json
from binade.quant.formats import FORMATS

MEGABYTE = 1 << 20
MOST_SEEDS = 20
ADDRESS = "form"  # the parameter of the page's address that has a Form
OPTIONS = declared(RunConfig)
SAME_DATA = ("dp", "layers", "vocab_size", *(name for name in CONFIGURATION if name in OPTIONS))
FIELDS = tuple(name for name, setting in OPTIONS.items() if setting.option.label)


@checked(frozen=True, config=STRICT)
class Form:
    """What the page is filled with.

    config   of each run, but for the recipe and the seed
    recipes  there is a run for each
    seeds    of each recipe, counted from that of config
    start    where the runs are started
    """

    config: RunConfig = RunConfig()
    recipes: tuple[str, ...] = ()
    seeds: int = 1
    title: str = ""
    tags: str = ""
    start: SlurmOptions = SlurmOptions()

    @classmethod
    def of_job(cls, config: RunConfig, job: Job) -> Form:
        """config: what the job trains."""
        return cls(config, (config.recipe,), 1, job.title, ", ".join(job.tags), job.start)

    def to_address(self) -> str:
        """JSON of all that is not a default; "" for the form that the page opens with."""
        return "" if self == FIRST else json.dumps(_changed(self), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def of_address(cls, text: str) -> Form:
        """Raises ValueError (ConfigError, RecipeError) for a text that is no form, or one whose runs cannot be."""
        form = parse_json(cls, text.encode()) if text else FIRST
        form.config.check()
        return form


def _changed(options: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, of these options and of the options in them."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    changed = {field.name: values[field.name] for field in fields(options) if values[field.name] != field.default}
    return {name: _changed(value) if is_dataclass(value) else value for name, value in changed.items()}


@dataclass(frozen=True)
class Preset:
    """A way to fill the page."""

    title: str
    icon: str
    help: str
    form: Form


_QUICK = defaults("quick")
FIRST = Form(_QUICK, ("mxfp8",))
PRESETS = {
    "quick": Preset(
        "Quick",
        ":material/bolt:",
        "The smallest useful run: 128 tokens, one iteration",
        FIRST,
    ),
    "ten": Preset(
        "All ten recipes",
        ":material/balance:",
        "bf16; attention, linear layers and both in mxfp8, mxfp4 and hifp8, to compare loss and gradients",
        Form(replace(RunConfig(), warmup_iterations=12, control_iter=2), TEN_RECIPES),
    ),
    "sweep": Preset(
        "Formats on one tensor",
        ":material/tune:",
        "Each format in one layer only; all other layers run in bf16. Only that layer’s input is recorded",
        Form(
            replace(
                _QUICK,
                capture_layers="first",
                modules=("fc1",),
                tensors=("input",),
                skip_layers="!layer1[.]fc1$",
                scores=tuple(FORMATS),
            ),
            ("bf16", *(f"linear_{name}" for name in FORMATS if name != "bf16")),
        ),
    ),
    "ablation": Preset(
        "Ablation",
        ":material/stairs:",
        "Ablates the recipe chosen below, or te_nvfp4: forward only, then with dgrad, then with wgrad, then without "
        "one ingredient at a time",
        Form(
            replace(RunConfig(), warmup_iterations=12, control_iter=2, capture_every=10),
            # not nvidia_nvfp4, which keeps both layers of a tiny model in bf16
            tuple(rung.recipe for rung in ladder("te_nvfp4").rungs),
            seeds=3,
        ),
    ),
}


def recipes_of(name: str, chosen: Sequence[str]) -> tuple[str, ...]:
    """The recipes of a preset, given those chosen before: an ablation uses the chosen one if possible."""
    preset = PRESETS[name].form
    others = [recipe for recipe in chosen if recipe != BF16]
    if name != "ablation" or len(others) != 1:
        return preset.recipes
    try:
        return tuple(rung.recipe for rung in ladder(others[0]).rungs)
    except ValueError:  # RecipeError or UnknownFormatError: the recipe is misspelled or has no ingredients
        return preset.recipes


def widgets_of(config: RunConfig) -> dict[str, Any]:
    """The values of the page's fields for a configuration. Fields of bytes are in MiB."""
    return {name: _widget_value(name, getattr(config, name)) for name in FIELDS}


def _widget_value(name: str, value: Any) -> Any:
    if OPTIONS[name].option.unit == "bytes":
        return max(1, value // MEGABYTE)
    return list(value) if OPTIONS[name].is_list else value


def config_of(values: Mapping[str, Any], base: RunConfig) -> RunConfig:
    """A configuration from the page's fields; everything else is taken from base."""
    config = replace(base, **{name: _option_value(name, value) for name, value in values.items()})
    return replace(config, size=Size.FULL) if config.has_path else config


def _option_value(name: str, value: Any) -> Any:
    if OPTIONS[name].option.unit == "bytes":
        return value * MEGABYTE
    if OPTIONS[name].is_list:
        return tuple(value)
    return value.strip() if isinstance(value, str) else value


def runs_of(values: Mapping[str, Any], recipes: list[str], base: RunConfig, seeds: int = 1) -> list[Plan]:
    """A run for each recipe and seed. Seeds are counted from the one in values. Raises ConfigError, RecipeError
    or UnknownFormatError for the first that cannot be run."""
    if not recipes:
        raise ConfigError("choose at least one recipe")
    if not 1 <= seeds <= MOST_SEEDS:
        raise ConfigError(f"seeds is {seeds}: expected 1 to {MOST_SEEDS}")
    config = config_of(values, base)
    return [
        plan(replace(config, recipe=recipe, seed=config.seed + number)) for number in range(seeds) for recipe in recipes
    ]


def lacks_baseline(runs: Sequence[RunConfig], existing: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a quantized run reads other data, or starts from other weights, than every bf16 run among these and among
    the existing ones, given by their run.json."""

    def settings(config: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(config.get(name) or "") for name in SAME_DATA)

    known = {settings(run.to_dict()) for run in runs if run.recipe == BF16} | set(map(settings, existing))
    return any(settings(run.to_dict()) not in known for run in runs if run.recipe != BF16)


def wrapped(command: str, letters: int) -> str:
    """A command wrapped before options to lines of at most this many characters, with backslashes for a shell. A longer
    option has its own line."""
    words = shlex.split(command)
    starts = [0, *(index for index, word in enumerate(words) if word.startswith("--")), len(words)]
    options = [shlex.join(words[start:end]) for start, end in pairwise(starts)]
    lines = [options[0]]
    for option in options[1:]:
        if len(f"{lines[-1]} {option} \\") > letters:
            lines[-1] += " \\"
            lines.append(f"    {option}")
        else:
            lines[-1] += f" {option}"
    return "\n".join(lines)
