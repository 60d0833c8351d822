"""What can be done to a job that was queued: cancel, retry, delete."""

from __future__ import annotations

import shutil
from pathlib import Path

from binade.collector.jobs.runner import wake
from binade.collector.jobs.state import ACTIVE, QUEUED, look
from binade.collector.jobs.store import Job, JobError, add, find, locked, place, write_json
from binade.data.access import check_writable
from binade.data.runs import delete_run, now


def cancel(root: Path, number: int) -> None:
    """Have a job ended; what it recorded is kept. A queued one is over at once, of one that runs the runner ends every
    process: `look` tells when that is done. Raises JobError, ReadOnlyError, RunError, OSError."""
    check_writable("cancelling a run")
    with locked(root):
        job = find(root, number)
        state = look(root, job).state
        if state not in ACTIVE:
            raise JobError(f"job {number} is {state}: there is nothing to cancel")
        if state == QUEUED:
            write_json(place(root, job) / "end.json", {"exit_status": None, "cancelled": True, "at": now()})
            return
        write_json(place(root, job) / "cancel.json", {"at": now()})
    wake(root)


def retry(root: Path, number: int) -> Job:
    """Queue the same again. Raises as `find` and `add`."""
    job = find(root, number)
    again = {"title": job.title, "tags": job.tags, "directory": Path(job.directory), "retry_of": job.id}
    (made,) = add(root, job.arguments, **again)
    wake(root)
    return made


def delete(root: Path, number: int, *, with_run: bool = False) -> None:
    """Forget a job that has ended, and with_run delete its run and all tensors. Raises JobError, ReadOnlyError,
    RunError, OSError."""
    check_writable("deleting a job")
    with locked(root):
        job = find(root, number)
        view = look(root, job)
        if view.state in ACTIVE:
            raise JobError(f"job {number} is {view.state}: cancel it first")
        if with_run and view.run:
            delete_run(view.run.directory)
        aside = place(root, job).with_name(f".{number:04d}.gone")
        place(root, job).rename(aside)
    shutil.rmtree(aside)
