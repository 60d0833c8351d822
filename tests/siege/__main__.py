"""Attack Binade, and print what failed.

    python -m tests.siege --minutes 30 [--only NAME] [--seed N] [--try K] [--markdown FILE]

Each attack runs in a process of its own, two at a time, until it has made its tries or has used its share of the time.
Exit status 1 if any try failed; the lines under the table show how to repeat each one. Ctrl-C and SIGTERM end every
process that was started, and leave no temporary file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import psutil

from binade.data.words.text import markdown_table
from binade.terminal import CANCELLED, catch_signals
from tests.siege.attack import ATTACKS, FULL, Attack, Outcome, besiege
from tests.template import PR_SET_CHILD_SUBREAPER

# Modules with attacks, which register themselves.
MODULES = (
    *("files", "statements", "urls", "sessions", "archives", "kills", "queue", "disks"),
    *("writers", "trusted", "environments", "imports", "churn", "addresses", "degenerate", "soak"),
)
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


@contextmanager
def contained() -> Iterator[Path]:
    """A directory for all temporary files. At the end it is deleted, after all processes that were started in the block
    were killed; those that their parents left behind, too."""
    catch_signals()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = Path(tempfile.mkdtemp(prefix="siege-"))
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        end_descendants(os.getpid())
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for place in (place for place in mounted if Path(place).is_relative_to(folder)):
            subprocess.run(["umount", "--lazy", place], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def end_descendants(pid: int) -> None:
    """Kill what a process has started, and what that has started meanwhile."""
    while left := [each for each in psutil.Process(pid).children(recursive=True) if _lives(each)]:
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        time.sleep(0.05)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it may end between the two
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


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
        options = {"stdout": subprocess.PIPE, "stderr": errors, "text": True, "start_new_session": True}  # of Ctrl-C
        with subprocess.Popen(command, **options) as process:
            assert process.stdout

            def end() -> None:
                end_descendants(process.pid)
                process.kill()

            timer = threading.Timer(max(deadline - time.monotonic(), 0) + chosen.seconds + GRACE, end)
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
    return markdown_table(("Attack", "Requirement", "Attempts", "Failed", "Time"), rows, "llrrr")


def _collect(root: Path) -> None:
    from tests.conftest import collect_recipes

    collect_recipes(root)


def main() -> int:
    for module in MODULES:
        import_module(f"tests.siege.{module}")
    given = _options().parse_args()
    try:
        with contained() as folder:
            root = given.root or folder / "runs"
            if not given.root:
                _collect(root)
            return _besiege(given, root)
    except KeyboardInterrupt:
        print("siege: stopped: what it had started was ended", file=sys.stderr)
        return CANCELLED


def _besiege(given: argparse.Namespace, root: Path) -> int:
    names = given.only or sorted(ATTACKS, key=lambda name: -ATTACKS[name].share)  # the long ones first
    tries = {name: max(1, math.ceil(ATTACKS[name].tries * given.minutes / FULL)) for name in names}
    if given.deadline is not None or given.number is not None:
        with redirect_stdout(sys.stderr):
            for name in names:
                numbers = range(tries[name]) if given.number is None else [given.number]
                besiege(name, numbers, given.seed, root, given.minutes, given.deadline or math.inf)
        return 0
    start = time.monotonic()
    end = start + 60 * given.minutes
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with ThreadPoolExecutor(given.workers) as pool:
        left = {name: ATTACKS[name] for name in names}
        running = {name: pool.submit(_run, ATTACKS[name], given, root, end, left) for name in names}
        try:
            outcomes = {name: future.result() for name, future in running.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in running.values()):
                end_descendants(os.getpid())
                time.sleep(0.05)
            raise
    table = _table(outcomes)
    command = f"python -m tests.siege --minutes {given.minutes:g} --seed {given.seed}"
    command += "".join(f" --only {name}" for name in given.only or ())
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
