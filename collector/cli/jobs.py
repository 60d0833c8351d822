"""binade jobs: the queue from a terminal. The same jobs as the app shows."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from binade.collector.errors import ConfigError
from binade.collector.jobs.actions import cancel, delete, retry
from binade.collector.jobs.runner import serve, start_runner
from binade.collector.jobs.state import JobView, has_runner, listing, progress, view_of
from binade.collector.jobs.store import Job, add, at_once, directory_of, find, set_at_once
from binade.collector.jobs.transitions import State
from binade.data.access import read_only
from binade.data.runs import resolve_root

LATEST = 10  # jobs that have ended and are listed without --all
LOOK = 0.3  # seconds between two looks at a job that is followed
EXIT = {State.DONE: 0, State.CANCELLED: 130}


def run_command(given: argparse.Namespace) -> int:
    """Do what the command line asks for: the exit status. Raises ConfigError and its kin, JobError, ReadOnlyError,
    RunError, OSError."""
    action = given.action or "list"
    root = resolve_root(given.tensor_save_dir)
    if action == "list":
        _list(root, given.all)
    elif action == "add":
        return _add(root, given.line)
    elif action == "follow":
        return _follow(root, find(root, given.id))
    elif action == "cancel":
        for number in given.ids:
            cancel(root, number)
        return max([_until_over(root, find(root, number)) for number in given.ids])
    elif action == "retry":
        print(f"job {retry(root, given.id).id} queued")
    elif action == "delete":
        for number in given.ids:
            find(root, number)  # all of them are there, or none is deleted
        for number in given.ids:
            delete(root, number, with_run=given.with_run)
            print(f"job {number} deleted")
    elif action == "at-once":
        set_at_once(root, given.count)
        start_runner(root)
    elif action == "serve":
        serve(root)
    return 0


def _list(root: Path, everything: bool) -> None:
    views = listing(root)
    if not views:
        print(f"no jobs in {root}: queue one with binade jobs add run --quantization mxfp8")
        return
    _tend(root, views)
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


def _add(root: Path, line: list[str]) -> int:
    if line[:1] == ["--"]:
        line = line[1:]
    if not line:
        raise ConfigError("jobs add needs a command line: binade jobs add run --quantization mxfp8")
    for job in add(root, line):
        print(f"job {job.id} queued: {job.title}")
    start_runner(root)
    return 0


def _follow(root: Path, job: Job) -> int:
    """Print its log as it grows, until it has ended; where nobody works through the queue any more, somebody does."""
    _tend(root, [view_of(root, job)])
    said, read = False, 0
    while True:
        view = view_of(root, job)
        if view.state is State.QUEUED and not said:
            print(f"job {job.id} is queued", flush=True)
            said = True
        read = _print_from(directory_of(root, job) / "log.txt", read)
        if not view.active:
            break
        time.sleep(LOOK)
    _print_from(directory_of(root, job) / "log.txt", read)
    return _say_end(view)


def _tend(root: Path, views: list[JobView]) -> None:
    """After a restart of the machine, or the runner's death, nobody works through the queue any more."""
    if any(view.active for view in views) and not read_only() and not has_runner(root):
        start_runner(root)


def _print_from(log: Path, start: int) -> int:
    """Print what was added to a log; how far it was read."""
    try:
        with open(log, "rb") as file:
            file.seek(start)
            text = file.read()
    except FileNotFoundError:
        return start
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return start + len(text)


def _until_over(root: Path, job: Job) -> int:
    while (view := view_of(root, job)).active:
        time.sleep(LOOK)
    _say_end(view)
    return 0 if view.state == State.CANCELLED else 1


def _say_end(view: JobView) -> int:
    reason = f": {view.reason}" if view.reason else ""
    advice = f" ({view.advice})" if view.advice else ""
    print(f"job {view.job.id} {view.state}{reason}{advice}", flush=True)
    return EXIT.get(view.state, 1)
