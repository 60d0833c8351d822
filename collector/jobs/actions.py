"""Actions on a job: cancel, retry, resume, delete."""

from __future__ import annotations

from pathlib import Path

from binade.collector.jobs.processes import boot, host
from binade.collector.jobs.runner import start_runner
from binade.collector.jobs.state import view_of
from binade.collector.jobs.store import (
    HERE,
    End,
    Execution,
    Job,
    JobError,
    add_runs,
    directory_of,
    find,
    locked,
    write_cancellation,
    write_execution,
)
from binade.collector.jobs.transitions import JobEvent, JobState, after, allows
from binade.collector.training.checkpoints import last
from binade.collector.training.plan import plan
from binade.data.access import check_writable
from binade.data.runs import delete_run, now, read_run
from binade.data.store import remove_directory


def cancel(root: Path, number: int) -> None:
    """End a job; what it recorded is kept. A queued job ends at once. For a running one, the runner ends its processes,
    and `view_of` shows when that is done. Raises JobError, ReadOnlyError, RunError, OSError."""
    check_writable("cancelling a run")
    with locked(root):
        job = find(root, number)
        state = view_of(root, job).state
        if not allows(state, JobEvent.CANCEL):
            raise JobError(f"job {number} is {state}: there is nothing to cancel")
        if state is JobState.QUEUED:
            end = End(after(state, JobEvent.CANCEL), None, now())
            write_execution(root, job, Execution(host(), boot(), end.at, end=end))
            return
        write_cancellation(root, job)
    start_runner(root)


def retry(root: Path, number: int) -> Job:
    """Queue the same job again. Raises as `find` and `add_runs`."""
    job = find(root, number)
    return _again(root, job, job.resume)


def resume(root: Path, number: int) -> Job:
    """Queue a job that continues the run of a job that has ended early. Raises as `find` and `add_runs`."""
    job = find(root, number)
    run = view_of(root, job).run
    if run is None:
        raise JobError(f"job {number} has no run to resume: retry it")
    return _again(root, job, run.run_id)


def _again(root: Path, job: Job, resume: str | None) -> Job:
    if resume:
        last(read_run(root / resume))  # raises RunError if there is nothing to continue from
    (again,) = add_runs(
        root,
        [plan(job.config)],
        HERE if resume else job.start,
        [job.title],
        tags=job.tags,
        directory=Path(job.directory),
        retry_of=job.id,
        resume=resume,
        measures=job.measures,
    )
    start_runner(root)
    return again


def delete(root: Path, number: int, *, with_run: bool = False) -> None:
    """Remove a job that has ended; with_run also deletes its run and all tensors. Raises JobError, ReadOnlyError,
    RunError, OSError."""
    check_writable("deleting a job")
    with locked(root):
        job = find(root, number)
        view = view_of(root, job)
        if not allows(view.state, JobEvent.DELETE):
            raise JobError(f"job {number} is {view.state}: cancel it first")
        if with_run and view.run:
            delete_run(view.run.directory)
        remove_directory(directory_of(root, job))
