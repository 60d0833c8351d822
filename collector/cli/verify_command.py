"""binade verify."""

from __future__ import annotations

import click

from binade.collector.cli.console import console
from binade.data.words.text import counted
from binade.terminal import FAILED, Command, one_line, print_text, resolve_root


def _verify(root: str | None, runs: tuple[str, ...]) -> int:
    """Compare every file of the runs with its checksum.

    ROOT is the directory that contains the runs  [default: $TENSOR_SAVE_DIR, else data/runs].
    RUN is a directory in it  [default: all]. Exit status 1 if a file is damaged or missing, or has changed since it
    was imported.
    """
    from binade.data.run.verify import verify  # imports pyarrow

    with console("verify", "segment") as shown:
        verified = verify(
            resolve_root(root), runs, lambda line: shown.print(f"damaged: {one_line(line)}"), done=shown.progress
        )
    if verified.gone:
        print_text(f"{counted(verified.gone, 'imported file')} no longer there: only statistics are kept")
    if verified.torn:
        print_text(f"{counted(verified.torn, 'record')} cut short when a process was killed: left out")
    count = len(verified.damaged)
    read = f"{verified.runs} run{'s' * (verified.runs != 1)}, {verified.files} file{'s' * (verified.files != 1)} read"
    print_text(f"{read}: {count or 'none'} damaged")
    return FAILED if count else 0


verify = Command(
    "verify",
    params=[
        click.Argument(["root"], required=False, metavar="[ROOT]"),
        click.Argument(["runs"], nargs=-1, metavar="[RUN ...]"),
    ],
    callback=_verify,
    cancelled="cancelled: not every file was read",
    failed="the runs cannot be read",
)
