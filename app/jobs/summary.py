"""Jobs as the Jobs page shows them: states, order and progress in words. No Streamlit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from binade.app.draw.formatting import duration_text
from binade.collector.jobs import Job, JobState, JobView, Progress
from binade.collector.jobs.state import losses_of
from binade.data.words.text import counted

WAITS = (JobState.QUEUED, JobState.PENDING)


class Badge(NamedTuple):
    """The badge of a job's state, in Streamlit's names of colors and icons."""

    color: str
    icon: str


BADGES = {
    JobState.QUEUED: Badge("gray", ":material/schedule:"),
    JobState.PENDING: Badge("gray", ":material/cloud_queue:"),
    JobState.STARTING: Badge("blue", ":material/hourglass_top:"),
    JobState.RUNNING: Badge("blue", ":material/progress_activity:"),
    JobState.CANCELLING: Badge("orange", ":material/hourglass_bottom:"),
    JobState.DONE: Badge("green", ":material/check:"),
    JobState.CANCELLED: Badge("gray", ":material/block:"),
    JobState.FAILED: Badge("red", ":material/close:"),
    JobState.CRASHED: Badge("red", ":material/bolt:"),
}


def badge(state: JobState) -> str:
    """A state's badge in Streamlit's Markdown."""
    return f":{BADGES[state].color}-badge[{BADGES[state].icon} {state}]"


def ordered(views: Sequence[JobView]) -> list[JobView]:
    """Running jobs, then queued ones in order, then ended ones, latest first."""
    active = sorted((view for view in views if view.active), key=lambda view: view.state in WAITS)
    ended = [view for view in views if not view.active]
    return [*active, *sorted(ended, key=lambda view: (view.ended or "", view.job.id), reverse=True)]


def matching(views: Sequence[JobView], words: str) -> list[JobView]:
    """The jobs that have every word in their title, tags, state or arguments."""
    wanted = words.lower().split()

    def text(job: Job, state: JobState) -> str:
        return " ".join((str(job.id), job.title, *job.tags, state, *job.arguments)).lower()

    return [view for view in views if all(word in text(view.job, view.state) for word in wanted)]


def seconds_run(view: JobView) -> float | None:
    """The seconds from the job's start to its end, or until now."""
    if view.started is None or view.state in WAITS:
        return None
    try:
        start = datetime.fromisoformat(view.started)
        end = datetime.now(UTC) if view.active else datetime.fromisoformat(view.ended or "")
        return max((end - start).total_seconds(), 0.0)
    except (TypeError, ValueError):
        return None


def line(view: JobView, done: Progress) -> str:
    """The line under a job's title in the list."""
    if view.state is JobState.QUEUED:
        return "waiting for its turn"
    if view.state is JobState.PENDING:
        place = view.cluster.place if view.cluster else ""
        return f"waiting for the cluster: {place}" if place else "waiting for the cluster"
    if view.state is JobState.STARTING:
        return "loading torch and the data"
    parts = []
    if done.total:
        of = f" of {done.total:,}" if done.done < done.total else ""
        parts.append(f"{done.done:,}{of} iteration{'s' * (max(done.done, done.total) != 1)}")
    if view.run and view.job.config:
        parts.append(counted(view.run.status.tensors, "tensor"))
    if done.seconds_left is not None:
        parts.append(f"{duration_text(done.seconds_left)} left")
    elif not view.active and (took := seconds_run(view)) is not None:
        parts.append(duration_text(took))
    if view.continues:
        parts.insert(0, f"continue{'s' if view.active else 'd'} run {view.continues.run_id}")
    if view.written is None and not view.active:
        return view.reason or ("cancelled before it started" if view.state is JobState.CANCELLED else "")
    return " · ".join(parts)


def runs_to_compare(together: Sequence[JobView]) -> list[str]:
    """The runs of jobs that were queued together, in order, if all have ended and several have trained."""
    runs = [view.run for view in sorted(together, key=lambda view: view.job.id) if view.run]
    trained = [run.run_id for run in runs if losses_of(run)]
    return [] if len(trained) < 2 or any(view.active for view in together) else trained
