"""Actions on a job: cancel, retry, resume, delete."""

from __future__ import annotations

from pathlib import Path

from binade.collector.jobs.directory import LAUNCH_FILE, OUTPUT_FILE, Job, JobError, change_launch, directory_of
from binade.collector.jobs.queue import add_resumed, add_runs, find, locked
from binade.collector.jobs.runner import start_runner
from binade.collector.jobs.state import JobState, view_of
from binade.collector.training.plan import plan
from binade.data.run.access import check_writable
from binade.data.run.directory import CANCELLED, JOB_FILE, delete_run, has_not_begun, now
from binade.data.run.run_writer import settle
from binade.data.run.store import remove_directory


def cancel(root: Path, number: int) -> None:
    """End a job; what it recorded is kept. A queued job ends at once. For a running one, the runner ends its processes,
    and `view_of` shows when that is done. Raises JobError, ReadOnlyError, RunError, OSError."""
    check_writable("cancelling a run")
    with locked(root):
        job = find(root, number)
        view = view_of(root, job)
        if not view.active:
            raise JobError(f"job {number} is {view.state}: there is nothing to cancel")
        if view.state is JobState.QUEUED:
            settle(directory_of(root, job), CANCELLED, None)
            return
        change_launch(root, job, cancelled=now())
    start_runner(root)


def retry(root: Path, number: int) -> Job:
    """Queue the same job again, as a new run. Raises as `find` and `add_runs`."""
    job = find(root, number)
    (again,) = add_runs(
        root,
        [plan(job.config) if job.config else job.command],
        job.start,
        [job.title],
        tags=job.tags,
        directory=Path(job.directory),
        repeats=job.run_id,
    )
    start_runner(root)
    return again


def resume(root: Path, number: int) -> Job:
    """Queue the run of a job that has ended early again, to be continued. Raises as `find` and `add_resumed`."""
    job = find(root, number)
    if job.config is None or view_of(root, job).run is None:
        raise JobError(f"job {number} has no run to resume: retry it")
    again = add_resumed(root, job.run_id, plan(job.config))
    start_runner(root)
    return again


def delete(root: Path, number: int, *, with_run: bool = False) -> None:
    """Remove a job that has ended from the list; with_run also deletes its run and all tensors, as does a job that has
    no run. Raises JobError, ReadOnlyError, RunError, OSError."""
    check_writable("deleting a job")
    with locked(root):
        job = find(root, number)
        view = view_of(root, job)
        if view.active:
            raise JobError(f"job {number} is {view.state}: cancel it first")
        directory = directory_of(root, job)
        if has_not_begun(directory):  # a run that is damaged has begun: what is left of it is kept
            remove_directory(directory)
        elif with_run:
            delete_run(directory)
        else:
            for name in (LAUNCH_FILE, OUTPUT_FILE, JOB_FILE):  # what is left after a kill can be deleted again
                (directory / name).unlink(missing_ok=True)
