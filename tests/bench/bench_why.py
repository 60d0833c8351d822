"""What the question "Why" costs for one large float32 tensor that is mapped from a file: processor time, and memory
beyond the mapping, compared with the same figures and totals computed from a whole tensor, its first GB at most, in
plain torch.

python -m tests.bench.bench_why [--gb 1] [--format mxfp4]
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from binade.app.questions.shared.selection import SelectedTensor
from binade.app.questions.why import question
from binade.data.run.store import sha256
from binade.data.run.tensor_files import load
from binade.data.words.filter import Filter
from binade.quant import fake_quantize
from binade.quant.specs import Spec

GB = 1 << 30
CHANNELS = 4096
CELLS = 400
LOOK = 0.01  # seconds between looks at the memory


class Alone(SelectedTensor):
    """A tensor of no catalog."""

    @property
    def labels(self) -> dict[str, str]:
        return {"t": "weight"}


def anonymous() -> int:
    """Bytes in memory that belong to no file."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def measured(compute: Callable[[], object]) -> tuple[float, float, int]:
    """Seconds of the processor and of the clock, and the most bytes beyond those of before."""
    before, most, over = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(LOOK):
            most = max(most, anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, clock = time.process_time(), time.monotonic()
    compute()
    took = time.process_time() - start, time.monotonic() - clock
    over.set()
    watcher.join()
    return *took, most


def plain(x: Tensor, spec: str) -> None:
    """The largest magnitude by channel and by cell, and the sums of squares of values and errors."""
    magnitudes = x.abs()
    magnitudes.amax(0)
    torch.nn.functional.adaptive_max_pool2d(magnitudes[None], (CELLS, CELLS))
    del magnitudes
    rounded = fake_quantize(x, spec)
    error = rounded - x
    _ = x.square().sum(dtype=torch.float64), error.square().sum(dtype=torch.float64)
    _ = ((x != 0) & (rounded == 0)).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1)
    parser.add_argument("--format", default="mxfp4")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pt"
        rows = int(args.gb * GB) // 4 // CHANNELS
        torch.save({"tensor": torch.randn(rows, CHANNELS, generator=torch.Generator().manual_seed(1))}, path)
        x = load(path)
        summary = {"absmax": 6.0, "rms": 1.0, "absmin": 1e-9, "kurtosis": 3.0, "zeros": 0, "numel": x.numel()}
        file = {"dtype": "float32", "shape": list(x.shape), "sha256": sha256(path)}
        row = pd.Series({"contracted_axis": -1, "tensor_id": "t", **file, **summary})

        def why(values: Tensor) -> None:
            question.draw(Alone(None, Filter(), row=row, x=values, spec=Spec.of(args.format)), {})

        why(x[: 1 << 13])  # builds the kernel, and imports
        first = x[: min(rows, GB // 4 // CHANNELS)]
        found = {
            "checksum, once per file": (x, measured(lambda: load(path, row))),
            "Why": (x, measured(lambda: why(x))),
            "plain torch": (first, measured(lambda: plain(first, args.format))),
        }
        print(f"{args.format}, {torch.get_num_threads()} threads")
        print(f"{'':26}{'GB':>6}{'CPU s':>8}{'s':>8}{'CPU s / GB':>12}{'MB beyond the mapping':>24}")
        for name, (values, (cpu, clock, most)) in found.items():
            size = values.nbytes / GB
            print(f"{name:26}{size:6.2f}{cpu:8.2f}{clock:8.2f}{cpu / size:12.2f}{most / 1e6:24.0f}")


if __name__ == "__main__":
    main()
