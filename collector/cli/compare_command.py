"""binade compare."""

from __future__ import annotations

from pathlib import Path

import click

from binade.terminal import Command, Option, fail, print_text, readable_root


def _compare(root: str | None, kind: str, output: Path | None) -> None:
    """Compare the recipes of a root: loss, rounding error, gradients, storage and time.

    ROOT is the directory or URL (s3://BUCKET/FOLDER) that contains the runs  [default: $TENSOR_SAVE_DIR, else
    data/runs].
    """
    from binade.collector.cli.compare import compare  # imports pandas and DuckDB
    from binade.collector.cli.tables import render
    from binade.data.runs import RunError
    from binade.data.store import write_atomic

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
    written = render(comparison, kind)
    if output is None:
        print_text(written.removesuffix("\n"))
        return
    target = output.resolve()  # writes through a link instead of replacing it
    try:
        if target.exists() and not target.is_file():
            raise RunError(f"{output} is not a regular file: choose another path for --output")
        write_atomic(target, written.encode(errors="backslashreplace"))
    except OSError as error:
        raise RunError(f"cannot write {output}: {error.strerror or error}; give another file to --output") from error
    print_text(f"{sum(len(section.rows) for section in comparison.sections)} rows written to {output}")


compare = Command(
    "compare",
    params=[
        click.Argument(["root"], required=False, metavar="[ROOT]"),
        Option(["--format", "kind"], type=click.Choice(("text", "csv", "markdown")), default="text",
               help="Format of the output  [default: text]"),
        Option(["--output"], type=Path, metavar="FILE", help="Write to FILE instead of the terminal"),
    ],
    callback=_compare,
    cancelled="cancelled; nothing was written",
    failed="the comparison failed",
)  # fmt: skip
