"""binade measure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from binade.collector.cli.console import console
from binade.collector.cli.experiment_options import BY, source_of, source_params, words_of
from binade.collector.recipes.recipe import PARTS
from binade.terminal import CliOption, Command, names, print_text, resolve_root, root_option

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from binade.data.run.block_errors import BlockErrors
    from binade.data.run.effects import Measured

LISTED = 12  # groups


def _measure(
    model: str | None,
    formats: tuple[str, ...],
    by: tuple[str, ...],
    parts: tuple[str, ...],
    blocks: bool,
    dry_run: bool,
    root: str | None,
    **given: Any,
) -> None:
    """Measure what rounding one group of products does to the loss.

    The loss with the group rounded is compared with the loss without, on the same weights and sequences. MODEL is a run
    of `binade run` (its model and data, the weights of its last checkpoint if it has one, and sequences that it does
    not train on), a directory or GGUF file with a checkpoint, or the name of a model.
    """
    from binade.collector.experiment.experiment import ExperimentRequest, estimate_experiment, run_experiment
    from binade.collector.experiment.runner import duration
    from binade.data.run.block_errors import block_errors
    from binade.data.run.effects import measured_effects
    from binade.data.run.experiment import read_blocks
    from binade.data.words.text import counted

    where = resolve_root(root)
    source = source_of(where, model, given)
    request = ExperimentRequest(source, formats, by, parts, blocks=blocks)
    if dry_run:
        passes, seconds = estimate_experiment(request, say=print_text)
        print_text(f"{passes:,} passes of up to {source.plan.config.micro_batch_size} sequences, {duration(seconds)}")
        return
    with console("measure", "pass") as shown:
        finished = run_experiment(request, where, say=shown.print, progress=shown.progress)
    rows = measured_effects(finished.results)
    print_text(described(rows))
    if blocks:
        print_text(_described_blocks(block_errors(finished.results, read_blocks(finished.directory))))
    print_text(f"{finished.run_id}: {counted(len(rows), 'effect')} measured")


def described(rows: Iterable[Measured]) -> str:
    """The effects by format: whole parts, then the groups with the largest effects."""
    from binade.data.run.effects import DIVERGENCE

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


def _described_blocks(blocks: Mapping[str, Sequence[BlockErrors]]) -> str:
    """The errors of the blocks by what is rounded, as the app shows them."""
    from binade.data.run.block_errors import block_sentence

    lines = []
    for name, rows in blocks.items():
        lines += ["", f"{name}: error of the blocks' outputs; own: with the inputs that they have without rounding"]
        lines += [f"    layer{row.layer_index:<5} {row.error}; own {row.own}" for row in rows]
        lines.append(str(block_sentence(name, rows)))
    return "\n".join(lines)


def _effect(row: Measured) -> float:
    return row.divergence.value if row.divergences else row.change.value


def _params() -> list[click.Parameter]:
    what = "What is measured"
    return [
        click.Argument(["model"], required=False, metavar="[MODEL]"),
        CliOption(["--formats"], type=names, default="mxfp4,nvfp4,mxfp8", metavar="A,B,...", title=what,
               help="Formats, or recipes by name or path"),
        CliOption(["--by"], type=words_of(BY), default="part,site", metavar="A,B,...", title=what,
               help="What is rounded together: part (all linear layers, all QK^T, all PV), layer or module (a part in "
                   "one layer, or a module in all), site (a module of a layer), model (all that a recipe rounds)"),
        CliOption(["--parts"], type=words_of(tuple(PARTS)), default="linear", metavar="A,B,...", title=what,
               help=", ".join(PARTS)),
        CliOption(["--blocks"], is_flag=True, title=what,
               help="Also measure the error of each block's output, with the inputs that it receives and with those "
                   "that it has without rounding, of parts and the model: which blocks add errors"),
        CliOption(["--dry-run"], is_flag=True, title=what, help="Print how many passes it takes and about how long"),
        *source_params(),
        root_option(),
    ]  # fmt: skip


measure = Command(
    "measure",
    params=_params(),
    callback=_measure,
    cancelled="cancelled; what was measured is kept, and the same command continues",
    failed="the measurement failed",
)
