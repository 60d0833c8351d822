"""Jobs of a Slurm cluster: submitted with sbatch as one array, followed with squeue and sacct, ended with scancel.

A task of the array is a job of the queue. It reads job.json in the run's directory, which the nodes must share, and
writes the output of all ranks to output.txt there.

Slurm's command line is used and not its REST service or Python modules: it is on every machine that can submit.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic.dataclasses import dataclass

from binade.collector.errors import ConfigError
from binade.collector.training.targets import Target
from binade.data.exchange.python import package_path
from binade.data.run.directory import RunState
from binade.data.run.json_files import STRICT

PATIENCE = 10  # seconds that a command of Slurm may take: local jobs wait in the meantime
SUBMIT_PATIENCE = 60  # seconds that sbatch may take
NOTICE = 90  # seconds before the time limit at which the ranks are asked to end
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
UNKNOWN = "UNKNOWN"  # Slurm no longer knows the job
# The states that determine how a job ended. For others, such as FAILED, the run or its log says more.
ENDS = {
    "TIMEOUT": (RunState.FAILED, "the job reached its time limit"),
    "DEADLINE": (RunState.FAILED, "the job reached its deadline, a time limit"),
    "NODE_FAIL": (RunState.FAILED, "a node of the job failed"),
    "BOOT_FAIL": (RunState.FAILED, "a node of the job could not be started"),
    "OUT_OF_MEMORY": (RunState.FAILED, "out of memory: a rank took more than the job requested"),
    "PREEMPTED": (RunState.FAILED, "the job was preempted by another"),
    "REVOKED": (RunState.FAILED, "the job was revoked by the cluster"),
    "CANCELLED": (RunState.CANCELLED, "the job was cancelled in Slurm"),
}
ENDED = (*ENDS, "COMPLETED", "FAILED", UNKNOWN)


class SubmissionError(RuntimeError):
    """The cluster did not accept the job. The message says why."""


@dataclass(frozen=True, config=STRICT)
class ClusterJob:
    """A job as Slurm knows it. id is that of an array's task, such as 123_4; state is squeue's; reason says why it
    waits; position is its place in the queue of its partition, from 1."""

    id: str
    state: str = "PENDING"
    reason: str = ""
    partition: str = ""
    position: int | None = None

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def place(self) -> str:
        """The reason for waiting, and the place in the queue."""
        known = (
            f"number {self.position}" * bool(self.position),
            f"in partition {self.partition}" * bool(self.partition),
        )
        reason = "" if self.reason == "None" else self.reason
        return ", ".join(filter(None, (reason, " ".join(filter(None, known)))))


def script(target: Target, root: Path, directories: Sequence[Path], working: Path, name: str = "") -> str:
    """The sbatch script for the runs of these directories. Raises ConfigError as `check_places`."""
    check_places(root, working)
    # Shortly before the time limit the ranks get SIGUSR1 and end: what was recorded is kept. A node that fails ends the
    # job: started again by Slurm, it would write a second run.
    settings = {
        "job-name": "binade",
        "array": f"0-{len(directories) - 1}" + (f"%{target.at_once}" if target.at_once else ""),
        "nodes": target.nodes,
        "ntasks-per-node": target.ranks_per_node,
        "gpus-per-node": target.gpus_per_node,
        "partition": target.partition,
        "account": target.account,
        "time": target.time,
        "chdir": shlex.quote(str(working)),
        "signal": f"USR1@{NOTICE}",
        "output": shlex.quote(str(directories[0] / "batch_%a.txt")),
    }
    package = package_path() if target.python is None else None
    path = f'export PYTHONPATH={shlex.quote(str(package))}"${{PYTHONPATH:+:$PYTHONPATH}}"' if package else ""
    # If a rank fails, the others have a minute to notice and to say so before they are ended.
    words = ["srun", "--unbuffered", "--kill-on-bad-exit=0", "--wait=60"]
    if target.container and target.container_runtime == "apptainer":
        words += ["apptainer", "exec", *target.container_options, target.container]
    elif target.container:
        words += [f"--container-image={target.container}", *target.container_options]
    words += [target.python or sys.executable, "-u", "-m", "binade", "slurm-rank"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in settings.items() if value is not None),
        "#SBATCH --no-requeue",
        *(f"#SBATCH {option}" for option in target.options),
        "runs=(" + " ".join(shlex.quote(str(directory)) for directory in directories) + ")",
        'run="${runs[$SLURM_ARRAY_TASK_ID]}"',
        'exec >>"$run/output.txt" 2>&1',
        *target.setup,
        *([path] if path else []),
        f"export TENSOR_SAVE_DIR={shlex.quote(str(root))} BINADE_TARGET={shlex.quote(name)}",
        f'exec {shlex.join(words)} "$run"',
    ]
    return "\n".join(lines) + "\n"


def submit(text: str, path: Path) -> str:
    """Write a script and submit it; returns the number of its array. Raises SubmissionError, OSError."""
    path.write_text(text, encoding="utf-8")
    done = _slurm("sbatch", "--parsable", str(path))
    if done.returncode:
        raise SubmissionError(f"sbatch refused the job: {_last_line(done.stderr) or 'it gave no reason'}")
    number = done.stdout.strip().partition(";")[0]  # "id;cluster"
    if not number.isdecimal():
        raise SubmissionError(f"sbatch printed no job ID: its output is {done.stdout.strip()!r}")
    return number


def check_places(root: Path, working: Path) -> None:
    """Raises ConfigError for a path that Slurm or the script would misinterpret."""
    for what, place in (("root", root), ("working directory", working)):
        if not str(place).isprintable() or set(str(place)) & set("%\\"):
            raise ConfigError(
                f"the {what} {str(place)!r} has characters that are special to Slurm (%, \\ or unprintable ones): "
                "choose another" + " with --tensor-save-dir" * (what == "root")
            )


def check_submits(root: Path, working: Path) -> None:
    """Raises ConfigError as `check_places`, and where the cluster's commands are missing."""
    check_places(root, working)
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "a Slurm job is submitted with sbatch, which is not on this machine: run it where the cluster's commands "
            "are, or add --dry-run to see the script"
        )


