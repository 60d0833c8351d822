"""How long the report of a session takes, per pin.

    python -m tests.bench.bench_pins [--pins 200] [--tensors 64] [--values 262144] [--jobs N]

The pins cycle through PINS, each for the next tensor. The report of a session with one pin, timed first, has the same
page, view and start; the ratio is of the two times. Processor time is that of the command and its renderers.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from altair.utils.schemapi import disable_debug_mode

from binade.app.report import writer
from binade.app.sessions import session, storage
from binade.app.sessions.pins import refreshed
from binade.app.sessions.session import Pin, View
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.bench.bench_report import make_root

# (page, its parameters, chart); of the pages but the tensor's, with a filter for the tensor's layer and name.
PINS = (
    ("explore", {}, "histogram"),
    ("explore", {}, "qq"),
    ("map", {"format": ["mxfp4"]}, "map"),
    ("tensor", {"format": ["mxfp4"], "view": ["why"]}, "codebook"),
    ("tensor", {"format": ["mxfp4"], "view": ["why"]}, "tokens"),
    ("tensor", {"format": ["mxfp4"], "view": ["whatif"]}, "trial_histogram"),
    ("tensor", {"format": ["mxfp4"], "view": ["blocks"]}, "block_map"),
    ("tensor", {"format": ["mxfp4"], "view": ["blocks"]}, "scales"),
)


def pins_of(catalog: Catalog) -> Iterator[Pin]:
    """Pins of all tensors that are operands, PINS of each."""
    rows = catalog.tensors()
    for row in rows[rows["contracted_axis"].notna()].to_dict("records"):
        place = {name: [str(row[name])] for name in ("layer_index", "tensor_name", "module")}
        for page, params, chart in PINS:
            yield Pin(page, params | ({"tensor": [row["tensor_id"]]} if page == "tensor" else place), chart)


def report(root: Path, pins: list[Pin], output: Path, jobs: int | None) -> tuple[float, float]:
    """(seconds, seconds of processor time) that the report of a session takes. Raises RuntimeError if a pin lacks."""
    with Catalog.open(root) as catalog:
        one = refreshed(catalog, session.new("Pins", View("map"), pins=tuple(pins)))
        saved = storage.create(root, one).session
    spent, start = processor_time(), time.perf_counter()
    with Catalog.open(root) as catalog:
        writer.make(catalog, writer.ReportRequest(output, Filter(), jobs=jobs, session=saved.id), lambda *_: None)
    seconds = time.perf_counter() - start
    if (drawn := len(list((output / "pins").iterdir()))) != len(pins):
        raise RuntimeError(f"{drawn} of {len(pins)} pins are drawn")
    return seconds, processor_time() - spent


def processor_time() -> float:
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pins", type=int, default=200)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--values", type=int, default=1 << 18, help="of a tensor")
    parser.add_argument("--jobs", type=int, help="processes that draw; by default one for each core")
    args = parser.parse_args()
    disable_debug_mode()  # as the command does
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "runs"
        root.mkdir()
        make_root(root, args.tensors, args.values)
        with Catalog.open(root) as catalog:
            pins = list(islice(pins_of(catalog), args.pins))
        output = Path(directory) / "report"
        (alone, alone_cpu), (every, cpu) = (
            report(root, some, output.with_name(f"report{len(some)}"), args.jobs) for some in (pins[:1], pins)
        )
        size = (output.with_name(f"report{len(pins)}") / "index.html").stat().st_size
    count = len(pins)
    print(f"one pin    {alone:6.1f} s, processor {alone_cpu:6.1f} s")
    ratio, megabytes = every / alone, size / 1e6
    print(f"{count:3} pins   {every:6.1f} s, processor {cpu:6.1f} s, {ratio:.1f} × one pin; HTML {megabytes:.1f} MB")
    print(f"a pin more {(every - alone) / max(count - 1, 1):6.3f} s")


if __name__ == "__main__":
    main()
