"""Environments in which other programs run: locales other than UTF-8, and users without a home directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from binade.collector.jobs import add_runs
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import plan
from binade.data.run.directory import RunNotes, list_runs
from binade.data.run.run_notes import change_notes
from tests.app import roots
from tests.conftest import PROJECT
from tests.siege.attack import Attempt, attack, check_sentence
from tests.siege.files import LINE

LOCALE = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# What unshare(1) makes of this process: a user whose number is not in /etc/passwd.
STRANGER = ("unshare", "--user", "--map-user=12345", "--map-group=12345")
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "C": ((), {**LOCALE, "LC_ALL": "C", "HOME": os.environ.get("HOME", "/")}),
    "latin-1": ((), {**LOCALE, "LC_ALL": "C", "PYTHONIOENCODING": "latin-1", "HOME": os.environ.get("HOME", "/")}),
    "no home": (STRANGER, {}),
}
NAME = "Größe − ≥ µ 大きさ"


def _lines(root: Path, out: Path) -> dict[str, tuple[str, ...]]:
    here = ("--tensor-save-dir", str(root))
    few = ("--recipe", "mxfp4", "--layer-index", "1", "--tensor-name", "weight", "--jobs", "1")
    first, second, *_ = (str(run.directory) for run in list_runs(root)[0])
    return {
        "run": (*LINE, "--quantization", "mxfp8", "--control-iter", "1", "--tensor-save-dir", str(out / "runs")),
        "run on two ranks": (*LINE, "--tp", "2", "--control-iter", "1", "--tensor-save-dir", str(out / "runs")),
        "list": ("list", "formats"),
        "jobs": ("jobs", *here),
        "verify": ("verify", str(root)),
        "compare": ("compare", str(root)),
        "diff": ("diff", first, second),
        "export": ("export", "--to", "csv", *here, "--output", str(out / "tables")),
        "report": ("report", "--output", str(out / "report"), *few, *here),
        "import": ("import", str(root.parent / "logs"), "--tensor-save-dir", str(out / "runs")),
    }


COMMANDS = ("run", "run on two ranks", "list", "jobs", "verify", "compare", "diff", "export", "report", "import")


def _make(attempt: Attempt, place: Path) -> None:
    """Runs whose texts need UTF-8, and a log that is named so."""
    root = roots.copy(attempt.root, place / "runs")
    for run in roots.runs_of(root):
        change_notes(run, RunNotes(NAME + run.name[-6:], "", NAME), RunNotes())
    add_runs(root, [plan(RunConfig())], titles=[NAME])
    (place / "logs").mkdir()
    import torch

    torch.save(torch.ones(4, 4), place / "logs" / f"{NAME}.pt")


@attack("The command succeeds or says in one line what is wrong; no traceback", tries=30, seconds=300)
def odd_environments(attempt: Attempt) -> None:
    place = attempt.once("runs", lambda made: _make(attempt, made))
    kind, command = attempt.choose([(kind, command) for kind in ENVIRONMENTS for command in COMMANDS])
    attempt.case = f"{kind}: {command}"
    check_command(kind, command, roots.copy(place / "runs", attempt.place / "runs"), place / "logs", attempt.place)


def check_command(kind: str, command: str, root: Path, logs: Path, out: Path) -> None:
    before, variables = ENVIRONMENTS[kind]
    if logs != root.parent / "logs":
        shutil.copytree(logs, root.parent / "logs")
    line = [*before, sys.executable, "-m", "binade", *_lines(root, out)[command]]
    usual = {"PATH": os.environ["PATH"], "TMPDIR": str(out), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=PROJECT, env=usual | variables, capture_output=True, timeout=280, check=False)
    err = done.stderr.decode(errors="replace")
    assert "Traceback" not in err, err[-500:]
    encoding = variables.get("PYTHONIOENCODING") or ("ascii" if "LC_ALL" in variables else "utf-8")
    done.stdout.decode(encoding)
    # In a locale without it, a name that is not ASCII is no text; the log is refused, and the import fails.
    wanted = 1 if command == "import" and kind != "no home" else done.returncode if command == "diff" else 0
    assert done.returncode == wanted, (done.returncode, err[-500:])
    if done.returncode and command != "diff":
        check_sentence(err.strip().splitlines()[-1])