def follows() -> bool:
    """Whether this machine can ask the cluster."""
    return shutil.which("squeue") is not None


def cancel(ids: Iterable[str]) -> None:
    """Run scancel, which signals the ranks and kills them after the cluster's KillWait."""
    with suppress(SubmissionError):  # asked again with the next poll
        _slurm("scancel", *ids)


def poll(jobs: Collection[ClusterJob]) -> dict[str, ClusterJob]:
    """The current jobs by id, without those that the cluster does not report."""
    ids = ",".join(sorted({job.id for job in jobs}))
    try:
        rows = _rows("squeue", "--states=all", f"--jobs={ids}", "--format=%i|%T|%P|%r")
        known = {row[0]: row[1:] for row in rows}
        missing = [job.id for job in jobs if job.id not in known]
        ended = _accounted(missing) if missing else {}
        waiting = {row[1] for row in known.values() if row[0] in WAITING}
        places = _positions(waiting) if waiting else {}
    except SubmissionError:
        return {}
    current = {}
    for job in jobs:
        if job.id not in known and job.id not in ended:
            continue
        state, partition, reason = known.get(job.id) or (ended[job.id], job.partition, "")
        position = places.get(job.id) if state in WAITING else None
        current[job.id] = ClusterJob(job.id, state, reason, partition, position)
    return current


def _rows(*command: str) -> list[list[str]]:
    done = _slurm(command[0], "--noheader", "--array", *command[1:])
    if done.returncode and "Invalid job id" not in done.stderr:
        raise SubmissionError(_last_line(done.stderr))
    columns = command[-1].count("|")  # the last one is text that may have more of them
    return [line.strip().split("|", columns) for line in done.stdout.splitlines() if line.count("|") >= columns]


def _positions(partitions: Iterable[str]) -> dict[str, int]:
    """The place of every waiting job in its partition, in the order of priority."""
    counts: dict[str, int] = {}
    places = {}
    wanted = f"--partition={','.join(sorted(partitions))}"
    for job, partition in _rows("squeue", "--states=PENDING", wanted, "--sort=-p,i", "--format=%i|%P"):
        places[job] = counts[partition] = counts.get(partition, 0) + 1
    return places


def _accounted(ids: Collection[str]) -> dict[str, str]:
    """The states of jobs that squeue no longer lists; empty while the accounting does not answer."""
    unknown = dict.fromkeys(ids, UNKNOWN)
    if shutil.which("sacct") is None:
        return unknown
    wanted = ("--noheader", "--parsable2", "--allocations", "--format=JobID,State", f"--jobs={','.join(ids)}")
    try:
        done = _slurm("sacct", *wanted)
    except SubmissionError:
        return {}
    if done.returncode:
        return unknown if "accounting storage is disabled" in done.stderr else {}
    rows = (line.split("|") for line in done.stdout.splitlines() if "|" in line)
    return unknown | {row[0]: row[1].split()[0] for row in rows if row[1]}  # "CANCELLED by 1000"


def _last_line(text: str) -> str:
    return re.sub(r"^(sbatch|squeue): error: ", "", (text.strip().splitlines() or [""])[-1])


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Raises SubmissionError if the command is missing or does not end."""
    patience = SUBMIT_PATIENCE if command[0] == "sbatch" else PATIENCE
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=patience,
        )
    except subprocess.TimeoutExpired:
        raise SubmissionError(f"{command[0]} did not answer within {patience} seconds") from None
    except FileNotFoundError:
        raise SubmissionError(f"{command[0]} is not on this machine") from None
