"""Memory, segments and index of a long watched run as it progresses; optionally, it is killed in the middle.

    python -m tests.bench.bench_long [--iterations 20000] [--kill]

The table has a row for each tenth of the run: iterations, resident memory of the process that trains, segments on the
disk, rows in them and bytes of the index. With --kill the process is killed at the middle and resumed.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen

from binade.data.index.catalog import Catalog
from binade.data.run.directory import list_runs
from tests.conftest import start_python

STEPS = 20  # of which one is watched
OPTIONS = (
    "--layers", "1", "--micro-batch-size", "1", "--sequence-length", "16", "--backend", "torch", "--scores", "",
    "--quantization", "mxfp8", "--control-iter", "1", "--no-raw", "--watch", f"every {STEPS} steps",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """iteration: the last one that is done; resident in MiB; index in bytes."""

    iteration: int
    resident: float
    segments: int
    rows: int
    index: int


def sample(root: Path, process: Popen[str]) -> Sample:
    """Of one moment: the process is stopped meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        (run,) = list_runs(root)[0]
        with Catalog.open(root) as catalog:
            rows = catalog.totals().tensors
    finally:
        process.send_signal(signal.SIGCONT)
    index = (root / "index.duckdb").stat().st_size
    mebibytes = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return Sample(run.status.iteration + 1, mebibytes, len(run.segments), rows, index)


def measure(root: Path, iterations: int, *, kill: bool = False, samples: int = 10) -> Iterator[Sample]:
    """Train, and sample at each of these shares of the run."""
    every = max(1, iterations // (2 * samples))
    line = ("run", *OPTIONS, "--train-iters", str(iterations), "--checkpoint-every", str(every))
    taken = 0
    process = start_python("-m", "binade", *line, "--tensor-save-dir", root, stdout=DEVNULL)
    try:
        while process.poll() is None:
            time.sleep(0.05)
            runs = list_runs(root)[0]
            done = runs[0].status.iteration + 1 if runs else 0
            if done >= iterations * (taken + 1) // (samples + 1) and taken < samples:
                yield sample(root, process)
                taken += 1
                if kill and taken == samples // 2:
                    process.kill()
                    process.communicate()
                    again = ("run", "--resume", runs[0].run_id, "--tensor-save-dir", root)
                    process = start_python("-m", "binade", *again, stdout=DEVNULL)
        assert process.returncode == 0, process.communicate()[1]
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--kill", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        print("| iterations | resident, MiB | segments | rows | index, MiB |\n|---|---|---|---|---|")
        for each in measure(Path(root), given.iterations, kill=given.kill):
            print(
                f"| {each.iteration:,} | {each.resident:.0f} | {each.segments:,} | {each.rows:,} "
                f"| {each.index / (1 << 20):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
