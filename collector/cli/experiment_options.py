"""The options of `binade measure`, `parity` and `advise` that name a model and its data. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from binade.collector.cli.options import click_option
from binade.collector.errors import ConfigError, raising
from binade.collector.models.registry import MODELS
from binade.collector.settings import BackendName, Size, declared
from binade.collector.training.config import RunConfig, trained_config
from binade.collector.training.plan import plan
from binade.terminal import CliOption, names

if TYPE_CHECKING:
    from binade.collector.experiment.source import ExperimentSource

BY = ("site", "layer", "module", "part", "model")  # experiment.treatments declares these; it imports torch
OF_MODEL = (
    "size", "dataset", "tokenizer", "vocab_size", "layers", "sequence_length", "micro_batch_size", "seed", "device",
    "backend",
)  # fmt: skip
"""The options of `binade run` that an experiment has."""
OF_RUN = ("size", "layers", "vocab_size", "seed")  # those that a run has decided
SEQUENCES = 8


def source_params() -> list[click.Parameter]:
    """The options of the model and the data, the same in all commands that evaluate."""
    options = declared(RunConfig)
    return [
        CliOption(["--sequences"], type=click.IntRange(1, 1_000_000), metavar="N", title="Data",
               help=f"Sequences that are evaluated  [default: {SEQUENCES}]"),
        CliOption(["--skip"], type=click.IntRange(0, 10**9), metavar="N", title="Data",
               help="Leave out the first N sequences of the data  [default: those that a run trains on, else 0]"),
        *(click_option(options[name], options[name].default) for name in OF_MODEL),
    ]  # fmt: skip


def source_of(root: Path, model: str | None, given: dict[str, Any]) -> ExperimentSource:
    """What the options of `source_params` name. model: a run of the root, a path or a name; None for the default model.
    Of a run, its model and data, the weights of its last checkpoint if it has one, and sequences that it does not train
    on. Raises ConfigError and RunError."""
    from binade.collector.experiment.source import ExperimentSource, unread
    from binade.data.run.directory import CHECKPOINTS, RUN_FILE, read_run

    given = {name: value for name, value in given.items() if value is not None}
    sequences, skip = given.pop("sequences", SEQUENCES), given.pop("skip", None)
    if model is None or not (root / Path(model).name / RUN_FILE).exists():
        if model and model not in MODELS and not Path(model).exists():
            known = ", ".join(MODELS)
            raise ConfigError(f"{model!r} is not a run of {root}, a path, or the name of a model: {known}")
        base = RunConfig(model=model) if model else RunConfig()
        if "size" not in given and base.has_path:
            given["size"] = Size.FULL
        return ExperimentSource(plan(replace(base, **given)), sequences, skip=skip or 0)
    if wrong := [name for name in OF_RUN if name in given]:
        raise ConfigError(f"{declared(RunConfig)[wrong[0]].flag} is that of {model}: leave it out")
    run = read_run(root / Path(model).name)
    with raising(ConfigError, run.run_id, ConfigError):
        config = trained_config(run.config)
    weights = run.directory if (run.directory / CHECKPOINTS).is_dir() else None
    changes: dict[str, Any] = {"tp": 1, "dp": 1, "sequence_parallel": False, "backend": BackendName.AUTO}
    used = replace(config, recipe="bf16", **changes | given)
    apart = used.dataset == config.dataset and skip is None
    where = unread(plan(config), used.sequence_length) if apart else {"skip": skip or 0}
    return ExperimentSource(plan(used), sequences, weights=weights, **where)


def words_of(known: tuple[str, ...]) -> Any:
    """The type of an option: a list of these words."""

    def read(text: str) -> tuple[str, ...]:
        words = names(text)
        if not words or set(words) - set(known):
            raise click.BadParameter(f"{text!r}: expected {', '.join(known)}, separated by commas")
        return words

    return read
