"""binade import."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from binade.collector.cli.console import console
from binade.collector.imports.model_paths import KINDS
from binade.collector.settings import DEFAULT_SCORES
from binade.data.words.text import counted
from binade.terminal import (
    CliOption,
    Command,
    fail,
    line_of,
    names,
    one_line,
    print_text,
    resolve_root,
    root_option,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from binade.collector.imports.files import TensorFiles
    from binade.collector.imports.importer import ImportResult
    from binade.collector.imports.losses import LossLog, Training

SHOWN_REFUSALS = 10
SCORES = ",".join(DEFAULT_SCORES)


OF_TENSORS = ("scores", "workers", "kind")
OF_LOSSES = ("recipe", "like", "model", "dataset", "seed", "name", "step_column", "loss_column", "rows", "repeats",
             "loss_unit")  # fmt: skip
START = ("model", "dataset", "seed")
QUESTIONS = {"model": "Model", "dataset": "Dataset", "seed": "Seed"}


@click.pass_context
def _import(context: click.Context, /, path: Path, root: str, dry_run: bool, **options: Any) -> int:
    """Index tensors that other tools logged, and import losses.

    PATH is a file or a directory, which is searched at any depth. Files are recognized by their content.

    Tensors are in .pt, .pth, .bin, .ckpt, .safetensors, .npy and .npz files. Layers, tensors and iterations are
    recognized in logs of the Megatron-LM fork, in dumps of Transformer Engine (DumpTensors), msprobe and SGLang, and in
    checkpoints. Statistics that Transformer Engine or msprobe logged without values are indexed, too.

    Losses are in logs of the Trainer of Hugging Face, Megatron, TensorBoard, W&B and others. Each training becomes a
    run.
    """
    from binade.collector.errors import ConfigError
    from binade.collector.imports.files import checked, tensor_files, walk
    from binade.collector.imports.losses import find_logs
    from binade.collector.imports.readers.registry import looked_for
    from binade.data.run.access import check_writable

    if not dry_run:
        check_writable("importing")  # before a directory is searched, which may take minutes
    if not os.path.exists(os.path.expanduser(path)):  # of pathlib, both may raise
        raise ConfigError(f"{path} does not exist: expected a directory of tensors, or a loss log")

    def chosen(options: tuple[str, ...]) -> list[str]:
        return [name for name in options if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]

    def only_for(name: str, kind: str, reason: str) -> ConfigError:
        return ConfigError(f"--{name.replace('_', '-')} is for {kind}, but {reason}")

    command, into = line_of(context.find_root().obj), resolve_root(root)
    walked = walk(path, into)
    logs = find_logs(walked)
    of_losses, of_tensors = chosen(OF_LOSSES), chosen(OF_TENSORS)
    if of_losses and not logs:
        raise only_for(of_losses[0], "losses", f"{path} has no loss log; looked for: {looked_for()}")
    if of_losses and of_tensors:
        raise only_for(of_tensors[0], "tensors", f"--{of_losses[0].replace('_', '-')} is for losses: give one of them")
    if not logs:
        checked(path, into)
    files, refused = tensor_files(walked, [file for log in logs for file in log.files])
    if of_losses or not walked.source.is_dir() or walked.source == into.resolve():
        files = []  # the losses alone
    if of_tensors and logs and not files:
        raise only_for(of_tensors[0], "tensors", f"{path} has losses alone")
    statuses = []
    if logs and not of_tensors:
        settings = {name: options[name] for name in OF_LOSSES}
        statuses.append(_losses(path, into, command, logs, dry_run, bool(files), **settings))
    if dry_run:
        totals = [f"{counted(len(files), 'tensor file')} in {one_line(str(path))}"] * bool(files)
        if lines := [*totals, *(f"not read: {one_line(refusal.line)}" for refusal in refused)]:
            print_text("\n".join(lines))
        if not (files or logs):
            raise ConfigError(f"{path} has no tensor file and no loss log; looked for: {looked_for()}")
    elif files or not logs:
        settings = {name: options[name] for name in OF_TENSORS}
        statuses.append(_tensors(path, into, command, (files, refused), **settings))
    elif refused:
        print_text(f"{counted(len(refused), 'other file')} not read: --dry-run says why")
    return max(statuses, default=0)


def _losses(
    path: Path,
    root: Path,
    command: str,
    logs: Sequence[LossLog],
    dry_run: bool,
    with_tensors: bool,
    recipe: str | None,
    like: str | None,
    name: str | None,
    step_column: str | None,
    loss_column: str | None,
    rows: tuple[tuple[str, str], ...],
    repeats: str | None,
    loss_unit: str | None,
    **start: Any,
) -> int:
    """with_tensors: whether there are tensors, which are imported even if no log can be read."""
    from binade.collector.errors import ConfigError
    from binade.collector.imports.losses import import_trainings, read_logs, refusal
    from binade.collector.imports.readers.series import UNITS, Columns, Repeats
    from binade.data.compare.same_data import unknown
    from binade.data.run.directory import IMPORT

    facts = _like(like, root, start) if like is not None else dict(start)
    columns = Columns(
        step_column, loss_column, rows, Repeats(repeats) if repeats else None, UNITS[loss_unit] if loss_unit else None
    )
    read = read_logs(logs, columns, print_text)
    refused = [f"refused: {reason}" for _, reason in read.refused[: None if dry_run else SHOWN_REFUSALS]]
    if (hidden := len(read.refused) - len(refused)) > 0:
        refused.append(f"refused: {hidden:,} more")
    if not read.trainings:
        if with_tensors or len(refused) > 1:
            print_text("\n".join(map(one_line, refused)))
        if with_tensors:
            return fail(f"no loss log of {path} can be read")
        raise ConfigError(refusal(path, read))
    if like is None and not dry_run and sys.stdin.isatty() and sys.stderr.isatty():
        facts |= _asked(path, [option for option, value in start.items() if value is None])
    if dry_run:
        runs = [f"{training.place}: {training.log.reader.kind}" for training in read.trainings]
    else:
        runs = import_trainings(read.trainings, root, recipe=recipe, start=facts, name=name, command=command)
    lines = [line for run, training in zip(runs, read.trainings, strict=True) for line in _of_training(run, training)]
    lines += [f"left out: {part.place}: {whole.place} has all of its losses" for part, whole in read.contained]
    lines += refused
    missing = [f"--{option}" for option in ("recipe", *START) if {"recipe": recipe, **facts}.get(option) is None]
    if like is not None:
        why = unknown({"kind": IMPORT, **facts}, None)
        missing = [*missing[: recipe is None], *([f"a run other than {like}, of which {why}"] if why else [])]
    if missing and not dry_run:
        lines.append(f"not compared with other runs: that needs {', '.join(missing)}, the same as for its bf16 run")
    print_text("\n".join(map(one_line, lines)))
    if read.refused or any(training.series.damaged for training in read.trainings):
        return fail(
            f"a part of {path} is damaged and was not read; the losses above are imported"
            if not dry_run
            else f"a part of {path} cannot be read"
        )
    return 0


def _like(name: str, root: Path, start: dict[str, Any]) -> dict[str, Any]:
    """What an import is given of the run that it is like. Raises UsageError for a run that does not exist."""
    from binade.data.compare.same_data import like
    from binade.data.run.directory import read_run
    from binade.data.run.losses import first_step

    if given := [f"--{option}" for option, value in start.items() if value is not None]:
        raise click.UsageError(f"--like takes the model, data and seed of {name}: leave out {', '.join(given)}")
    if Path(name).name != name or not (root / name / "run.json").is_file():
        raise click.UsageError(f"--like {name!r} is not a run of {root}: expected the name of its directory")
    run = read_run(root / name)
    of_start = {option: run.config.get(option) for option in START}
    return of_start | {"like": like(name, run.config, first_step(run.directory))}


def _asked(path: Path, options: list[str]) -> dict[str, str | int]:
    """The answers to one question for each of these options; without those that are left empty."""
    if options:
        click.echo(f"{one_line(str(path))} does not say what was trained on what. Press Enter for unknown.", err=True)
    answers: dict[str, str | int] = {}
    for option in options:
        kind = _number if option == "seed" else str
        answer = click.prompt(QUESTIONS[option], default="", show_default=False, value_proc=kind, err=True)
        answers |= {option: answer} if answer != "" else {}
    return answers


def _row_choice(context: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    chosen = []
    for text in values:
        column, equals, value = text.partition("=")
        if not (column and equals):
            raise click.BadParameter(f"{text!r} is not COLUMN=VALUE")
        chosen.append((column, value))
    return tuple(chosen)


def _number(text: str) -> int | str:
    try:
        return int(text) if text.strip() else ""
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a whole number") from None


def _of_training(run: str, training: Training) -> list[str]:
    """What was read of a training, and what was not. run: the id of its run, or its log."""
    series = training.series
    first, last = min(series.losses), max(series.losses)
    lines = [f"{run}: {len(series.losses):,} losses ({series.title}), {series.step_name} {first} to {last}"]
    details = [*series.facts]
    if series.others:
        details.append(f"not read: {', '.join(series.others)}; --step-column and --loss-column choose a column")
    if series.empty:
        details.append(f"{counted(series.empty, 'row')} left out: {series.name} is empty")
    details += [f"left out: {what}" for what in series.cut]
    details += [f"not read: {what}" for what in series.damaged[:SHOWN_REFUSALS]]
    if (hidden := len(series.damaged) - SHOWN_REFUSALS) > 0:
        details.append(f"not read: {hidden:,} more")
    return [*lines, *(f"    {detail}" for detail in details)]


def _tensors(
    path: Path,
    root: Path,
    command: str,
    files: TensorFiles,
    scores: tuple[str, ...],
    workers: int | None,
    kind: str | None,
) -> int:
    from binade.collector.imports.workers import prepare

    prepare("binade.collector.imports.file_rows")  # its processes import torch while this one does
    from binade.collector.imports.importer import import_logs

    with console("import", "file") as shown:
        result = import_logs(
            path,
            root,
            scores=scores,
            workers=workers,
            kind=kind,
            say=lambda line: shown.say(one_line(line)),
            progress=shown.progress,
            command=command,
            files=files,
        )
    if result.failed:
        print_text("\n".join(_refusals(result)))
        return fail(f"every file of {path} was refused: nothing is imported")
    if not result.files:
        print_text(f"there are no files in {one_line(str(path))}: nothing to import")
        return 0
    size = f"{result.bytes / 1e6:.1f} MB in {result.seconds:.1f} s"
    lines = [f"{result.run_id}: {result.tensors} tensors of {result.files} files, {size}"]
    lines += [f"{run} is kept: it has files that cannot be read any more" for run in result.kept]
    if result.by_source:
        lines.append("by source: " + ", ".join(f"{source} {count}" for source, count in result.by_source.items()))
    if result.unnamed:
        lines.append(
            f"{counted(result.unnamed, 'tensor')} named after a module only: --kind {', '.join(KINDS)} says what it is"
        )
    print_text("\n".join([*lines, *_refusals(result)]))
    return 0


def _refusals(result: ImportResult) -> list[str]:
    """The refused files, and what was left out of others, with the reasons; only the first ones if there are many."""
    lines = []
    for title, of_left_out in (("refused", False), ("left out", True)):
        refusals = [refusal for refusal in result.refused if refusal.is_left_out == of_left_out]
        lines += [f"{title}: {len(refusals)}"] * bool(refusals)
        lines += [f"    {one_line(refusal.line)}" for refusal in refusals[:SHOWN_REFUSALS]]
        if (hidden := len(refusals) - SHOWN_REFUSALS) > 0:
            where = f": {result.directory / 'refused.jsonl'}" if result.run_id else ""
            lines.append(f"    and {hidden} more{where}")
    return lines


TENSORS, LOSSES = "Options for tensors", "Options for losses"
import_ = Command(
    "import",
    params=[
        click.Argument(["path"], type=Path, metavar="PATH"),
        CliOption(["--dry-run"], is_flag=True, help="List what is recognized, and import nothing"),
        CliOption(["--scores"], type=names, metavar="A,B,...", default=SCORES, title=TENSORS,
               help="Formats to score every tensor in"),
        CliOption(["--workers"], type=int, metavar="N", title=TENSORS,
               help="Number of processes  [default: one per core]"),
        CliOption(["--kind"], type=click.Choice([*KINDS]), title=TENSORS,
               help="What the tensors are whose names do not say it, of linear layers"),
        CliOption(["--recipe"], metavar="NAME", title=LOSSES,
               help="What the training was quantized to; bf16 for the baseline that others are compared with"),
        CliOption(["--like"], metavar="RUN", title=LOSSES,
               help="A run of the root with the same model, data and seed: they are compared"),
        CliOption(["--model"], metavar="NAME", title=LOSSES, help="The model"),
        CliOption(["--dataset"], metavar="NAME", title=LOSSES, help="The data"),
        CliOption(["--seed"], type=int, metavar="N", title=LOSSES,
               help="The seed. Runs are compared if they have the same model, dataset and seed"),
        CliOption(["--name"], metavar="TEXT", title=LOSSES, help="Name of the run in the app"),
        CliOption(["--step-column"], metavar="NAME", title=LOSSES,
               help="Column or key of the steps  [default: iteration, step, global_step or similar]"),
        CliOption(["--loss-column"], metavar="NAME", title=LOSSES,
               help="Column, key or tag of the losses  [default: loss, lm loss, train/loss or similar]"),
        CliOption(["--rows"], metavar="COLUMN=VALUE", multiple=True, callback=_row_choice, title=LOSSES,
               help="Read only the rows in which a column has this value; may be given several times"),
        CliOption(["--repeats"], type=click.Choice(["last", "first", "mean", "continue"]), title=LOSSES,
               help="What several losses of one step are: the last or first one counts, their mean, or epochs, of "
               "which each continues the one before  [default: as the log shows]"),
        CliOption(["--loss-unit"], type=click.Choice(["nats", "unknown"]), title=LOSSES,
               help="Unit of the losses: nats per token, or unknown  [default: as the log shows]"),
        root_option(),
    ],
    callback=_import,
    cancelled="cancelled; what was imported before is kept",
    failed="the import failed",
)  # fmt: skip
