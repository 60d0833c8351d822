"""Jobs: runs that are queued, started one after another, followed and cancelled. No torch here.

    job = add(root, ["run", "--quantization", "mxfp8"])[0]
    look(root, job).state
    cancel(root, job.id)

What is asked for lies in `<root>/.jobs` (collector.jobs.store). A small process of its own, the runner, works through
it (collector.jobs.runner) and ends when nothing is left to do: the queue advances whatever becomes of the app that
filled it. How a job is doing is read from its run directory and its processes (collector.jobs.state), never remembered.
"""

from binade.collector.jobs.actions import cancel, delete, retry
from binade.collector.jobs.command_line import TEN_RECIPES, arguments_of, asked, command_line, modules_of, recipes
from binade.collector.jobs.estimate import Estimate, estimate
from binade.collector.jobs.runner import wake
from binade.collector.jobs.state import ACTIVE, JobView, Progress, attended, listing, log_tail, look, progress
from binade.collector.jobs.store import MOST_AT_ONCE, Job, JobError, add, at_once, change, find, set_at_once

__all__ = [
    "ACTIVE",
    "MOST_AT_ONCE",
    "TEN_RECIPES",
    "Estimate",
    "Job",
    "JobError",
    "JobView",
    "Progress",
    "add",
    "arguments_of",
    "asked",
    "at_once",
    "attended",
    "cancel",
    "change",
    "command_line",
    "delete",
    "estimate",
    "find",
    "listing",
    "log_tail",
    "look",
    "modules_of",
    "progress",
    "recipes",
    "retry",
    "set_at_once",
    "wake",
]
