"""binade jobs: the queue from a terminal. The app shows the same jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from binade.collector.errors import ConfigError
from binade.terminal import Command, Option, resolve_root, root_option

if TYPE_CHECKING:
    from binade.collector.jobs import Job, JobView

LATEST = 10  # ended jobs that are listed without --all
INTERVAL = 0.3  # seconds between two looks at a job that is followed


class JobCommand(Command):
    """Takes --tensor-save-dir after the command, or before it."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(
            *arguments,
            cancelled="left; the jobs go on",
            failed="the queue cannot be changed",
            catches_signals=False,
            **settings,
        )
        self.params.append(root_option())

    def invoke(self, ctx: click.Context) -> int:
        ctx.params["root"] = ctx.params["root"] or (ctx.parent and ctx.parent.params.get("root"))
        return super().invoke(ctx)


class JobsGroup(JobCommand, click.Group):
    """The commands of `binade jobs`."""


def _jobs(root: str | None) -> None:
    """Manage the queue of runs.

    Without a command: list the jobs.
    """
    if click.get_current_context().invoked_subcommand is None:
        _print_jobs(resolve_root(root), everything=False)


jobs = JobsGroup("jobs", callback=_jobs, invoke_without_command=True, help=_jobs.__doc__)
NUMBER = click.Argument(["number"], type=int, metavar="ID")
NUMBERS = click.Argument(["numbers"], type=int, nargs=-1, required=True, metavar="ID...")


def command(*params: click.Parameter, **settings: Any) -> Callable[[Callable[..., int | None]], JobCommand]:
    """Make a function a command of `binade jobs`, named after it and described by its docstring."""

    def make(function: Callable[..., int | None]) -> JobCommand:
        name = function.__name__.strip("_").replace("_", "-")
        made = JobCommand(name, params=list(params), callback=function, help=function.__doc__, **settings)
        jobs.add_command(made)
        return made

    return make


@command(Option(["--all", "everything"], is_flag=True, help="List every ended job, not only the latest"))
def _list(root: str | None, everything: bool) -> None:
    """List the jobs and their states."""
    _print_jobs(resolve_root(root), everything)


@command(
    click.Argument(["line"], nargs=-1, type=click.UNPROCESSED, metavar="run|batch|quick ..."),
    context_settings={"allow_interspersed_args": False},
)
def _add(root: str | None, line: tuple[str, ...]) -> None:
    """Queue the runs of a command line, one job per run."""
    if not line:
        raise ConfigError("jobs add needs a command line: binade jobs add run --quantization mxfp8")
    from binade.collector.jobs import add, start_runner

    where = resolve_root(root)
    for job in add(where, line):
        print(f"job {job.id} queued: {job.title}")
    start_runner(where)


@command(NUMBER)
def _follow(root: str | None, number: int) -> int:
    """Print a job's log until it ends. Leaving it does not end the job."""
    from binade.collector.jobs import find

    where = resolve_root(root)
    return _print_log(where, find(where, number))


@command(NUMBERS)
def _cancel(root: str | None, numbers: tuple[int, ...]) -> int:
    """End jobs and keep what they recorded."""
    from binade.collector.jobs import cancel, find

    where = resolve_root(root)
    for number in numbers:
        cancel(where, number)
    return max([_wait_for_end(where, find(where, number)) for number in numbers])


@command(NUMBER)
def _retry(root: str | None, number: int) -> None:
    """Queue a job again."""
    from binade.collector.jobs import retry

    print(f"job {retry(resolve_root(root), number).id} queued")


@command(NUMBERS, Option(["--with-run"], is_flag=True, help="Also delete their runs with all tensors"))
def _delete(root: str | None, numbers: tuple[int, ...], with_run: bool) -> None:
    """Delete ended jobs from the list. Their runs stay."""
    from binade.collector.jobs import delete, find

    where = resolve_root(root)
    for number in numbers:
        find(where, number)  # nothing is deleted unless all exist
    for number in numbers:
        delete(where, number, with_run=with_run)
        print(f"job {number} deleted")


