"""The page Recipes: its answer, and a button that repeats the runs of one seed with more seeds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import streamlit as st

from binade.app.address import link
from binade.app.formatting import plain
from binade.app.questions import layout
from binade.app.questions.recipes.question import RECIPES, runs_in
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.app.state import explain_empty
from binade.app.view import Reading, View
from binade.collector import jobs
from binade.collector.errors import ConfigError
from binade.collector.recipes.files import label
from binade.collector.training.config import RunConfig
from binade.data.access import ReadOnlyError, read_only
from binade.data.catalog import Catalog
from binade.data.comparison import comparable_runs, with_one_seed
from binade.data.difference import OVERRIDES
from binade.data.runs import DONE

SEEDS = 3
FAILED = (ConfigError, jobs.JobError, jobs.SubmissionError, ReadOnlyError, OSError)


def show(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    if opened.runs().empty:
        explain_empty(opened)
        return None
    scope = layout.show(opened, view, reading)
    selection = Selection(opened, reading.where.without(*RECIPES.ignored_fields))
    _repeat(selection, reading.values, view)
    if reading.values["of"] == "cost":
        _measure(selection, reading.values, view)
    return scope


def _measure(selection: Selection, values: dict[str, Any], view: View) -> None:
    """Offer to measure what a run's recipe does to the loss by rounding alone."""
    opened = selection.opened
    runs = comparable_runs(runs_in(selection, values))
    newest = runs.drop_duplicates(["rounded", "settings"], keep="last").set_index("run_id")
    described = opened.runs().set_index("run_id")["config"]
    known: dict[str, RunConfig] = {}
    for run_id in newest.index:
        with suppress(ConfigError):
            config = _trained_with(opened, run_id, json.loads(described[run_id]))
            if not any(getattr(config, name, None) for name in OVERRIDES):  # a recipe's name does not include them
                known[run_id] = config
    if not known:
        return
    st.caption(
        "Measure what rounding alone does to the loss: forward passes on the same weights and sequences, with all that "
        "the recipe rounds and without."
    )
    titles = {run_id: str(newest["label"][run_id]) for run_id in known}
    run_id = st.selectbox("Run", list(titles), key="measured_run", format_func=lambda name: titles[name])
    command = ["measure", run_id, "--formats", str(known[run_id].recipe), "--by", "model", "--sequences", "8"]
    where = f"--tensor-save-dir {shlex.quote(str(opened.root))}"
    st.code(f"{shlex.join(['binade', *command])} {where}", language="shell", wrap_lines=True)
    if read_only() or not st.button("Measure", icon=":material/straighten:", key="measure"):
        return
    title = f"Measure {label(known[run_id].recipe)} in {titles[run_id]}"
    try:
        jobs.add_command(opened.root, command, title, tags=["measure"])
        jobs.start_runner(opened.root)
    except FAILED as error:
        st.error(plain(f"Nothing was queued: {error}."), icon=":material/error:")
        return
    st.success("The measurement is queued. When it is done, the table of recipes has its result.")
    link(view.at("runs", "jobs"), "See it among the jobs", ":material/list_alt:")


def _repeat(selection: Selection, values: dict[str, Any], view: View) -> None:
    """Offer to queue the runs that are compared by one seed with further seeds."""
    opened = selection.opened
    run_ids = with_one_seed(runs_in(selection, values))
    if not run_ids:
        return
    described = opened.runs().set_index("run_id")["config"]
    try:
        originals = [_trained_with(opened, run, json.loads(described[run])) for run in run_ids]
        plans = opened.kept(("further seeds", *run_ids), lambda: jobs.with_further_seeds(originals, SEEDS))
    except ConfigError as error:
        st.caption(plain(f"There is no button to repeat these runs with {SEEDS} seeds: {error}."))
        return
    known = _known(opened, {planned.config.seed for planned in plans})
    plans = [planned for planned in plans if planned.config not in known]
    runs = [planned.config for planned in plans]
    if not runs:
        st.caption(f"Their repetitions with {SEEDS} seeds are queued.")
        link(view.at("runs", "jobs"), "See them among the jobs", ":material/list_alt:")
        return
    st.caption(f"To repeat what has one seed in a terminal, with {SEEDS} seeds in all:")
    where = f"--tensor-save-dir {shlex.quote(str(opened.root))}"
    commands = [f"{line} {where}" for line in jobs.command_line(runs).splitlines()]
    st.code("\n".join(commands), language="shell", wrap_lines=True)
    if read_only():
        return
    help = f"Queues {len(runs)} runs that differ from these only in their seeds"
    if not st.button(f"Repeat with {SEEDS} seeds", type="primary", icon=":material/repeat:", help=help, key="repeat"):
        return
    titles = [f"{label(config.recipe)} · seed {config.seed}" for config in runs]
    try:
        jobs.add_runs(opened.root, plans, titles=titles, tags=["more seeds"])
        jobs.start_runner(opened.root)
    except FAILED as error:
        st.error(plain(f"Nothing was queued: {error}."), icon=":material/error:")
        return
    st.success(f"{len(runs)} runs are queued. When they are done, this page compares them.", icon=":material/check:")
    link(view.at("runs", "jobs"), "See them among the jobs", ":material/list_alt:")


def _trained_with(opened: Catalog, run_id: str, description: Mapping[str, Any]) -> RunConfig:
    """`jobs.trained_with`, which takes about 20 ms for each run, once and not in every rerun of the page."""
    return opened.kept(("trained with", run_id), lambda: jobs.trained_with(run_id, description).config)


def _known(opened: Catalog, seeds: set[int]) -> set[RunConfig]:
    """What has been trained with these seeds, or is queued."""
    configs = set()
    runs = opened.runs()
    for run in runs[runs["state"] == DONE].to_dict("records"):
        description = json.loads(run["config"])
        if description.get("seed") in seeds:
            with suppress(ConfigError):
                configs.add(_trained_with(opened, run["run_id"], description))
    return configs | {view.job.config for view in jobs.listing(opened.root) if view.active and view.job.config}
