"""How fast the page Explore answers, compared with a baseline timed in the same run.

    python -m tests.bench.bench_explore [--values 268435456] [--tensors 10000]

huge    the first click on a float32 tensor on disk: statistics (from the index), histogram and Q-Q plot, against
        np.histogram plus torch's mean and standard deviation of the same tensor; and the memory that it takes beyond
        the file's own pages
index   from 500 tensors to the first figure, from the index alone
filter  a change of the filter over 10,000 indexed tensors: the work of the server for Explore, and for the Map
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

import numpy as np
import torch
from altair.utils.schemapi import disable_debug_mode

from binade.app.questions.shared import distribution_charts, distributions
from binade.app.questions.shared.quantile_plots import against_law, points_of
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.run.store import encode, write_atomic
from binade.data.run.tensor_files import load
from binade.data.words.filter import Filter
from tests.bench.bench_quantize import timed
from tests.bench.make_root import make_root


def huge(directory: Path, values: int) -> None:
    path = directory / "huge.pt"
    random = torch.Generator().manual_seed(0)
    write_atomic(path, encode(torch.randn(values // 4096, 4096, generator=random), {}, {}))
    x = load(path)
    moments = 0.0, 1.0  # the index has them

    def first_click() -> None:
        d = distributions.distribution_of("x", x, moments)
        distribution_charts.magnitudes(distributions.log2_histogram([d]), "tensor", "x").to_dict()
        distribution_charts.qq(points_of([against_law(d, "normal")]), "x", "a normal").to_dict()

    def usual() -> None:
        np.histogram(x.numpy(), 100)
        x.mean(), x.std()

    usual()  # the file's pages are in memory for both
    before = resident()
    ours = [timed(first_click, "cpu") for _ in range(3)]
    grown = resident() - before
    theirs = [timed(usual, "cpu") for _ in range(3)]
    a, b = sorted(ours)[1], sorted(theirs)[1]
    print(f"huge    {values / 1e6:.0f} M float32: {a:.2f} s, np.histogram + mean + std {b:.2f} s, ratio {a / b:.2f}")
    print(f"        memory beyond the file {grown / 1e6:.0f} MB")


def resident() -> float:
    """Bytes of memory that are the process's own (not pages of files)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return float(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def root_of(directory: str, tensors: int) -> Path:
    make_root(Path(directory), tensors, runs=4)
    return Path(directory)


def first_figure(root: Path) -> float:
    with Catalog.open(root):
        pass  # the index is built once, by who collects or first opens it

    def figure() -> None:
        with Catalog.open(root) as catalog:
            found = distributions.distributions(catalog, Filter(), "quant_type")
            distribution_charts.magnitudes(distributions.log2_histogram(found), "quant type", "x").to_dict()

    return timed(figure, "cpu")


def filter_change(root: Path) -> dict[str, float]:
    with Catalog.open(root) as catalog:
        where = Filter(operation=["forward"], layer_index=[1, 2, 3, 4])

        def explore() -> None:
            catalog.facets(), catalog.facets(where), catalog.totals(where)
            View("explore").filtered(where).draw(catalog)

        def atlas() -> None:
            catalog.facets(), catalog.facets(where)
            View("map", {"format": ["mxfp4"]}).filtered(where).draw(catalog)

        explore(), atlas()
        return {"Explore": timed(explore, "cpu"), "Map": timed(atlas, "cpu")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=1 << 28, help="of the huge tensor")
    parser.add_argument("--tensors", type=int, default=10_000, help="indexed, for the filter")
    args = parser.parse_args()
    disable_debug_mode()  # as `app serve` does
    with tempfile.TemporaryDirectory() as directory:
        huge(Path(directory), args.values)
    with tempfile.TemporaryDirectory() as directory:
        took = first_figure(root_of(directory, 500))
        print(f"index   500 tensors to the first figure: {took:.3f} s")
    with tempfile.TemporaryDirectory() as directory:
        for page, took in filter_change(root_of(directory, args.tensors)).items():
            print(f"filter  {args.tensors:,} tensors, {page}: {took:.3f} s")


if __name__ == "__main__":
    main()
