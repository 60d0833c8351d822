"""Jobs: runs that are queued, started one after another, followed and cancelled. No torch here.

    job = add_runs(root, [plan(RunConfig(recipe="mxfp8"))])[0]
    start_runner(root)
    view_of(root, job).state
    cancel(root, job.id)

A job is a run that was queued: what was requested is in the run's directory (collector.jobs.queue). A separate small
process, the runner (collector.jobs.runner), works through the queue and ends when it is empty, so that jobs start even
after the app has ended. A job's state is that of its run and its processes (collector.jobs.state).
"""

from binade.collector.jobs.actions import cancel, delete, resume, retry
from binade.collector.jobs.command_line import command_line, recipes
from binade.collector.jobs.directory import Job, JobError
from binade.collector.jobs.estimate import estimate
from binade.collector.jobs.queue import (
    MOST_AT_ONCE,
    add_resumed,
    add_runs,
    at_once,
    find,
    no_queue,
    problems,
    set_at_once,
)
from binade.collector.jobs.repeats import trained_with, with_further_seeds
from binade.collector.jobs.runner import ensure_runner, start_runner
from binade.collector.jobs.slurm import SubmissionError
from binade.collector.jobs.state import (
    JobState,
    JobView,
    Progress,
    has_runner,
    listing,
    log_tail,
    progress,
    resumable,
    view_of,
)
from binade.collector.recipes.recipe import TEN_RECIPES

__all__ = [
    "MOST_AT_ONCE",
    "TEN_RECIPES",
    "Job",
    "JobError",
    "JobState",
    "JobView",
    "Progress",
    "SubmissionError",
    "add_resumed",
    "add_runs",
    "at_once",
    "cancel",
    "command_line",
    "delete",
    "ensure_runner",
    "estimate",
    "find",
    "has_runner",
    "listing",
    "log_tail",
    "no_queue",
    "problems",
    "progress",
    "recipes",
    "resumable",
    "resume",
    "retry",
    "set_at_once",
    "start_runner",
    "trained_with",
    "view_of",
    "with_further_seeds",
]
