"""The page Cost: its answer, a button that measures what is missing, and the recipe that follows from what was
measured, which can be saved and tested."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from dataclasses import replace
from functools import partial

import streamlit as st

from binade.app.draw.formatting import plain
from binade.app.frame.address import link
from binade.app.jobs import saved_recipes
from binade.app.questions import layout
from binade.app.questions.cost import compute
from binade.app.questions.shared.runs import labels_of
from binade.app.questions.shared.scope import Scope
from binade.app.view.view import Reading, View
from binade.collector import jobs
from binade.collector.advice.advice import GROUPS, Advice, AdviceRequest, read_advice
from binade.collector.advice.verification import queue_verification, verification
from binade.collector.errors import AdviceError, ConfigError
from binade.collector.recipes.files import to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import RecipeError
from binade.collector.training.plan import Plan
from binade.data.index.catalog import Catalog
from binade.data.run.access import ReadOnlyError, read_only
from binade.data.run.directory import RunError
from binade.data.words.filter import Filter
from binade.quant.formats import BF16
from binade.quant.specs import SpecError

FAILED = (AdviceError, ConfigError, RecipeError, SpecError, jobs.JobError, jobs.SubmissionError, ReadOnlyError, OSError)
BUDGETS = (4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 14.0)
BY = {"site": "Products", "layer": "Layers", "module": "Modules", "model": "The whole model"}
MOST_RUNS = 50  # that are offered, the newest ones
MEASURING, VERIFYING = "cost_measuring", "cost_verifying"  # the jobs that a session has queued here


def show(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    scope = layout.show(opened, view, reading)
    trained = _trained(opened, reading.where)
    if trained:
        with st.expander("Measure", icon=":material/straighten:", expanded=scope is None):
            _measure(opened, trained, view)
    if run_id := _with_effects(opened, reading):
        with st.expander("Advise formats", icon=":material/tune:"):
            _advise(opened, run_id, trained, view)
    return scope


def _with_effects(opened: Catalog, reading: Reading) -> str:
    """The measurement that is shown; "" if it has no effects on the loss."""
    run_id: str = reading.values["measured"]
    measured = compute.measurement_of(opened.root, run_id) if run_id else ""
    return run_id if isinstance(measured, compute.MeasuredCosts) and not measured.parity else ""


def _trained(opened: Catalog, where: Filter) -> dict[str, Plan]:
    """The newest runs of the filter that `binade run` trained, by their names, those in bf16 first."""
    runs = opened.runs()
    runs = runs[runs["run_id"].isin(where.run_id)] if where.run_id else runs
    runs = runs.sort_values("recipe", key=lambda recipes: recipes != BF16, kind="stable")
    trained: dict[str, Plan] = {}
    for run_id, config in runs.head(MOST_RUNS)[["run_id", "config"]].itertuples(index=False):
        with suppress(ConfigError):
            read = partial(jobs.trained_with, run_id, json.loads(config))
            trained[run_id] = opened.kept(("trained with", run_id), read)
    return trained


def _measure(opened: Catalog, trained: dict[str, Plan], view: View) -> None:
    """A button that queues a measurement."""
    st.caption(
        "Forward passes on the same weights and sequences, without rounding and with each group of products rounded "
        "alone."
    )
    columns = st.columns([3, 3, 2, 1, 1], vertical_alignment="bottom")
    labels = labels_of(opened)
    run_id = columns[0].selectbox("Run", list(trained), key="cost_run", format_func=lambda name: labels.get(name, name))
    texts = columns[1].text_input("Formats or recipes", "mxfp4,nvfp4,mxfp8", key="cost_formats")
    by = columns[2].multiselect("Groups", [*GROUPS, "part"], ["part", "site"], key="cost_by")
    sequences = int(columns[3].number_input("Sequences", 2, 10_000, 8, key="cost_sequences"))
    blocks = columns[4].checkbox("Blocks", key="cost_blocks", help="Own and inherited errors of the blocks’ outputs")
    formats = tuple(filter(None, map(str.strip, texts.split(","))))
    if not (formats and by):
        return
    command = ["measure", run_id, "--formats", ",".join(formats), "--by", ",".join(by), "--sequences", str(sequences)]
    command += ["--blocks"] if blocks else []
    where = f"--tensor-save-dir {shlex.quote(str(opened.root))}"
    st.code(f"{shlex.join(['binade', *command])} {where}", language="shell", wrap_lines=True)
    if read_only():
        return
    if st.button("Measure", icon=":material/straighten:", key="cost_measure"):
        try:
            for text in formats:
                parse_recipe(text)
            title = f"Measure {', '.join(formats)} in {labels.get(run_id, run_id)}"
            st.session_state[MEASURING] = jobs.add_runs(opened.root, [command], titles=[title], tags=["measure"])
            jobs.start_runner(opened.root)
        except FAILED as error:
            st.error(plain(f"Nothing was queued: {error}."), icon=":material/error:")
    _queued(opened, MEASURING, "This page shows what it has measured so far.", view)


def _queued(opened: Catalog, key: str, then: str, view: View) -> None:
    """How the jobs are doing that were queued on this page, also when the page draws itself again."""
    states = []
    for job in st.session_state.get(key, ()):
        with suppress(jobs.JobError):  # one that was deleted
            states.append(jobs.view_of(opened.root, job).state)
    if not states:
        return
    first = st.session_state[key][0]
    if len(states) == 1:
        text = f"Job {first.id} is {states[0]}"
    else:
        text = f"{len(states)} jobs: {', '.join(f'{states.count(state)} {state}' for state in dict.fromkeys(states))}"
    st.success(f"{text}. {then}", icon=":material/list_alt:")
    link(view.at("runs", "jobs", job=str(first.id)), "See it among the jobs", ":material/list_alt:")


def _advise(opened: Catalog, run_id: str, trained: dict[str, Plan], view: View) -> None:
    """The formats of least measured cost within a budget of bits, as a recipe that can be tested."""
    columns = st.columns(2)
    bits = columns[0].selectbox("Bits per value", BUDGETS, 2, key="advise_budget")
    by = columns[1].selectbox("One choice for each of", list(BY), key="advise_by", format_func=lambda name: BY[name])
    request = AdviceRequest(bits, by=by)
    try:
        read = partial(read_advice, opened.root / run_id, request)
        advice = opened.kept(("advice", run_id, request, opened.state()), read)
    except (AdviceError, RunError, OSError) as error:
        st.info(plain(f"{str(error)[:1].upper()}{str(error)[1:]}."))
        return
    st.markdown(plain(str(advice.sentence)))
    for doubt in advice.doubts:
        st.caption(plain(str(doubt)))
    name = f"advised_{str(bits).replace('.', '_')}_{by}"
    st.code(to_toml(advice.recipe(name)), language="toml", wrap_lines=True, height=240)
    if trained and not read_only():
        _verify(opened, advice, name, trained, view)


def _verify(opened: Catalog, advice: Advice, name: str, trained: dict[str, Plan], view: View) -> None:
    """A button that saves the recipe and queues the runs that test it, with the settings of a run."""
    columns = st.columns([3, 3, 1, 1, 1], vertical_alignment="bottom")
    labels = labels_of(opened)
    name = columns[0].text_input("Name of the recipe", name, max_chars=64, key="advise_name").strip()
    run_id = columns[1].selectbox(
        "Settings of", list(trained), key="advise_run", format_func=lambda run: labels.get(run, run)
    )
    seeds = columns[2].number_input("Seeds", 1, 100, 3, key="advise_seeds")
    iterations = columns[3].number_input("Iterations", 2, 10**6, 200, key="advise_iterations")
    help = "Saves the recipe and trains bf16, the best single format with at most as many bits, and the recipe"
    if columns[4].button("Verify", icon=":material/fact_check:", help=help, width="stretch"):
        root = opened.root
        try:
            path = saved_recipes.path_of(root, name)
            config = replace(trained[run_id].config, recipe=BF16)
            runs = verification(config, advice, str(path), int(seeds), int(iterations))
            saved_recipes.save(path, to_toml(advice.recipe(name)))
            st.session_state[VERIFYING] = queue_verification(root, runs, name)
        except FAILED as error:
            st.error(plain(f"Nothing was queued: {error}."), icon=":material/error:")
    _queued(opened, VERIFYING, "When they are done, Runs › Recipes compares them.", view)
