"""The siege: attacks that nothing of Binade may give way to.

    python -m tests.siege --minutes 30 [--only NAME] [--seed N] [--try K] [--markdown FILE]

Each attack runs in a process of its own, two at a time, until it has made its tries or its share of the time is over.
Exit status 1 if any try failed; the lines under the table repeat each one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from binade.data.text import markdown_table
from tests.siege.attack import ATTACKS, FULL, Attack, Outcome, besiege

# Modules with attacks, which register themselves. Those of damaged values and checksums come as "integrity".
MODULES = ("files", "statements", "addresses", "archives", "kills", "queue", "disks", "soak")
GRACE = 60.0  # seconds beyond its time after which an attack is ended that makes no progress


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.siege", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=FULL, help="the number of tries is in proportion")
    parser.add_argument("--only", action="append", choices=sorted(ATTACKS), metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--try", type=int, dest="number", help="only this try, in this process")
    parser.add_argument("--workers", type=int, default=2, help="attacks at a time")
    parser.add_argument("--markdown", type=Path, help="also write the table there")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)  # with runs; what the other processes get
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    return parser


def _run(chosen: Attack, given: argparse.Namespace, root: Path, end: float, left: dict[str, Attack]) -> Outcome:
    """The attack in a process of its own. left: those that have not begun, between which the time until `end` is
    divided."""
    shares = sum(each.share for each in left.values())
    del left[chosen.name]
    now = time.monotonic()
    deadline = now + max(0.0, end - now) * min(1.0, given.workers * chosen.share / shares)
    command = [sys.executable, "-m", "tests.siege", "--only", chosen.name, "--root", str(root)]
    command += ["--seed", str(given.seed), "--minutes", str(given.minutes), "--deadline", str(deadline)]
    outcome = Outcome()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout
            timer = threading.Timer(max(deadline - time.monotonic(), 0) + chosen.seconds + GRACE, process.kill)
            timer.start()
            for line in process.stdout:
                outcome = Outcome(**json.loads(line))
            timer.cancel()
        if process.wait():
            errors.seek(0)
            said = errors.read().strip().splitlines() or [""]
            outcome.failures.append((outcome.tried, "", f"its process ended with {process.returncode}: {said[-1]}"))
            outcome.tried += 1
    print(f"{chosen.name}: {outcome.tried} tried, {len(outcome.failures)} failed, {outcome.seconds:.0f} s", flush=True)
    return outcome


def _table(outcomes: dict[str, Outcome]) -> str:
    rows = [
        (name, ATTACKS[name].holds, f"{found.tried:,}", f"{len(found.failures):,}", f"{found.seconds:.0f} s")
        for name, found in outcomes.items()
    ]
    return markdown_table(("Attack", "What must hold", "Tried", "Failed", "Took"), rows, left=2)


def _collect(root: Path) -> None:
    from tests.conftest import collect_recipes

    collect_recipes(root)


def main() -> int:
    for module in MODULES:
        import_module(f"tests.siege.{module}")
    given = _options().parse_args()
    names = given.only or sorted(ATTACKS, key=lambda name: -ATTACKS[name].share)  # the long ones first
    tries = {name: max(1, math.ceil(ATTACKS[name].tries * given.minutes / FULL)) for name in names}
    if given.deadline is not None or given.number is not None:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            root = given.root or Path(folder) / "runs"
            if not given.root:
                _collect(root)
            for name in names:
                numbers = range(tries[name]) if given.number is None else [given.number]
                besiege(name, numbers, given.seed, root, given.minutes, given.deadline or math.inf)
        return 0
    start = time.monotonic()
    end = start + 60 * given.minutes
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory(prefix="siege-") as folder:
        root = given.root or Path(folder) / "runs"
        if not given.root:
            _collect(root)
        with ThreadPoolExecutor(given.workers) as pool:
            left = {name: ATTACKS[name] for name in names}
            running = {name: pool.submit(_run, ATTACKS[name], given, root, end, left) for name in names}
            outcomes = {name: future.result() for name, future in running.items()}
    table = _table(outcomes)
    command = f"python -m tests.siege --minutes {given.minutes:g} --seed {given.seed}"
    print(f"\n{table}\n\n{command}: {time.monotonic() - start:.0f} s")
    for name, found in outcomes.items():
        for number, case, message in found.failures:
            print(f"FAILED {name} [{case}] {message}")
            print(f"  again: python -m tests.siege --only {name} --seed {given.seed} --try {number}")
    if given.markdown:
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        given.markdown.write_text(f"`{command}`, {today}, {os.cpu_count()} cores:\n\n{table}\n")
    return 1 if any(found.failures for found in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
