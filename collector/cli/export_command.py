"""binade export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from binade.filter_options import filter_of, filter_params
from binade.terminal import CliOption, Command, fail, names, print_text, resolve_root, root_option

# data.export declares these; it imports pyarrow, and --help does not wait for it.
TARGETS = ("tensorboard", "wandb", "csv", "parquet", "tables")
METRICS = (
    "What to write: loss, histogram; of each tensor: min, max, mean, std, rms, absmax, absmin, skewness, kurtosis, "
    "zeros, nans, infs; of GEMM results: result_sqnr_db; of each tensor in each scored format: sqnr_db, mse, "
    "relative_error, cosine, projection, max_abs_error, flush_to_zero, underflow_of_all, saturated, "
    "flushed_error_share, saturated_error_share, sqnr_vs_normal"
)
DEFAULT = "loss, histogram, absmax, kurtosis, sqnr_db, flush_to_zero, saturated, result_sqnr_db"


def _export(
    root: str | None, to: str, output: Path, metrics: tuple[str, ...], formats: tuple[str, ...], **filters: Any
) -> None:
    """Export metrics, histograms or tables.

    Metrics and histograms by layer and iteration are written for TensorBoard, Weights & Biases or pandas; the tables of
    the index are written as Parquet.
    """
    from binade.data.exchange import export
    from binade.data.index.catalog import Catalog  # imports DuckDB

    choice = export.Choice(metrics, formats, filter_of(filters))
    runs_root = resolve_root(root, exists=True)
    export.check(to, output, choice)
    with Catalog.open(runs_root) as catalog:
        for reason in catalog.refused:
            fail(f"skipped: {reason}")
        done = export.export(catalog, to, output, choice)
    runs = f"{done.runs} run{'s' * (done.runs != 1)}"
    if to == export.TABLES:
        print_text(f"{runs} with {done.values} tensors written to {output}")
    else:
        print_text(f"{runs}, {done.values} values and {done.histograms} histograms written to {output}")


export = Command(
    "export",
    params=[
        CliOption(["--to"], type=click.Choice(TARGETS), required=True, help="Target of the export"),
        CliOption(["--output"], type=Path, required=True, metavar="DIR",
               help="New directory; each run gets a subdirectory"),
        CliOption(["--metrics"], type=names, default=DEFAULT, metavar="A,B,...",
               help=METRICS),
        CliOption(["--formats"], type=names, default="", metavar="A,B,...", help="Export errors of these formats only"),
        root_option(),
        *filter_params(),
    ],
    callback=_export,
    cancelled="cancelled: nothing was written",
    failed="the export failed",
)  # fmt: skip
