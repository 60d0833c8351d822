"""Disks that are full, or fill up at any moment: existing data stays intact, and one line reports the problem."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path

from binade.data.run.directory import list_runs
from tests.collector.test_failures import check_rows
from tests.conftest import start_python
from tests.siege.attack import Attempt, attack, check_sentence
from tests.siege.files import LINE
from tests.siege.kills import finish, leftovers, make_logs


def _lines(attempt: Attempt, out: Path) -> dict[str, tuple[str, ...]]:
    there, here = ("--tensor-save-dir", str(out)), ("--tensor-save-dir", str(attempt.root))
    return {
        "run": (*LINE, "--control-iter", "3", *there),
        "checkpoints": (*LINE, "--control-iter", "3", "--checkpoint-every", "1", *there),
        "jobs add": ("jobs", "add", *LINE, *there),
        "import": ("import", str(attempt.once("logs", make_logs)), "--scores", "mxfp8", "--workers", "1", *there),
        "export": ("export", "--to", "csv", "--output", str(out / "tables"), *here),
    }


def _check(process: subprocess.Popen[str], out: Path) -> bool:
    """Whether the command succeeded; what it leaves must be sound in any case."""
    _, err = process.communicate(timeout=110)
    assert process.returncode in (0, 1), (process.returncode, err[-300:])
    if process.returncode:
        last = err.strip().splitlines()[-1]
        assert last.startswith("binade: ") and "Traceback" not in err, err[-300:]
        check_sentence(last)
    runs, refused = list_runs(out)
    assert refused == [] and {run.status.state for run in runs} <= {"done", "failed"}
    assert leftovers(out) == []
    for path in [*out.rglob("job.json"), *out.rglob("queue.json")]:
        json.loads(path.read_text())
    return not process.returncode


@attack("One line says that the file is too large; no partial file or row is left", tries=20)
def small_files(attempt: Attempt) -> None:
    """The kernel lets no file grow beyond a limit."""
    limit = round(10 ** attempt.random.uniform(2, 5.5))
    out = attempt.place / "out"
    name, line = attempt.choose([*_lines(attempt, out).items()])
    attempt.case = f"{name}: {limit} bytes"
    if name == "jobs add":
        limit = min(limit, 1000)  # or a runner starts
    process = start_python(
        "-m", "binade", *line, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    _check(process, out)


@attack(
    "One line says that the disk is full; what was written before is complete; with more room, the command succeeds",
    tries=12,
)
def full_disks(attempt: Attempt) -> None:
    size = round(10 ** attempt.random.uniform(3.7, 6.7))
    disk = attempt.place / "disk"
    disk.mkdir()
    name, line = attempt.choose([pair for pair in _lines(attempt, disk).items() if pair[0] != "jobs add"])
    attempt.case = f"{name}: {size} bytes"
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        if not _check(start_python("-m", "binade", *line), disk):
            subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True, capture_output=True)
            finish(*line)
        if name == "run" and list_runs(disk)[0]:
            check_rows(disk)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True, capture_output=True)
