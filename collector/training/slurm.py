"""Start a run on other machines: a Slurm job made and submitted by submitit, with one task a rank.

A task is `binade.slurm_rank` with the command line's own arguments; nothing is pickled. So of submitit's
executor what is used is what makes and sends its script: `_make_submission_file_text` and `_submit_command` take a
command where the public `submit` takes a function. requirements-slurm.txt pins the version for that reason.
"""

from __future__ import annotations

import io
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from binade.collector.training.config import ConfigError
from binade.collector.training.slurm_options import SlurmOptions
from binade.data.runs import RunError

FOLDER = ".slurm"  # in the root, for scripts and logs: passed over where runs are listed
# If a rank fails, the others have a minute to notice and to say so before they are ended.
SRUN = ("--kill-on-bad-exit=0", "--wait=60")
# Shortly before the time limit the ranks are told to end, as by scancel: what was recorded is kept.
SIGNAL = "TERM@90"


class SubmissionError(RuntimeError):
    """The cluster did not take the job. The message says why."""


class ScriptExecutor(SlurmExecutor):
    """Makes the script on machines without srun too: it is to be seen before there is a cluster."""

    @classmethod
    def affinity(cls) -> int:
        return 2


def script(options: SlurmOptions, root: Path, arguments: Sequence[str]) -> str:
    """The sbatch script that `submit` sends. Raises ConfigError."""
    return _executor(options, root)._make_submission_file_text(_command(arguments), uid="")


def submit(options: SlurmOptions, root: Path, arguments: Sequence[str]) -> str:
    """Queue binade with these arguments: what to tell the user. Raises ConfigError, RunError and
    SubmissionError."""
    executor, command = _executor(options, root), _command(arguments)
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "--launcher slurm submits with sbatch, which is not on this machine: run it where the cluster's commands "
            "are, or add --dry-run to see the script"
        )
    try:
        executor.folder.mkdir(parents=True, exist_ok=True)
        with redirect_stderr(io.StringIO()):  # submitit prints what sbatch says; it is in the error as well
            job = executor._submit_command(command)
    except FailedJobError as error:
        Path(error.__cause__.cmd[-1]).unlink()  # the script that no job came of
        said = str(error).splitlines() or ["it did not say why"]
        raise SubmissionError(f"sbatch refused the job: {said[-1]}") from None
    except FailedSubmissionError as error:
        raise SubmissionError(f"sbatch named no job: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise RunError(
            f"cannot write to {executor.folder}: {error.strerror or error}; choose a directory with --tensor-save-dir"
        ) from error
    return (
        f"job {job.job_id} submitted: nodes {options.nodes}, ranks on each {options.ranks_per_node}\n"
        f"    script {job.paths.submission_file}\n    log    {job.paths.stdout}, errors in {job.paths.stderr}"
    )


def _executor(options: SlurmOptions, root: Path) -> ScriptExecutor:
    """Everything of the script but its command. Raises ConfigError for a root that Slurm would read otherwise."""
    if not str(root).isprintable() or set(str(root)) & set("%\\"):
        raise ConfigError(
            f"the root {str(root)!r} has characters that Slurm gives a meaning to (%, \\ or unprintable ones): "
            "choose another with --tensor-save-dir"
        )
    executor = ScriptExecutor(root / FOLDER)
    executor.update_parameters(
        job_name="binade",
        nodes=options.nodes,
        ntasks_per_node=options.ranks_per_node,
        gpus_per_node=options.gpus_per_node,
        partition=options.partition,
        account=options.account,
        time=options.time,
        wckey=None,
        setup=[f"export TENSOR_SAVE_DIR={shlex.quote(str(root))}"],
        srun_args=list(SRUN),
        additional_parameters={"signal": SIGNAL},
    )
    return executor


def _command(arguments: Sequence[str]) -> str:
    """A task, as a line of the script. Raises ConfigError."""
    for argument in arguments:
        if not argument.isprintable():
            raise ConfigError(f"the argument {argument!r} has unprintable characters: a job's script cannot hold them")
    return shlex.join([sys.executable, "-u", "-m", "binade.collector.training.slurm_rank", *arguments])
