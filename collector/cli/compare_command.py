"""binade compare."""

from __future__ import annotations

from pathlib import Path

import click

from binade.collector.cli.output import output_options, print_or_write
from binade.terminal import Command, fail, readable_root


def _compare(root: str | None, kind: str, output: Path | None) -> None:
    """Compare the recipes of a root: loss, rounding error, gradients, storage and time.

    ROOT is the directory or URL (s3://BUCKET/FOLDER) that contains the runs  [default: $TENSOR_SAVE_DIR, else
    data/runs].
    """
    from binade.collector.cli.compare import compare  # imports pandas and DuckDB
    from binade.collector.cli.tables import render
    from binade.data.runs import RunError

    runs = readable_root(root)
    try:
        comparison = compare(runs)
    except OSError as error:
        raise RunError(f"{runs} cannot be read: {error.strerror or error}") from error
    for reason in comparison.refused:
        fail(f"skipped: {reason}")
    if not comparison.sections:
        found = "contains no runs that can be read" if runs.is_dir() else "does not exist"
        raise RunError(f"{runs} {found}: give a directory of runs, or collect some with binade batch")
    rows = sum(len(section.rows) for section in comparison.sections)
    print_or_write(render(comparison, kind), output, f"{rows} rows")


compare = Command(
    "compare",
    params=[
        click.Argument(["root"], required=False, metavar="[ROOT]"),
        *output_options(),
    ],
    callback=_compare,
    cancelled="cancelled; nothing was written",
    failed="the comparison failed",
)
