"""Jobs: the queue, how each job is doing while it runs, and what can be done to it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

import streamlit as st

from binade.app.draw.formatting import bytes_text, duration_text, plain
from binade.app.frame import address
from binade.app.frame.callbacks import while_shown
from binade.app.frame.state import has_changed, redraw_when
from binade.app.jobs import summary
from binade.app.jobs.collecting import Form, wrapped
from binade.app.jobs.summary import WAITS
from binade.app.pages.registry import PART
from binade.app.view.params import LONGEST
from binade.app.view.view import Reading, View
from binade.collector import jobs
from binade.collector.jobs import Job, JobError, JobState, JobView, SubmissionError
from binade.data.index.catalog import Catalog
from binade.data.run.access import ReadOnlyError, read_only, reason
from binade.data.run.directory import RunError, RunInfo
from binade.data.run.events import read_events
from binade.data.run.experiment import EXPERIMENT

PULSE, IDLE = 2.0, 10.0  # seconds between checks while something runs, and while nothing does
SHOWN = 12  # jobs that have ended, before "Show more"
LOG_LINES = 12
PROBLEMS = 10  # damaged jobs that are named
COMMAND = 78  # characters of a line of a command
MANY = 8  # with more jobs than this, a search field is shown
FAILED = (JobError, ReadOnlyError, RunError, SubmissionError, OSError, ValueError)


def show(opened: Catalog, view: View, reading: Reading) -> None:
    root = opened.root
    views = jobs.listing(root)
    if problems := jobs.problems(root):
        st.warning("\n\n".join(plain(f"{problem}.") for problem in problems[:PROBLEMS]), icon=":material/warning:")
    if not views:
        _empty(root, view)
        _redraw_on_change(root, views)
        return
    _do(partial(jobs.ensure_runner, root, views))
    _head(root, views)
    chosen = _chosen(views, view.params.get("job", [""])[0])
    left, right = st.columns([1, 2.1], gap="large")
    with left:
        words = ""
        if len(views) > MANY:
            words = st.text_input(
                "Find",
                key="jobs_find",
                placeholder="title, tag, state",
                icon=":material/search:",
                label_visibility="collapsed",
                max_chars=LONGEST,
            )[:LONGEST]
        _queue(views, chosen, words)
    seen = (opened, opened.version) if chosen.written else None
    with right:
        _title(root, chosen, views)
        _details(opened, chosen)
    _redraw_on_change(root, views, seen)


def _empty(root: Path, view: View) -> None:
    st.info("No jobs yet.", icon=":material/inbox:")
    if read_only():
        return
    address.link(view.at("runs", "collect"), "Launch one", ":material/play_circle:")
    st.markdown("or in a terminal:")
    st.code("binade jobs add quick mxfp8", language="shell")
    st.caption(f"This is the queue of `{root}`.")


def _redraw_on_change(root: Path, shown: list[JobView], seen: tuple[Catalog, int] | None = None) -> None:
    """Draw the page again every PULSE seconds while a job is active, and when the list of jobs or the version of the
    catalog has changed: the last tensors of a job may appear in the catalog only after the job has ended."""
    if any(view.active for view in shown):
        redraw_when(lambda: True, PULSE)
        return

    def changed() -> bool:
        listed = _signature(jobs.listing(root)) != _signature(shown)
        return listed or (seen is not None and has_changed(seen[0], "version", seen[1]))

    redraw_when(changed, IDLE)


def _signature(views: list[JobView]) -> list[object]:
    return [(view.job, view.state) for view in views]


def _head(root: Path, views: list[JobView]) -> None:
    running = sum(view.active and view.state not in WAITS for view in views)
    queued = sum(view.state in WAITS for view in views)
    ended = len(views) - running - queued
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        st.caption(f"{running} running · {queued} queued · {ended} ended", width="content")
        if why := reason():
            st.caption(plain(f"Read-only: {why}"), width="content")
        else:
            with st.container(horizontal=True, vertical_alignment="center", width="content", gap="small"):
                st.caption("Parallel jobs", width="content")
                st.session_state["jobs_at_once"] = jobs.at_once(root)
                st.number_input(
                    "Parallel jobs",
                    1,
                    jobs.MOST_AT_ONCE,
                    key="jobs_at_once",
                    width=130,
                    label_visibility="collapsed",
                    help="How many jobs may run at the same time",
                    on_change=while_shown("jobs_at_once", _do),
                    args=(partial(_set_at_once, root),),
                )
                if st.button("New job", icon=":material/add:", type="primary", key="jobs_new"):
                    _collect()


def _collect(**values: str) -> None:
    """Open New collection with the scope of this page."""
    address.go((address.shown() or View("runs")).at("runs", "collect", **values))


def _set_at_once(root: Path) -> None:
    jobs.set_at_once(root, st.session_state["jobs_at_once"])
    jobs.start_runner(root)


def _chosen(views: list[JobView], number: str) -> JobView:
    """The job of this number, else the first of the list."""
    for view in views:
        if str(view.job.id) == number:
            return view
    if number:
        st.warning(f"Job {plain(number[:20])} no longer exists.", icon=":material/search_off:")
    return summary.ordered(views)[0]


# The queue


def _queue(views: list[JobView], chosen: JobView, words: str) -> None:
    selection = summary.matching(summary.ordered(views), words)
    if not selection:
        st.caption("No job matches all of these words.")
    ended = [view for view in selection if not view.active]
    everything = st.session_state.get("jobs_all", False)
    hidden = 0 if everything else max(0, len(ended) - SHOWN)
    for view in selection[: len(selection) - hidden]:
        _row(view, view.job.id == chosen.job.id)
    if hidden:
        st.button(f"Show {hidden} more", key="jobs_more", on_click=st.session_state.update, args=({"jobs_all": True},))


def _row(view: JobView, chosen: bool) -> None:
    job = view.job
    with st.container(border=True, key=f"job_{'chosen' if chosen else 'row'}_{job.id}", gap="xsmall"):
        st.button(plain(job.title), type="tertiary", key=f"open_{job.id}", on_click=_choose, args=(job.id,))
        done = jobs.progress(view)
        if view.active and done.total:
            st.progress(done.share)
        words = summary.line(view, done)
        words = words if len(words) < 70 else f"{words[:68]}…"
        st.markdown(f"{summary.badge(view.state)} :small[:gray[{job.id} · {plain(words)}]] {_tags(job)}")


def _tags(job: Job) -> str:
    return " ".join(f":gray-badge[{plain(tag)}]" for tag in job.tags)


# One job


def _title(root: Path, view: JobView, views: list[JobView]) -> None:
    job = view.job
    with st.container(key="jobtitle", horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        st.subheader(plain(job.title), anchor=False, width="content")
        st.markdown(summary.badge(view.state), width="content")
    created = datetime.fromisoformat(job.created).strftime("%Y-%m-%d %H:%M:%S UTC")
    again = f" · repeats run {plain(job.repeats)}" if job.repeats else ""
    again += " · continues its run" if job.resumes else ""
    user = f" by {plain(job.user)}" if job.user else ""
    took = "" if view.active or (took := summary.seconds_run(view)) is None else f" · took {duration_text(took)}"
    slurm = f" · Slurm job {plain(view.cluster.id)}" if view.cluster else ""
    st.caption(f"Job {job.id} · created {created}{user}{took}{again}{slurm} {_tags(job)}")
    if view.reason and not view.active:
        text = plain(f"{view.state.capitalize()}: {view.reason}")
        if view.state is JobState.DONE:
            st.info(text, icon=":material/info:")
        else:
            st.error(f"**{text}.** {plain(view.advice or '')}", icon=":material/error:")
    with st.container(horizontal=True, gap="small"):
        if written := view.written:
            _run_links(written)
        together = [candidate for candidate in views if candidate.job.created == job.created]
        if ids := summary.runs_to_compare(together):
            losses = View("runs", {PART: ["recipes"], "run_id": ids})
            address.link(losses, f"Compare losses of {len(ids)} runs", ":material/balance:")
    if not read_only():
        _actions(root, view)


def _run_links(run: RunInfo) -> None:
    if run.segments:
        of_run = {"run_id": [run.run_id]}
        address.link(View("map", of_run), "Open in the Map", ":material/grid_on:")
        address.link(View("explore", of_run), "Open its tensors", ":material/query_stats:")
    if run.config.get("kind") == EXPERIMENT:
        measured = View("runs", {PART: ["cost"], "measured": [run.run_id]})
        address.link(measured, "Open in Cost", ":material/payments:")


def _actions(root: Path, view: JobView) -> None:
    """The actions are callbacks, which run before the page is drawn: a click counts even if the job has changed and the
    page starts over."""
    job = view.job
    with st.container(horizontal=True, gap="small"):
        if view.active:
            with st.popover("Cancel", icon=":material/stop_circle:", disabled=view.state is JobState.CANCELLING):
                kept = "" if view.state in WAITS else " Tensors recorded so far are kept."
                st.markdown(f"This ends every process of job {job.id}.{kept}")
                act = (partial(jobs.cancel, root, job.id), "Cancelling")
                st.button("Cancel the job", type="primary", key=f"cancel_{job.id}", on_click=_do, args=act)
        else:
            act = (partial(_again, jobs.retry, root, job.id), "Queued again")
            st.button("Retry", icon=":material/replay:", key=f"retry_{job.id}", on_click=_do, args=act)
        if jobs.resumable(view):
            act = (partial(_again, jobs.resume, root, job.id), "Queued: the run will continue")
            text = "Continue its run from the last checkpoint"
            st.button("Resume", icon=":material/resume:", key=f"resume_{job.id}", on_click=_do, args=act, help=text)
        if job.config and st.button("Clone and change", icon=":material/content_copy:", key=f"clone_{job.id}"):
            _collect(form=Form.of_job(job.config, job).to_address())
        if not view.active:
            _delete(root, view)


def _choose(number: int) -> None:
    address.change(job=str(number))


def _again(act: Callable[[Path, int], Job], root: Path, number: int) -> None:
    _choose(act(root, number).id)


def _delete(root: Path, view: JobView) -> None:
    job = view.job
    with st.popover("Delete", icon=":material/delete:"):
        st.markdown(f"This deletes job {job.id} and its log. This cannot be undone.")
        with_run = False
        if view.run:
            status = view.run.status
            goes = f"{status.tensors:,} tensors, {bytes_text(status.bytes)} of values, its losses and its log"
            with_run = st.checkbox(
                "Delete its run as well", key=f"with_run_{job.id}", help="Otherwise it stays on the Runs page"
            )
            st.caption(plain(f"If this is selected, run {view.run.run_id} is deleted, too: {goes}."))
        act = (partial(_remove, root, job.id, with_run), "Deleted")
        label = "Delete job and run" if with_run else "Delete job"
        st.button(label, type="primary", key=f"delete_{job.id}", on_click=_do, args=act)


def _remove(root: Path, number: int, with_run: bool) -> None:
    jobs.delete(root, number, with_run=with_run)
    address.change(job=None)


def _do(action: Callable[[], object], done: str = "") -> None:
    """Run an action and show the message `done`, or the error."""
    try:
        action()
    except FAILED as error:
        st.toast(plain(f"{error}."), icon=":material/error:", duration="long")
    else:
        if done:
            st.toast(done, icon=":material/check:")


def _details(opened: Catalog, view: JobView) -> None:
    _progress(view)
    _log(opened.root, view)


SHOWN_EVENTS = 5  # the last ones


def _progress(view: JobView) -> None:
    done = jobs.progress(view)
    if view.active:
        words = summary.line(view, done)
        took = summary.seconds_run(view)
        since = "" if took is None else f" · {duration_text(took)} so far"
        st.progress(done.share, text=plain(f"{words[:1].upper()}{words[1:]}{since}"))
    if not view.run:
        return
    status = view.run.status
    loss = "–" if status.loss_last is None else f"{status.loss_last:.4f}"
    cells = st.columns([1, 1, 1.35, 1.1], gap="small")  # so that no number is cut off in a window of 1280 pixels
    cells[0].metric("Iterations", f"{done.done:,}", border=True)
    cells[1].metric("Tensors", f"{status.tensors:,}", border=True)
    cells[2].metric("Tensor files", bytes_text(status.bytes), border=True)
    cells[3].metric("Loss", loss, border=True)
    for event in read_events(view.run.directory)[-SHOWN_EVENTS:]:
        st.warning(plain(str(event)), icon=":material/notifications:")
    if status.tensors_without_raw:
        st.caption(
            f"{status.tensors_without_raw:,} tensors were recorded without values, which exceeded the byte budget or "
            "were not requested."
        )


def _log(root: Path, view: JobView) -> None:
    lines = jobs.log_tail(root, view.job, lines=LOG_LINES)
    if lines:
        st.caption("Last lines of the log")
        st.code("\n".join(lines), language=None, wrap_lines=True)
    elif view.state in WAITS:
        st.caption("The job has not started yet.")
    st.caption("Command")
    command = shlex.join(["binade", *view.job.arguments])
    st.code(wrapped(command, COMMAND), language="shell", wrap_lines=True)
