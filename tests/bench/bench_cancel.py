"""How long a running job takes to end after it was cancelled, against a kill of a bare process that trains with torch.

    python -m tests.bench.bench_cancel [--tries 5]

Each try cancels a job on one rank and one on two, and kills two bare processes: SIGTERM ends one of them at once; the
other turns it into an exception and ends as Python does, by freeing all that torch has made. The times are from the
request until no process is left; for a job, until its end is noted, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from binade.collector import jobs
from binade.collector.jobs import processes
from tests.collector.test_jobs import ENDLESS, TWO_RANKS, after_iteration, launch
from tests.conftest import until

TRAINING = """if True:
    import signal, sys, torch
    if {catches}:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1_000_000_000):
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        if step == 3:
            print("trains", flush=True)
"""


def cancelled(line: tuple[str, ...]) -> tuple[float, float]:
    """Seconds until no process of the job is left, and until its end is noted."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        job = launch(root, line)
        after_iteration(root, job, 1)
        carriers = processes.marked(root / job.run_id)
        start = time.perf_counter()
        jobs.cancel(root, job.id)
        gone = None
        while jobs.view_of(root, job).active:
            if gone is None and not any(process.alive for process in carriers):
                gone = time.perf_counter()
            time.sleep(0.002)
        end = time.perf_counter()
        until(lambda: not jobs.has_runner(root), "the runner to leave")
    return (gone or end) - start, end - start


def killed(catches: bool) -> tuple[float, float]:
    """Seconds until the bare process is gone, twice."""
    command = [sys.executable, "-c", TRAINING.format(catches=catches)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"trains\n"
        start = time.perf_counter()
        process.terminate()
        process.wait()
        seconds = time.perf_counter() - start
    return seconds, seconds


CASES = {
    "bare torch, killed by SIGTERM": lambda: killed(False),
    "bare torch, ends as Python does": lambda: killed(True),
    "job on one rank": lambda: cancelled(ENDLESS),
    "job on two ranks": lambda: cancelled(TWO_RANKS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=5)
    tries = parser.parse_args().tries
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{'seconds until':<34} {'no process is left':>24} {'its end is noted':>24}   load")
    for name, case in CASES.items():
        times = list(zip(*(case() for _ in range(tries)), strict=True))
        cells = [f"{median(column):.2f} ({min(column):.2f} to {max(column):.2f})" for column in times]
        print(f"{name:<34} {cells[0]:>24} {cells[1]:>24}   {os.getloadavg()[0]:.0f}", flush=True)


if __name__ == "__main__":
    main()
