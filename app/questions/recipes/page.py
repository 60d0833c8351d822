"""The page Recipes: its answer, and a button that queues the runs that are missing."""

from __future__ import annotations

import json
import math
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import streamlit as st

from binade.app.draw.formatting import plain
from binade.app.frame.address import link
from binade.app.frame.state import explain_empty
from binade.app.questions import layout
from binade.app.questions.recipes.question import RECIPES, comparison_of, runs_in
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.app.view.view import Reading, View
from binade.collector import jobs
from binade.collector.errors import ConfigError
from binade.collector.recipes.files import label
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import Plan, plan
from binade.data.compare.comparison import with_one_seed
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import references_in
from binade.data.run.access import ReadOnlyError, read_only
from binade.data.run.directory import DONE
from binade.data.words.text import counted
from binade.quant.formats import BF16

SEEDS = 3  # of each recipe, at least
MOST_REPEATED = 3  # bf16 runs that are repeated with other bits
FAILED = (ConfigError, jobs.JobError, jobs.SubmissionError, ReadOnlyError, OSError)


def show(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    if opened.runs().empty:
        explain_empty(opened)
        return None
    scope = layout.show(opened, view, reading)
    _offer(Selection(opened, reading.where.without(*RECIPES.ignored_fields)), reading.values, view)
    return scope


@dataclass(frozen=True)
class Missing:
    """Runs that would answer what the page cannot. why: what they are; refused: why some cannot be queued here."""

    plans: tuple[Plan, ...]
    why: str = ""
    refused: str = ""


def _offer(selection: Selection, values: dict[str, Any], view: View) -> None:
    """One button for all runs that are missing: further seeds of what has one, and bf16 with other bits."""
    opened, table = selection.opened, runs_in(selection, values)
    missing = [_further_seeds(opened, table)]
    if values["of"] == "cost" and values["against"] == BF16:
        missing.append(_other_bits(opened, table))
    if refused := [part.refused for part in missing if part.refused]:
        st.caption(plain(f"There is no button that repeats these runs: {refused[0]}."))
    wanted = {planned.config: planned for part in missing for planned in part.plans}
    if not wanted:
        return
    known = _known(opened)
    plans = [planned for config, planned in wanted.items() if config not in known]
    jobs_of = view.at("runs", "jobs")
    if not plans:
        st.caption("The runs that are missing are queued.")
        link(jobs_of, "See them among the jobs", ":material/list_alt:")
        return
    why = " and ".join(part.why for part in missing if part.why)
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        clicked = not read_only() and st.button(
            f"Queue {counted(len(plans), 'run')}", type="primary", icon=":material/playlist_add:", key="repeat"
        )
        st.caption(plain(f"{why[:1].upper()}{why[1:]}."))
    with st.expander("The same in a terminal"):
        where = f"--tensor-save-dir {shlex.quote(str(opened.root))}"
        lines = jobs.command_line([planned.config for planned in plans]).splitlines()
        st.code("\n".join(f"{line} {where}" for line in lines), language="shell", wrap_lines=True)
    if not clicked:
        return
    titles = [f"{label(planned.config.recipe)} · seed {planned.config.seed}" for planned in plans]
    try:
        jobs.add_runs(opened.root, plans, titles=titles, tags=["repeats"])
        jobs.start_runner(opened.root)
    except FAILED as error:
        st.error(plain(f"Nothing was queued: {error}."), icon=":material/error:")
        return
    queued = f"{counted(len(plans), 'run')} {'is' if len(plans) == 1 else 'are'} queued."
    st.success(f"{queued} When they are done, this page compares them.", icon=":material/check:")
    link(jobs_of, "See them among the jobs", ":material/list_alt:")


def _further_seeds(opened: Catalog, table: pd.DataFrame) -> Missing:
    """The runs that are compared by one seed, with further seeds."""
    run_ids = with_one_seed(table)
    if not run_ids:
        return Missing(())
    originals, refused = _repeatable(opened, table, run_ids)
    if not originals:
        return Missing((), refused=refused)
    try:
        plans = opened.kept(("further seeds", *run_ids), lambda: jobs.with_further_seeds(originals, SEEDS))
    except ConfigError as error:
        return Missing((), refused=str(error))
    return Missing(tuple(plans), f"{SEEDS} seeds of what has one tell gaps from chance")


def _repeatable(opened: Catalog, table: pd.DataFrame, run_ids: list[str]) -> tuple[list[RunConfig], str]:
    """(the configurations of the runs that can be trained again, and whose reference can be; why another cannot)."""
    configs, refused = {}, ""
    for run_id in run_ids:
        try:
            configs[run_id] = _config_of(opened, run_id)
        except ConfigError as error:
            refused = refused or str(error)
    reference = {run: ids[0] for run, ids in zip(table["run_id"], table["references"], strict=True) if ids}
    kept = [run_id for run_id in configs if reference.get(run_id, run_id) in configs]
    compared = any(reference.get(run_id, run_id) != run_id for run_id in kept)
    return ([configs[run_id] for run_id in kept] if compared else []), refused


def _other_bits(opened: Catalog, table: pd.DataFrame) -> Missing:
    """The newest bf16 runs, one of each seed, on another number of ranks, if no two of them differ in bits alone."""
    compared = comparison_of(opened, table)
    if not compared.unknown:
        return Missing(())
    plain_runs = table[table["run_id"].isin(references_in(table)) & table["stated"] & (table["branched"] == -math.inf)]
    newest = plain_runs.drop_duplicates("data", keep="last")["run_id"].tail(MOST_REPEATED)

    def repeated(config: RunConfig) -> Plan:
        return plan(replace(config, tp=2 if config.tp == 1 else 1, sequence_parallel=False))

    try:
        configs = [_config_of(opened, run_id) for run_id in newest]
        plans = opened.kept(("other bits", *newest), lambda: [repeated(config) for config in configs])
    except ConfigError as error:
        return Missing((), refused=str(error))
    return Missing(tuple(plans), "bf16 runs on another number of ranks say when a recipe leaves bf16" if plans else "")


def _config_of(opened: Catalog, run_id: str) -> RunConfig:
    """`jobs.trained_with`, which takes about 20 ms for each run, once and not in every rerun of the page."""
    described = opened.runs().set_index("run_id")["config"]
    return opened.kept(
        ("trained with", run_id), lambda: jobs.trained_with(run_id, json.loads(described[run_id])).config
    )


def _known(opened: Catalog) -> set[RunConfig]:
    """What has been trained, or is queued."""

    def trained() -> set[RunConfig]:
        configs, runs = set(), opened.runs()
        for run_id in runs.loc[runs["state"] == DONE, "run_id"]:
            with suppress(ConfigError):
                configs.add(_config_of(opened, run_id))
        return configs

    active = {view.job.config for view in jobs.listing(opened.root) if view.active and view.job.config}
    return active | opened.kept(("trained configurations", opened.version), trained)
