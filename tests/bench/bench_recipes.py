"""How long the ten recipes take, one recorded iteration each, compared with a bare bf16 run timed next to them.

    python -m tests.bench.bench_recipes

Runs `binade batch --control-iter 1` (tiny llama32-1b, the collector's defaults) in a temporary root, and
before and after it the same bf16 run with nothing recorded. Seconds are of whole processes, Python's start included;
the ratio is of the batch to the mean of the two bare runs. By recipe: seconds of the run, and of its optimizer step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from binade.data.run.directory import list_runs
from binade.data.run.losses import read_losses
from tests.bench.bench_quantize import versions

BATCH = ("batch", "--control-iter", "1")
BARE = ("run", "--quantization", "bf16", "--control-iter", "1", "--no-save-tensors")


def timed(arguments: tuple[str, ...], root: Path) -> float:
    """Seconds of a collector's process. Ends the benchmark if it fails."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "binade", *arguments, "--tensor-save-dir", str(root)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"bench_recipes: {' '.join(command[1:])} ended with {done.returncode}")
    return time.perf_counter() - start


def main() -> None:
    print(f"{versions('cpu')}, load {os.getloadavg()[0]:.1f} before", end="\n\n")
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        before = timed(BARE, root / "bare")
        total = timed(BATCH, root / "batch")
        after = timed(BARE, root / "bare")
        print("| recipe | run, s | step, s |")
        print("|---|---|---|")
        for run in list_runs(root / "batch")[0]:
            started, finished = (
                datetime.fromisoformat(text) for text in (run.config["started"], run.status.finished or "")
            )
            (record,) = read_losses(run.directory)
            print(f"| {run.config['recipe']} | {(finished - started).total_seconds():.1f} | {record['seconds']:.1f} |")
        bare = (before + after) / 2
        print(f"\nten recipes: {total:.1f} s; bare bf16: {before:.1f} s before, {after:.1f} s after", end="; ")
        print(f"ratio {total / bare:.1f}")


if __name__ == "__main__":
    main()
