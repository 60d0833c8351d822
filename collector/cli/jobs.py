"""binade jobs: the queue from a terminal. The app shows the same jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from binade.collector.cli.options import parse
from binade.collector.errors import ConfigError
from binade.collector.settings import QUEUEABLE
from binade.data.run.store import no_link
from binade.data.words.text import describe
from binade.terminal import CANCELLED, FAILED, CliOption, Command, fail, resolve_root, root_option

if TYPE_CHECKING:
    from binade.collector.jobs import Job, JobView

LATEST = 10  # ended jobs that are listed without --all
INTERVAL = 0.1  # seconds between two checks of a job that is followed
SETTINGS: dict[str, Any] = {
    "cancelled": "stopped watching; the jobs continue",
    "failed": "the queue cannot be changed",
    "catches_signals": False,
}


class JobCommand(Command):
    """A command whose function gets the resolved root. --tensor-save-dir may be given before or after the command."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **SETTINGS, **settings)
        self.params.append(root_option())

    def invoke(self, ctx: click.Context) -> int:
        group = ctx.parent.params if ctx.parent else {}
        ctx.params["root"] = resolve_root(ctx.params["root"] or group.get("root"))
        return super().invoke(ctx)


class JobsGroup(Command, click.Group):
    """The commands of `binade jobs`."""

    command_class = JobCommand


def _jobs(root: str | None) -> None:
    """Manage the queue of runs.

    Without a command: list the jobs.
    """
    if click.get_current_context().invoked_subcommand is None:
        _print_jobs(resolve_root(root), everything=False)


jobs = JobsGroup("jobs", params=[root_option()], callback=_jobs, invoke_without_command=True, **SETTINGS)
number_argument = click.argument("number", type=int, metavar="ID")
numbers_argument = click.argument("numbers", type=int, nargs=-1, required=True, metavar="ID...")


@jobs.command("list")
@click.option(
    "--all", "everything", cls=CliOption, is_flag=True, help=f"List all ended jobs, not only the {LATEST} latest"
)
def _list(root: Path, everything: bool) -> None:
    """List the jobs and their states."""
    _print_jobs(root, everything)


