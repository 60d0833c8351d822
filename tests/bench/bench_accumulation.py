"""How much error the additions of tensor cores add to that of rounding the operands.

    python -m tests.bench.bench_accumulation [FOLDER]

Prints the SQNR in dB, for 64 rows and 64 columns, of random operands (normal, and their magnitudes, whose sums do not
cancel) by the number of products in a sum. `operands` is the SQNR of the result when the rounded operands are added
exactly; the other columns are the SQNR of the addition alone. With FOLDER, a root, it prints the same of the results
recorded there: the median over the linear layers of the last iteration of the newest run of each recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pandas as pd
import torch

from binade.app.measures.accumulation import MissingError, accumulated, compared, lines
from binade.app.questions.shared.scope import scoped
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from binade.data.words.text import markdown_table
from binade.quant.accumulation import ACCUMULATORS
from binade.quant.specs import Spec

SPECS = ("fp8_e4m3", "fp8_e4m3(block=1x128)", "mxfp8")
SUMS = (128, 512, 2048, 8192)
TITLES = [how.title for how in ACCUMULATORS.values()]


def line(table: pd.DataFrame) -> list[str]:
    """The SQNR of the result with exact addition, and those of the additions; – where scales cannot be applied."""
    sums = table.set_index("title")["sums_db"]
    exact = table.set_index("title")["result_db"]["exact"]
    return [f"{exact:.1f}", *(f"{sums[title]:.1f}" if title in sums else "–" for title in TITLES)]


def of_random() -> Iterator[list[str]]:
    for spec in map(Spec.of, SPECS):
        for kind, of in {"normal": lambda x: x, "magnitudes": torch.abs}.items():
            for k in SUMS:
                draw = torch.Generator().manual_seed(0)
                a, b = (lines(of(torch.randn(64, k, generator=draw)), spec) for _ in range(2))
                yield [str(spec), kind, f"{k:,}", *line(compared(a, b)[0])]


def of_recorded(root: Path) -> Iterator[list[str]]:
    with Catalog.open(root) as catalog:
        for recipe in catalog.runs()["recipe"].unique():
            results = catalog.results(scoped(catalog, Filter(recipe=(recipe,))))
            for gemm, group in results[results["part"] == "linear"].groupby("gemm"):
                tables = []
                for tensor_id in group["tensor_id"]:
                    with suppress(MissingError):
                        tables.append(accumulated(catalog, tensor_id)[0])
                if tables:
                    median = pd.concat(tables).groupby("title", as_index=False).median()
                    yield [recipe, str(gemm), f"{len(tables)} of {len(group)} results", *line(median)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="FOLDER", nargs="?", type=Path)
    root = parser.parse_args().root
    rows = of_recorded(root) if root else of_random()
    names = ["recipe", "GEMM", ""] if root else ["format", "values", "products"]
    print(markdown_table([*names, "operands", *TITLES], rows, "lll" + "r" * (len(TITLES) + 1)))
