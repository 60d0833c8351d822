"""binade measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from binade.collector.cli.console import console
from binade.collector.cli.options import click_option
from binade.collector.errors import ConfigError
from binade.collector.recipes.recipe import PARTS
from binade.collector.settings import BackendName, Size, declared
from binade.collector.training.config import RunConfig, trained_config
from binade.collector.training.plan import plan
from binade.terminal import CliOption, Command, names, print_text, resolve_root, root_option

if TYPE_CHECKING:
    from collections.abc import Iterable

    from binade.collector.training.measure import Measurement
    from binade.data.effects import Measured

BY = ("site", "layer", "module", "part", "model")  # capture.effects declares these; it imports torch
OF_MODEL = (
    "model", "size", "dataset", "tokenizer", "vocab_size", "layers", "sequence_length", "micro_batch_size", "seed",
    "device", "backend",
)  # fmt: skip
"""The options of `binade run` that a measurement has."""
LISTED = 12  # groups


def _measure(
    run: str | None,
    formats: tuple[str, ...],
    by: tuple[str, ...],
    parts: tuple[str, ...],
    sequences: int,
    skip: int | None,
    dry_run: bool,
    root: str | None,
    **given: Any,
) -> None:
    """Measure what rounding one group of products does to the loss.

    The loss with the group rounded is compared with the loss without, on the same weights and sequences.
    RUN is a run of `binade run`: its model and data, the weights of its last checkpoint if it has one, and sequences
    that it does not train on. Without it, the options name the model and the data.
    """
    where = resolve_root(root)
    asked = requested(where, run, {name: value for name, value in given.items() if value is not None}, skip)
    asked = replace(asked, formats=formats, by=by, parts=parts, sequences=sequences)
    if dry_run:
        from binade.collector.training.measure import duration, estimate

        passes, seconds = estimate(asked, say=print_text)
        print_text(f"{passes:,} passes of up to {asked.plan.config.micro_batch_size} sequences, {duration(seconds)}")
        return
    from binade.collector.training.measure import measure_effects

    with console("measure", "pass") as shown:
        run_id, rows = measure_effects(asked, where, say=shown.print, progress=shown.progress)
    print_text(described(rows))
    print_text(f"{run_id}: {len(rows):,} groups and formats measured")


def requested(root: Path, run: str | None, given: dict[str, Any], skip: int | None) -> Measurement:
    """What to measure, without formats: of a run, or of a model by the options of OF_MODEL. Raises ConfigError and
    RunError."""
    from binade.collector.training.measure import Measurement, unread
    from binade.data.runs import CHECKPOINTS, read_run

    if run is None:
        base = RunConfig()
        if "size" not in given and replace(base, **given).has_path:
            given["size"] = Size.FULL
        return Measurement(plan(replace(base, **given)), (), skip=skip or 0)
    if wrong := [name for name in ("model", "size", "layers", "vocab_size", "seed") if name in given]:
        raise ConfigError(f"{declared(RunConfig)[wrong[0]].flag} is that of {run}: leave it out, or leave out the run")
    run_info = read_run(root / Path(run).name)
    config = trained_config(run_info.config)
    weights = run_info.directory if (run_info.directory / CHECKPOINTS).is_dir() else None
    changes: dict[str, Any] = {"tp": 1, "dp": 1, "sequence_parallel": False, "backend": BackendName.AUTO}
    used = replace(config, recipe="bf16", **changes | given)
    apart = used.dataset == config.dataset and skip is None
    where = unread(plan(config), used.sequence_length) if apart else {"skip": skip or 0}
    return Measurement(plan(used), (), weights=weights, **where)


def described(rows: Iterable[Measured]) -> str:
    """The effects by format: whole parts, then the groups with the largest effects."""
    from binade.data.effects import DIVERGENCE

    lines = []
    by_format: dict[str, list[Measured]] = {}
    for row in rows:
        by_format.setdefault(row.format, []).append(row)
    for fmt, effects in by_format.items():
        whole = [row for row in effects if row.group.layer_index is None and row.group.module is None]
        single = sorted((row for row in effects if row not in whole), key=_effect, reverse=True)
        lines += ["", f"{fmt}: change of the loss"]
        for row in [*whole, *single[:LISTED]]:
            apart = f"  divergence {DIVERGENCE.text(row.divergence.value)}" if row.divergences else ""
            lines.append(f"    {row.group!s:<24} {row.change}{apart}")
        if len(single) > LISTED:
            lines.append(f"    and {len(single) - LISTED:,} more")
    return "\n".join(lines[1:])


def _effect(row: Measured) -> float:
    return row.divergence.value if row.divergences else row.change.value


def words_of(known: tuple[str, ...]) -> Any:
    """The type of an option: a list of these words."""

    def read(text: str) -> tuple[str, ...]:
        words = names(text)
        if not words or set(words) - set(known):
            raise click.BadParameter(f"{text!r}: expected {', '.join(known)}, separated by commas")
        return words

    return read


def _params() -> list[click.Parameter]:
    what, options = "What is measured", declared(RunConfig)
    return [
        click.Argument(["run"], required=False, metavar="[RUN]"),
        CliOption(["--formats"], type=names, default="mxfp4,nvfp4,mxfp8", metavar="A,B,...", title=what,
               help="Formats, or recipes by name or path  [default: mxfp4,nvfp4,mxfp8]"),
        CliOption(["--by"], type=words_of(BY), default="part,site", metavar="A,B,...", title=what,
               help="What is rounded together: part (all linear layers, all QK^T, all PV), layer or module (a part in "
                   "one layer, or a module in all), site (a module of a layer), model (all that a recipe rounds)  "
                   "[default: part,site]"),
        CliOption(["--parts"], type=words_of(tuple(PARTS)), default="linear", metavar="A,B,...", title=what,
               help=f"{', '.join(PARTS)}  [default: linear]"),
        CliOption(["--sequences"], type=click.IntRange(1, 1_000_000), default=8, metavar="N", title=what,
               help="Sequences that are evaluated  [default: 8]"),
        CliOption(["--skip"], type=click.IntRange(0, 10**9), default=None, metavar="N", title=what,
               help="Leave out the first N sequences of the data  [default: those that RUN trains on, else 0]"),
        CliOption(["--dry-run"], is_flag=True, title=what, help="Print how many passes it takes and about how long"),
        *(click_option(options[name], options[name].default) for name in OF_MODEL),
        root_option(),
    ]  # fmt: skip


measure = Command(
    "measure",
    params=_params(),
    callback=_measure,
    cancelled="cancelled; what was measured is kept, and the same command continues",
    failed="the measurement failed",
)
