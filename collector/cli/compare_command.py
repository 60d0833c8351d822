"""binade compare."""

from __future__ import annotations

from pathlib import Path

import click

from binade.collector.cli.output import output_options, print_or_write
from binade.terminal import Command, fail, resolve_root


def _compare(root: str | None, kind: str, output: Path | None) -> None:
    """Compare the recipes of a root with bf16.

    It prints the tables of Runs › Recipes: losses, ablations and gradients.

    ROOT is the directory that contains the runs  [default: $TENSOR_SAVE_DIR, else data/runs].
    """
    from binade.collector.cli.compare import render, sections  # imports pandas and DuckDB
    from binade.data.index.catalog import Catalog
    from binade.data.run.directory import RunError

    runs = resolve_root(root, exists=True)
    nothing = f"{runs} contains no runs that can be read: give a directory of runs, or collect some with binade batch"
    if not any(runs.glob("*/run.json")):  # an index is made only where there is something to index
        raise RunError(nothing)
    try:
        with Catalog.open(runs) as opened:
            for reason in opened.refused:
                fail(f"skipped: {reason}")
            comparisons, readable = sections(opened), not opened.runs().empty
    except OSError as error:
        raise RunError(f"{runs} cannot be read: {error.strerror or error}") from error
    if not comparisons and readable:
        raise RunError(
            f"no run in {runs} states its recipe, so there is nothing to compare: import losses with --recipe"
        )
    if not comparisons:
        raise RunError(nothing)
    rows = sum(len(section.compared.recipes) for section in comparisons if section.compared)
    print_or_write(render(comparisons, kind), output, f"{rows} rows")


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
