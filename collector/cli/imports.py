"""binade import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from binade.collector.cli.console import console
from binade.collector.settings import DEFAULT_SCORES
from binade.terminal import Command, Option, fail, line_of, names, one_line, print_text, resolve_root, root_option

if TYPE_CHECKING:
    from binade.collector.imports.importer import Imported

SHOWN_REFUSALS = 10
SCORES = ",".join(DEFAULT_SCORES)


@click.pass_context
def _import(context: click.Context, directory: str, scores: tuple[str, ...], workers: int | None, root: str) -> int:
    """Index tensors that other tools have logged, without copying them.

    DIR contains .pt, .safetensors and .npy files, at any depth. Layers, tensors and iterations are recognized in logs
    of the Megatron-LM fork and in dumps of Transformer Engine (DumpTensors), msprobe and SGLang.
    """
    argv, into = context.find_root().obj, resolve_root(root)
    from binade.collector.imports.workers import prepare

    prepare("binade.collector.imports.importer")  # its processes import torch while this one does
    from binade.collector.imports.importer import import_logs

    with console("import", "file") as shown:
        result = import_logs(
            Path(directory),
            into,
            scores=scores,
            workers=workers,
            say=lambda line: shown.say(one_line(line)),
            progress=shown.progress,
            command=line_of(argv),
        )
    if result.failed:
        where = result.directory / "refused.jsonl"
        print_text("\n".join(_refusals(result)))
        return fail(f"every file of {directory} was refused; {where} says why")
    if not (result.files or result.known):
        print_text(f"there are no files in {one_line(directory)}: nothing to import")
        return 0
    added = f"{result.tensors} tensors of {result.files} files, {result.bytes / 1e6:.1f} MB in {result.seconds:.1f} s"
    lines = [f"{result.run_id}: {added if result.files else 'nothing new'}; {result.known} files already known"]
    if result.by_source:
        lines.append("by source: " + ", ".join(f"{source} {count}" for source, count in result.by_source.items()))
    print_text("\n".join([*lines, *_refusals(result)]))
    return 0


def _refusals(result: Imported) -> list[str]:
    """The refused files with the reasons; only the first ones if there are many."""
    lines = [f"    {one_line(refusal.line)}" for refusal in result.refused[:SHOWN_REFUSALS]]
    if hidden := len(result.refused) - len(lines):
        lines.append(f"    and {hidden} more: {result.directory / 'refused.jsonl'}")
    return [f"refused: {len(result.refused)}", *lines] if lines else []


import_ = Command(
    "import",
    params=[
        click.Argument(["directory"], metavar="DIR"),
        Option(["--scores"], type=names, metavar="A,B,...", default=SCORES,
               help=f"Formats to score every tensor in  [default: {SCORES}]"),
        Option(["--workers"], type=int, metavar="N", help="Number of processes  [default: one per core]"),
        root_option(),
    ],
    callback=_import,
    cancelled="cancelled; what was recorded is kept",
    failed="the import failed",
)  # fmt: skip
