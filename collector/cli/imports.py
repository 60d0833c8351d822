"""binade import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from binade.collector.cli.console import console
from binade.collector.settings import DEFAULT_SCORES
from binade.data.text import counted
from binade.terminal import Command, Option, fail, line_of, names, one_line, print_text, resolve_root, root_option

if TYPE_CHECKING:
    from binade.collector.imports.importer import Imported

SHOWN_REFUSALS = 10
SCORES = ",".join(DEFAULT_SCORES)


OF_TENSORS = ("scores", "workers")
OF_LOSSES = ("recipe", "model", "dataset", "seed", "name", "step_column", "loss_column")
KINDS = ("tensors", "losses")
START = ("model", "dataset", "seed")


@click.pass_context
def _import(context: click.Context, /, path: Path, root: str, **options: Any) -> int:
    """Index tensors that other tools have logged, without copying them, or import the losses of a training.

    A directory contains .pt, .safetensors and .npy files, at any depth. Layers, tensors and iterations are recognized
    in logs of the Megatron-LM fork and in dumps of Transformer Engine (DumpTensors), msprobe and SGLang. Statistics
    that Transformer Engine or msprobe logged without values are indexed, too.

    A loss log is a .csv, .jsonl or .ndjson file, an event file of TensorBoard, or a directory that contains event
    files.
    """
    from binade.collector.errors import ConfigError
    from binade.collector.imports.losses import is_loss_log

    if not os.path.exists(os.path.expanduser(path)):  # of pathlib, both may raise
        raise ConfigError(f"{path} does not exist: expected a directory of tensors, or a loss log")

    def chosen(options: tuple[str, ...]) -> list[str]:
        return [name for name in options if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]

    command, into = line_of(context.find_root().obj), resolve_root(root)
    losses = is_loss_log(path) and (bool(chosen(OF_LOSSES)) or not _has_tensors(path, into))
    for name in chosen(OF_TENSORS if losses else OF_LOSSES):
        option, (kind, other) = f"--{name.replace('_', '-')}", KINDS if losses else KINDS[::-1]
        raise ConfigError(f"{option} is for {kind}, but {path} is imported as {other}")
    own = {name: options[name] for name in (OF_LOSSES if losses else OF_TENSORS)}
    return (_losses if losses else _tensors)(path, into, command, **own)


def _has_tensors(path: Path, root: Path) -> bool:
    """Whether it is a directory with tensor files."""
    from binade.collector.imports.files import walk

    path = path.expanduser().resolve()
    return path.is_dir() and bool(walk(path, root)[0])


def _losses(path: Path, root: Path, command: str, recipe: str | None, **options: Any) -> int:
    from binade.collector.errors import ConfigError
    from binade.collector.imports.losses import import_losses

    if not recipe:
        raise ConfigError("a loss log does not say how the run was quantized: give --recipe, such as bf16 or mxfp8")
    start = {name: options.pop(name) for name in START}
    run_id, log = import_losses(path, root, recipe=recipe, start=start, command=command, **options)
    first, last = min(log.losses), max(log.losses)
    lines = [f"{run_id}: {len(log.losses):,} losses ({log.loss_column}), {log.step_column} {first} to {last}"]
    if log.others:
        lines.append(f"not read: {', '.join(log.others)}; --step-column and --loss-column choose a column")
    if log.repeated:
        lines.append(f"{log.repeated:,} losses were left out: the last finite one of each step counts")
    if log.empty:
        lines.append(f"{counted(log.empty, 'row')} left out: {log.loss_column} is empty")
    lines += [f"left out: {what}" for what in log.cut]
    lines += [f"not read: {what}" for what in log.damaged[:SHOWN_REFUSALS]]
    if (hidden := len(log.damaged) - SHOWN_REFUSALS) > 0:
        lines.append(f"not read: {hidden:,} more")
    if missing := [f"--{name}" for name, value in start.items() if value is None]:
        lines.append(f"not compared with other runs: that needs {', '.join(missing)}, the same as for its bf16 run")
    print_text("\n".join(map(one_line, lines)))
    if log.damaged:
        return fail(f"a part of {path} is damaged and was not read; the losses above are imported")
    return 0


def _tensors(path: Path, root: Path, command: str, scores: tuple[str, ...], workers: int | None) -> int:
    from binade.collector.imports.workers import prepare

    prepare("binade.collector.imports.importer")  # its processes import torch while this one does
    from binade.collector.imports.importer import import_logs

    with console("import", "file") as shown:
        result = import_logs(
            path,
            root,
            scores=scores,
            workers=workers,
            say=lambda line: shown.say(one_line(line)),
            progress=shown.progress,
            command=command,
        )
    if result.failed:
        where = result.directory / "refused.jsonl"
        print_text("\n".join(_refusals(result)))
        return fail(f"every file of {path} was refused; {where} says why")
    if not (result.files or result.known):
        print_text(f"there are no files in {one_line(str(path))}: nothing to import")
        return 0
    added = f"{result.tensors} tensors of {result.files} files, {result.bytes / 1e6:.1f} MB in {result.seconds:.1f} s"
    lines = [f"{result.run_id}: {added if result.files else 'nothing new'}; {result.known} files already known"]
    if result.by_source:
        lines.append("by source: " + ", ".join(f"{source} {count}" for source, count in result.by_source.items()))
    print_text("\n".join([*lines, *_refusals(result)]))
    return 0


def _refusals(result: Imported) -> list[str]:
    """The refused files, and what was left out of others, with the reasons; only the first ones if there are many."""
    lines = []
    for title, of_left_out in (("refused", False), ("left out", True)):
        refusals = [refusal for refusal in result.refused if refusal.is_left_out == of_left_out]
        lines += [f"{title}: {len(refusals)}"] * bool(refusals)
        lines += [f"    {one_line(refusal.line)}" for refusal in refusals[:SHOWN_REFUSALS]]
        if (hidden := len(refusals) - SHOWN_REFUSALS) > 0:
            lines.append(f"    and {hidden} more: {result.directory / 'refused.jsonl'}")
    return lines


TENSORS, LOSSES = "Options for tensors", "Options for a loss log"
import_ = Command(
    "import",
    params=[
        click.Argument(["path"], type=Path, metavar="PATH"),
        Option(["--scores"], type=names, metavar="A,B,...", default=SCORES, title=TENSORS,
               help=f"Formats to score every tensor in  [default: {SCORES}]"),
        Option(["--workers"], type=int, metavar="N", title=TENSORS,
               help="Number of processes  [default: one per core]"),
        Option(["--recipe"], metavar="NAME", title=LOSSES,
               help="What the training was quantized to; bf16 for the baseline that others are compared with"),
        Option(["--model"], metavar="NAME", title=LOSSES, help="The model"),
        Option(["--dataset"], metavar="NAME", title=LOSSES, help="The data"),
        Option(["--seed"], type=int, metavar="N", title=LOSSES,
               help="The seed. Runs are compared if they have the same model, dataset and seed"),
        Option(["--name"], metavar="TEXT", title=LOSSES, help="Name of the run in the app"),
        Option(["--step-column"], metavar="NAME", title=LOSSES,
               help="Column or key of the steps  [default: iteration, step, global_step or similar]"),
        Option(["--loss-column"], metavar="NAME", title=LOSSES,
               help="Column, key or tag of the losses  [default: loss, lm loss, train/loss or similar]"),
        root_option(),
    ],
    callback=_import,
    cancelled="cancelled; what was recorded is kept",
    failed="the import failed",
)  # fmt: skip
