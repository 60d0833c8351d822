"""Jobs as the Jobs page tells them: their order, their figures in words, and what is worst while they run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pandas as pd

from binade.app.jobs.collecting import duration_text
from binade.app.questions.ranking import compute as ranking_compute
from binade.app.questions.shared.labels import thinned
from binade.collector.jobs import ACTIVE, JobView, Progress
from binade.collector.jobs.state import losses_of
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.quant.formats import FORMATS

WORST = 8  # tensors
MOST_POINTS = 600
COLORS = {"done": "green", "queued": "gray", "cancelled": "gray", "cancelling": "orange"}
ICONS = {
    "done": ":material/check:",
    "queued": ":material/schedule:",
    "starting": ":material/hourglass_top:",
    "running": ":material/progress_activity:",
    "cancelling": ":material/hourglass_bottom:",
    "cancelled": ":material/block:",
    "out of memory": ":material/memory_alt:",
    "disk full": ":material/hard_drive:",
    "machine restarted": ":material/restart_alt:",
    "killed": ":material/bolt:",
}


def color(state: str) -> str:
    """The colour of a state's badge."""
    return COLORS.get(state, "blue" if state in ACTIVE else "red")


def icon(state: str) -> str:
    return ICONS.get(state, ":material/close:")


def ordered(views: Sequence[JobView]) -> list[JobView]:
    """What runs, then the queue in its order, then what has ended, latest first."""
    running = [view for view in views if view.active and view.state != "queued"]
    queued = [view for view in views if view.state == "queued"]
    ended = [view for view in views if not view.active]
    return [*running, *queued, *sorted(ended, key=lambda view: (view.ended or "", view.job.id), reverse=True)]


def matching(views: Sequence[JobView], words: str) -> list[JobView]:
    """Those that have every word in their title, tags, state or arguments."""
    wanted = words.lower().split()

    def text(view: JobView) -> str:
        job = view.job
        return " ".join((str(job.id), job.title, *job.tags, view.state, *job.arguments)).lower()

    return [view for view in views if all(word in text(view) for word in wanted)]


def seconds_run(view: JobView, now: datetime | None = None) -> float | None:
    """From its start to its end, or until now."""
    if view.started is None or view.state == "queued":
        return None
    try:
        start = datetime.fromisoformat(view.started)
        end = (now or datetime.now(UTC)) if view.active else datetime.fromisoformat(view.ended or "")
        return max((end - start).total_seconds(), 0.0)
    except (TypeError, ValueError):
        return None


def line(view: JobView, done: Progress) -> str:
    """What stands beneath a job's title in the list."""
    if view.state == "queued":
        return "waits for its turn"
    if view.state == "starting":
        return "loads torch and the data"
    parts = []
    if done.total:
        of = f" of {done.total:,}" if done.done < done.total else ""
        parts.append(f"{done.done:,}{of} iteration{'s' * (max(done.done, done.total) != 1)}")
    if view.run:
        tensors = view.run.status.tensors
        parts.append(f"{tensors:,} tensor{'s' * (tensors != 1)}")
    if done.seconds_left is not None:
        parts.append(f"{duration_text(done.seconds_left)} left")
    elif not view.active and (took := seconds_run(view)) is not None:
        parts.append(duration_text(took))
    if view.run is None and not view.active:
        return view.reason or "cancelled before it began"
    return " · ".join(parts)


def losses(view: JobView) -> tuple[pd.DataFrame, int]:
    """(for loss_chart: group (the recipe), iteration, loss; one iteration in how many is in it): of a long run no
    more than MOST_POINTS, the last among them."""
    records = losses_of(view.run) if view.run else []
    rows = [
        {"group": str(view.run.config.get("recipe")), "iteration": record["iteration"], "loss": record["loss"]}
        for record in records
        if view.run
    ]
    return thinned(pd.DataFrame(rows, columns=["group", "iteration", "loss"]), MOST_POINTS)


def worst(catalog: Catalog, run_id: str) -> tuple[str | None, pd.DataFrame]:
    """(format, the first rows of the ranking by SQNR) of what a run has published so far, in the coarsest of the
    formats that its operands were scored with; (None, empty) while there are none."""
    where = Filter(run_id=(run_id,))
    formats = sorted(catalog.scored_formats(where), key=lambda name: (FORMATS[name].bits_per_value, name))
    if not formats:
        return None, pd.DataFrame()
    return formats[0], ranking_compute.ranking(catalog, where, formats[0], "sqnr_db").head(WORST)
