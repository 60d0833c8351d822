"""How fast a surface of layers by steps is drawn, compared with one binned by pandas from the tensors' rows.

python -m tests.bench.bench_surface [--layers 100] [--steps 10000]
"""

from __future__ import annotations

import argparse
import tempfile
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
from altair.utils.schemapi import disable_debug_mode

from binade import plots
from binade.app.questions.surfaces import compute
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.runs import DONE, RunWriter
from binade.data.segment import TABLES, TENSOR_SCHEMA, write_tables
from tests.bench.bench_quantize import timed

SEGMENT = 100_000  # tensors
ROUNDS = 5


def make_run(root: Path, layers: int, steps: int) -> str:
    """A run that has watched one tensor of each layer in each step."""
    random = np.random.default_rng(0)
    writer = RunWriter.create(root, "watched", {"recipe": "mxfp8"})
    for first in range(0, layers * steps, SEGMENT):
        numbers = np.arange(first, min(first + SEGMENT, layers * steps))
        layer, step = numbers % layers + 1, numbers // layers
        sqnr = 30 - layer / layers - step / steps * 8 + random.normal(0, 0.3, len(numbers))
        words = {
            "run_id": writer.run_id,
            "recipe": "mxfp8",
            "quant_type": "mxfp8",
            "format": "mxfp8",
            "layer_type": "linear",
        }
        words |= {"module": "fc1", "component": "linear", "operation": "forward", "phase": "pre"}
        words |= {"tensor_name": "input", "micro_batch": 0, "rank": 0, "numel": 1 << 20, "dtype": "bfloat16"}
        words |= {"nbytes": 2 << 20, "zeros": 0, "nans": 0, "infs": 0, "captured": datetime(2026, 1, 1)}
        columns = {
            "tensor_id": pa.array([f"r00-{number:08d}" for number in numbers]),
            "layer_index": layer,
            "iteration": step,
            "sqnr_db": sqnr,
            "absmax": 2.0 ** random.normal(3, 1, len(numbers)),
        }
        arrays = []
        for field in TENSOR_SCHEMA:
            given = columns.get(field.name)
            if given is None:
                given = pa.repeat(pa.scalar(words.get(field.name), field.type), len(numbers))
            arrays.append(pa.array(given).cast(field.type) if isinstance(given, np.ndarray) else given.cast(field.type))
        tables = {name: schema.empty_table() for name, schema in TABLES.items()}
        tables["tensor"] = pa.Table.from_arrays(arrays, schema=TENSOR_SCHEMA)
        write_tables(writer.directory / "segments" / writer.next_segment_name(), tables)
    writer.update(tensors=layers * steps, tensors_without_raw=layers * steps)
    writer.finish(DONE)
    return writer.run_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    disable_debug_mode()  # as `app serve` does
    with tempfile.TemporaryDirectory() as directory:
        run = make_run(Path(directory), args.layers, args.steps)
        with Catalog.open(directory) as catalog:
            where = Filter(run_id=(run,), module=("fc1",), tensor_name=("input",))
            width = int(compute.surface(catalog, where, "sqnr_db").eval("last - iteration").iloc[0]) + 1

            def by_pandas() -> None:
                rows = catalog._frame("SELECT layer_index, iteration, sqnr_db, tensor_id FROM tensor")
                rows = rows.assign(cell=rows["iteration"] // width)
                rows.loc[rows.groupby(["layer_index", "cell"])["sqnr_db"].idxmin()]

            def drawn() -> None:
                assert plots.surfaces(catalog).prepared().figures

            took: dict[str, list[float]] = {"drawn": [], "by pandas": []}
            for _ in range(ROUNDS):
                took["drawn"].append(timed(drawn, "cpu"))
                took["by pandas"].append(timed(by_pandas, "cpu"))
            cells = len(compute.surface(catalog, where, "sqnr_db"))
    ours, theirs = (sorted(times)[ROUNDS // 2] for times in took.values())
    print(f"surface {args.layers} layers, {args.steps:,} steps, {cells:,} cells: question and chart {ours:.3f} s,")
    print(f"        rows fetched and binned by pandas {theirs:.3f} s, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