@jobs.command("add", context_settings={"allow_interspersed_args": False})
@click.argument("line", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND ...")
def _add(root: Path, line: tuple[str, ...]) -> None:
    """Queue a command line of run, batch, quick, import, measure or parity: one job per run. With --target, runs are
    trained on a cluster."""
    if not line:
        raise ConfigError("jobs add needs a command line: binade jobs add run --recipe mxfp8")
    from binade.collector.jobs import add_runs, start_runner

    if line[0] in QUEUEABLE:
        _check_usage(line)
        added = add_runs(root, [line])
    else:
        named = parse(line).root
        root = resolve_root(named) if named else root
        added = add_line(root, line)
    for job in added:
        print(f"job {job.id} queued: {job.title}")
    start_runner(root)


def _check_usage(line: Sequence[str]) -> None:
    """Raises UsageError for a command line that its command does not accept."""
    context = click.get_current_context().find_root()
    assert isinstance(context.command, click.Group)
    command = context.command.get_command(context, line[0])
    assert command
    command.make_context(f"binade {line[0]}", list(line[1:]))


def add_line(root: Path, line: Sequence[str]) -> list[Job]:
    """Queue a command line of run, batch or quick: one job per run, in their order.

    Raises ConfigError or a similar error for a command line that cannot be run; ReadOnlyError, RunError, OSError.
    """
    from binade.collector.jobs import add_resumed, add_runs

    request = parse(line)
    plans = request.plans_in(root)
    if plans[0].branch:
        raise ConfigError("the queue takes no branches: run binade run --resume RUN --recipe A,B in a terminal")
    if not request.resume:
        return add_runs(root, plans, request.start)
    if request.start.on_cluster:
        raise ConfigError("--resume continues a run on this machine: leave out --target and --launcher")
    return [add_resumed(root, Path(request.resume).name, plans[0])]


@jobs.command("follow")
@number_argument
def _follow(root: Path, number: int) -> int:
    """Print a job's log until the job ends. Ctrl-C stops printing, not the job."""
    from binade.collector.jobs import JobState, ensure_runner, find, view_of
    from binade.collector.jobs.directory import OUTPUT_FILE, directory_of

    job = find(root, number)
    log = directory_of(root, job) / OUTPUT_FILE
    ensure_runner(root, [view_of(root, job)])
    queued, read = False, 0
    while True:
        view = view_of(root, job)
        if view.state in (JobState.QUEUED, JobState.PENDING) and not queued:
            print(f"job {job.id} is {view.state}", flush=True)
            queued = True
        read = _print_from(log, read)
        if not view.active:
            _print_end(view)
            return {JobState.DONE: 0, JobState.CANCELLED: CANCELLED}.get(view.state, FAILED)
        time.sleep(INTERVAL)


@jobs.command("cancel")
@numbers_argument
def _cancel(root: Path, numbers: tuple[int, ...]) -> int:
    """End jobs and keep what they recorded."""
    from binade.collector.jobs import JobState, cancel, find, view_of

    for number in numbers:
        cancel(root, number)
    status = 0
    for job in [find(root, number) for number in numbers]:
        while (view := view_of(root, job)).active:
            time.sleep(INTERVAL)
        _print_end(view)
        status = status if view.state == JobState.CANCELLED else FAILED
    return status


@jobs.command("retry")
@number_argument
def _retry(root: Path, number: int) -> None:
    """Queue a job again."""
    from binade.collector.jobs import retry

    print(f"job {retry(root, number).id} queued")


@jobs.command("delete")
@numbers_argument
@click.option("--with-run", cls=CliOption, is_flag=True, help="Also delete their runs with all tensors")
def _delete(root: Path, numbers: tuple[int, ...], with_run: bool) -> None:
    """Delete ended jobs from the list. Their runs are kept unless --with-run is given."""
    from binade.collector.jobs import delete, find

    for number in numbers:
        find(root, number)  # nothing is deleted unless all exist
    for number in numbers:
        delete(root, number, with_run=with_run)
        print(f"job {number} deleted")


@jobs.command("at-once")
@click.argument("count", type=int, metavar="N")
def _at_once(root: Path, count: int) -> None:
    """Set how many jobs may run at the same time."""
    from binade.collector.jobs import set_at_once, start_runner

    set_at_once(root, count)
    start_runner(root)


@jobs.command("serve", hidden=True)
def _serve(root: Path) -> None:
    """Process the queue until it is empty. Other commands start this automatically."""
    from binade.collector.jobs.runner import serve

    serve(root)


def _print_jobs(root: Path, everything: bool) -> None:
    from binade.collector.jobs import JobState, at_once, ensure_runner, listing, problems
    from binade.data.run.directory import RunError

    views = listing(root)
    for problem in problems(root):
        print(f"binade: {problem}", file=sys.stderr)
    if not views:
        print(f"no jobs in {root}: queue one with binade jobs add run --recipe mxfp8")
        return
    try:
        ensure_runner(root, views)
    except (OSError, RunError) as error:  # a disk that is full or read-only
        fail(f"waiting jobs are not started: {describe(error)}")
    ended = [view for view in views if not view.active]
    left_out = [] if everything else ended[:-LATEST]
    views = [view for view in views if view not in left_out]
    rows = [("id", "state", "iterations", "tensors", "MB", "left", "title", "run"), *map(_row, views)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    for view in views:
        place = view.cluster.place if view.cluster and view.state is JobState.PENDING else ""
        if reason := view.reason or place:
            print(f"job {view.job.id} {view.state}: {reason}")
    if left_out:
        print(f"{len(left_out)} more have ended: list them with `binade jobs list --all`")
    limit = at_once(root)
    print(f"at most {limit} job{'s' * (limit > 1)} at a time in {root}")


def _row(view: JobView) -> tuple[str, ...]:
    from binade.collector.jobs import progress

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
        view.written.run_id if view.written else "",
    )


def _print_from(log: Path, start: int) -> int:
    """Print what was added to a log. Returns the new position."""
    try:
        with open(log, "rb", opener=no_link) as file:
            file.seek(start)
            text = file.read()
    except OSError:
        return start
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return start + len(text)


def _print_end(view: JobView) -> None:
    reason = f": {view.reason}" if view.reason else ""
    advice = f" ({view.advice})" if view.advice else ""
    print(f"job {view.job.id} {view.state}{reason}{advice}", flush=True)