@command(click.Argument(["count"], type=int, metavar="N"))
def _at_once(root: str | None, count: int) -> None:
    """Set how many jobs may run at the same time."""
    from binade.collector.jobs import set_at_once, start_runner

    where = resolve_root(root)
    set_at_once(where, count)
    start_runner(where)


@command(hidden=True)
def _serve(root: str | None) -> None:
    """Work through the queue until it is empty. The other commands start this."""
    from binade.collector.jobs.runner import serve

    serve(resolve_root(root))


def _print_jobs(root: Path, everything: bool) -> None:
    from binade.collector.jobs.state import listing
    from binade.collector.jobs.store import at_once

    views = listing(root)
    if not views:
        print(f"no jobs in {root}: queue one with binade jobs add run --quantization mxfp8")
        return
    _ensure_runner(root, views)
    ended = [view for view in views if not view.active]
    left_out = 0 if everything else max(0, len(ended) - LATEST)
    if left_out:
        views = [view for view in views if view.active or view not in ended[:left_out]]
    rows = [("id", "state", "iterations", "tensors", "MB", "left", "title", "run"), *map(_row, views)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    for view in views:
        if view.reason:
            print(f"job {view.job.id} {view.state}: {view.reason}")
    if left_out:
        print(f"{left_out} more that have ended: --all")
    print(f"{at_once(root)} at once, in {root}")


def _row(view: JobView) -> tuple[str, ...]:
    from binade.collector.jobs.state import progress

    done, status = progress(view), view.run.status if view.run else None
    left = "" if done.seconds_left is None else f"{done.seconds_left:.0f} s"
    return (
        str(view.job.id),
        view.state,
        f"{done.done}/{done.total}" if done.total else "",
        f"{status.tensors:,}" if status else "",
        f"{status.bytes / 1e6:.1f}" if status else "",
        left,
        view.job.title,
        view.run.run_id if view.run else "",
    )


def _print_log(root: Path, job: Job) -> int:
    """Print the log as it grows until the job has ended; start the runner if none is running."""
    from binade.collector.jobs.state import view_of
    from binade.collector.jobs.store import directory_of
    from binade.collector.jobs.transitions import State

    _ensure_runner(root, [view_of(root, job)])
    announced, read = False, 0
    while True:
        view = view_of(root, job)
        if view.state == State.QUEUED and not announced:
            print(f"job {job.id} is queued", flush=True)
            announced = True
        read = _print_from(directory_of(root, job) / "log.txt", read)
        if not view.active:
            break
        time.sleep(INTERVAL)
    _print_from(directory_of(root, job) / "log.txt", read)
    return _print_end(view)


def _ensure_runner(root: Path, views: list[JobView]) -> None:
    """Start the runner if jobs wait and it was lost, by a restart of the machine for example."""
    from binade.collector.jobs.runner import start_runner
    from binade.collector.jobs.state import has_runner
    from binade.data.access import read_only

    if any(view.active for view in views) and not read_only() and not has_runner(root):
        start_runner(root)


def _print_from(log: Path, start: int) -> int:
    """Print what was added to a log; returns how far it was read."""
    try:
        with open(log, "rb") as file:
            file.seek(start)
            text = file.read()
    except FileNotFoundError:
        return start
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return start + len(text)


def _wait_for_end(root: Path, job: Job) -> int:
    from binade.collector.jobs.state import view_of
    from binade.collector.jobs.transitions import State

    while (view := view_of(root, job)).active:
        time.sleep(INTERVAL)
    _print_end(view)
    return 0 if view.state == State.CANCELLED else 1


def _print_end(view: JobView) -> int:
    from binade.collector.jobs.transitions import State

    reason = f": {view.reason}" if view.reason else ""
    advice = f" ({view.advice})" if view.advice else ""
    print(f"job {view.job.id} {view.state}{reason}{advice}", flush=True)
    return {State.DONE: 0, State.CANCELLED: 130}.get(view.state, 1)
