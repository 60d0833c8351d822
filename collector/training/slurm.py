"""Start a run on other machines: a Slurm job with one task per rank, submitted with sbatch.

A task is `binade.collector.training.slurm_rank` with the command line's own arguments.
"""

from __future__ import annotations

import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from binade.collector.training.config import ConfigError
from binade.collector.training.slurm_options import SlurmOptions
from binade.data.python import package_path
from binade.data.runs import RunError

FOLDER = ".slurm"  # in the root, for scripts and logs; not listed among the runs


class SubmissionError(RuntimeError):
    """The cluster did not take the job. The message says why."""


def script(options: SlurmOptions, root: Path, arguments: Sequence[str]) -> str:
    """The sbatch script that `submit` sends. Raises ConfigError for what Slurm or the script would read otherwise."""
    if not str(root).isprintable() or set(str(root)) & set("%\\"):
        raise ConfigError(
            f"the root {str(root)!r} has characters that Slurm gives a meaning to (%, \\ or unprintable ones): "
            "choose another with --tensor-save-dir"
        )
    for argument in arguments:
        if not argument.isprintable():
            raise ConfigError(f"the argument {argument!r} has unprintable characters: a job's script cannot hold them")
    logs = root / FOLDER
    # Shortly before the time limit the ranks are asked to end, as by scancel: what was recorded is kept.
    settings = {
        "job-name": "binade",
        "nodes": options.nodes,
        "ntasks-per-node": options.ranks_per_node,
        "gpus-per-node": options.gpus_per_node,
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
        "signal": "TERM@90",
        "open-mode": "append",
        "output": shlex.quote(str(logs / "%j_0_log.out")),
        "error": shlex.quote(str(logs / "%j_0_log.err")),
    }
    found = package_path()
    path = f'export PYTHONPATH={shlex.quote(str(found))}"${{PYTHONPATH:+:$PYTHONPATH}}"' if found else ""
    task = [sys.executable, "-u", "-m", "binade.collector.training.slurm_rank", *arguments]
    # If a rank fails, the others have a minute to notice and to say so before they are ended.
    srun = ["srun", "--unbuffered", "--output", str(logs / "%j_%t_log.out"), "--error", str(logs / "%j_%t_log.err")]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in settings.items() if value is not None),
        *([path] if path else []),
        f"export TENSOR_SAVE_DIR={shlex.quote(str(root))}",
        shlex.join([*srun, "--kill-on-bad-exit=0", "--wait=60", *task]),
    ]
    return "\n".join(lines) + "\n"


def submit(options: SlurmOptions, root: Path, arguments: Sequence[str]) -> str:
    """Queue binade with these arguments. Returns a message for the user. Raises ConfigError, RunError and
    SubmissionError."""
    text = script(options, root, arguments)
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "--launcher slurm submits with sbatch, which is not on this machine: run it where the cluster's commands "
            "are, or add --dry-run to see the script"
        )
    folder = root / FOLDER
    path = folder / f"{secrets.token_hex(8)}_submission.sh"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        done = subprocess.run(["sbatch", str(path)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            path.unlink()
            reason = (done.stderr.splitlines() or ["it did not say why"])[-1]
            raise SubmissionError(f"sbatch refused the job: {reason}")
        job = re.search(r"job (\d+)", done.stdout)
        if job is None:
            raise SubmissionError(f"sbatch named no job: its output is {done.stdout.strip()!r}")
        path = path.rename(folder / f"{job[1]}_submission.sh")
    except OSError as error:
        raise RunError(
            f"cannot write to {folder}: {error.strerror or error}; choose a directory with --tensor-save-dir"
        ) from error
    log = folder / f"{job[1]}_0_log"
    return (
        f"job {job[1]} submitted: nodes {options.nodes}, ranks on each {options.ranks_per_node}\n"
        f"    script {path}\n    log    {log}.out, errors in {log}.err"
    )
