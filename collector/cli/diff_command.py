"""binade diff."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from binade.collector.cli.output import csv_text
from binade.terminal import FAILED, CliOption, Command, print_text, resolve_root, root_option

if TYPE_CHECKING:  # they import pyarrow
    from binade.data.compare.difference import Difference, Tolerance
    from binade.data.run.directory import RunInfo

AROUND = 8  # rows shown on each side of the first difference


def _diff(run_a: str, run_b: str, root: str | None, tolerance: float | None, bitwise: bool, kind: str) -> int:
    """Find the first tensor that differs between two runs.

    RUN is the directory of a run, or its name in the root. The runs may come from two machines, versions or backends,
    or split the model across a different number of tensor-parallel ranks. Tensors are matched by iteration,
    micro-batch, layer, module, operation and name, joined across ranks, and compared in the order in which RUN_A
    computed them: by their values if both runs have them, else by their statistics. Operands of GEMMs that the runs do
    not round to the same format are listed as well. Of steps that the runs divide into other micro-batches, gradients
    of weights are compared as sums, and tensors of single micro-batches are not.

    If a run is imported, tensors are matched by layer, module and name: the two dumps may be of different tools, such
    as those of training and of inference. A tensor differs if its difference is more than its dtypes explain: twice the
    rounding error of the coarser one, and twice the largest difference before it. If the tools do not say in which
    order they computed the tensors, they are in the order of their names.

    Exit status: 0 if no tensor differs, 1 if one does or there is none to compare.
    """
    from binade.data.compare.difference import difference
    from binade.data.run.directory import RunError

    if bitwise and tolerance is not None:
        raise click.UsageError("--bitwise and --tolerance contradict each other: give one")
    a, b = _find(run_a, root), _find(run_b, root)
    comparison = difference(a, b)
    limit: Tolerance = None if bitwise else comparison.tolerance if tolerance is None else tolerance
    if not comparison.rows and not comparison.incomplete:
        raise RunError(f"{a.run_id} and {b.run_id} have no tensor in common")
    first = comparison.first(limit)
    if kind == "text":
        text = "\n".join(_lines(comparison, limit, first))
    else:
        text = csv_text([asdict(row) for row in comparison.rows]).rstrip() if comparison.rows else ""
    print_text(text)
    return 0 if first is None and comparison.rows else FAILED


def _find(name: str, root: str | None) -> RunInfo:
    from binade.data.run.directory import read_run

    directory = next((path for path in (Path(name), resolve_root(root) / name) if (path / "run.json").is_file()), None)
    if directory is None:
        raise click.UsageError(f"{name!r} is neither the directory of a run nor a run of {resolve_root(root)}")
    return read_run(directory.absolute())


def _lines(difference: Difference, limit: Tolerance, first: int | None) -> list[str]:
    from binade.data.compare.difference_text import conclusion

    rows = difference.rows
    lines = [f"note: {note}" for note in difference.notes]
    lines += [f"format: {formats}" for formats in difference.formats]
    for what, places in (
        ("only in RUN_A", difference.only_a),
        ("only in RUN_B", difference.only_b),
        ("not compared", difference.incomplete),
        ("with other shapes", [f"{row.place}: {row.shape} and {row.shape_b}" for row in rows if row.by == "shape"]),
    ):
        if places:
            lines.append(f"{len(places):,} {what}, first {places[0]}")
    values = sum(row.by == "values" for row in rows)
    lines.append(f"{len(rows):,} tensors compared: {values:,} by values, {len(rows) - values:,} by statistics")
    if not rows:
        return lines
    lines.append(conclusion(difference, limit))
    if first is None:
        return lines
    start, explained = max(0, first - AROUND), isinstance(limit, str)
    return [
        *lines,
        "",
        "  difference  explained    largest  tensor" if explained else "  difference    largest  tensor",
        *(
            f"{'>' if index == first else ' '} {row.difference:10.3e} {f'{row.limit:10.3e} ' * explained}"
            f"{_number(row.largest)}  {row.place}"
            for index, row in enumerate(rows[start : first + AROUND + 1], start)
        ),
    ]


def _number(value: float | None) -> str:
    return f"{value:10.3e}" if value is not None else "         –"


diff = Command(
    "diff",
    params=[
        click.Argument(["run_a"], metavar="RUN_A"),
        click.Argument(["run_b"], metavar="RUN_B"),
        CliOption(["--tolerance"], type=click.FloatRange(min=0), metavar="X",
               help="Largest relative difference ‖a − b‖ / ‖a‖ that counts as equal  [default: 0.03125, four units in "
                   "the last place of bfloat16: summing in a different order can cause such differences; for imported "
                   "runs, what the dtypes explain]"),
        CliOption(["--bitwise"], is_flag=True, help="Find the first tensor that differs in at least one bit"),
        CliOption(["--format", "kind"], type=click.Choice(("text", "csv")), default="text",
               help="text: the tensors around the first difference; csv: every tensor"),
        root_option(),
    ],
    callback=_diff,
    cancelled="cancelled; not every tensor was compared",
    failed="the runs cannot be compared",
)  # fmt: skip
