"""The page Advise: the choice, its recipe, and the runs that test it."""

from __future__ import annotations

from typing import Any

import streamlit as st

from binade.app.address import link
from binade.app.formatting import plain
from binade.app.jobs import saved_recipes
from binade.app.questions import layout
from binade.app.questions.advise.question import advice_of
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.app.view import Reading, View
from binade.collector import jobs
from binade.collector.advice.advice import queue_verification, verification
from binade.collector.advice.costs import AdviceError
from binade.collector.errors import ConfigError
from binade.collector.recipes.files import to_toml
from binade.collector.recipes.recipe import RecipeError
from binade.data.access import ReadOnlyError, read_only
from binade.data.catalog import Catalog

FAILED = (AdviceError, ConfigError, RecipeError, jobs.JobError, ReadOnlyError, OSError)


def show(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    scope = layout.show(opened, view, reading)
    _recipe(Selection(opened, reading.within), reading.values, view)
    return scope


def _recipe(selection: Selection, values: dict[str, Any], view: View) -> None:
    """The recipe's file, a button that saves it, and one that queues the runs that test it."""
    try:
        advice = advice_of(selection, values)
    except AdviceError:  # the answer shows the error
        return
    name = f"advised_{values['budget'].replace('.', '_')}_{values['by']}"
    with st.expander("The recipe as a file", icon=":material/description:"):
        st.code(to_toml(advice.recipe(name)), language="toml", wrap_lines=True)
    st.caption("The same in a terminal:")
    parts = "" if values["parts"] == "linear" else " --parts linear,qk,pv"
    command = f"binade advise {selection.opened.root} --budget {values['budget']} --by {values['by']}{parts}"
    st.code(f"{command} --output {name}.toml --verify 3", language="shell", wrap_lines=True)
    if read_only():
        return
    columns = st.columns([3, 1, 1, 1], vertical_alignment="bottom")
    name = columns[0].text_input("Name of the recipe", name, max_chars=64, key="advise_name").strip()
    seeds = columns[1].number_input("Seeds", 1, 100, 3, key="advise_seeds")
    iterations = columns[2].number_input("Iterations", 2, 10**6, 200, key="advise_iterations")
    help = "Saves the recipe and trains bf16, the best single format with at most as many bits, and the recipe"
    if not columns[3].button("Verify", type="primary", icon=":material/fact_check:", help=help, width="stretch"):
        return
    root = selection.opened.root
    try:
        path = saved_recipes.path_of(root, name)
        runs = verification(selection.opened, advice, str(path), int(seeds), int(iterations))
        saved_recipes.save(path, to_toml(advice.recipe(name)))
        queue_verification(root, runs, name)
    except FAILED as error:
        st.error(plain(f"Nothing was queued: {error}."), icon=":material/error:")
        return
    st.success(
        f"{len(runs)} runs are queued. When they are done, Runs › Recipes compares them.", icon=":material/check:"
    )
    link(view.at("runs", "jobs"), "See them among the jobs", ":material/list_alt:")
