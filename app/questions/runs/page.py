"""Runs: what was collected, how it ended, and its loss."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from binade.app import address
from binade.app.figure import Column
from binade.app.formatting import bytes_text, plain
from binade.app.jobs.saved_recipes import is_recipe
from binade.app.questions import layout
from binade.app.questions.shared.runs import every_run, matching, run_titles, with_plain_runs
from binade.app.questions.shared.scope import Scope
from binade.app.show import displayed, with_texts
from binade.app.state import explain_empty
from binade.app.view import Reading, View
from binade.data.access import ReadOnlyError, read_only
from binade.data.catalog import Catalog
from binade.data.comparison import RECIPE_FIELDS, Comparison, compare
from binade.data.events import read_events
from binade.data.notes import on_a_grid
from binade.data.outcomes import DEFINITION, outcome_of
from binade.data.run_table import losses_of, references_in
from binade.data.runs import IMPORT, NotesChangedError, RunError, RunNotes, change_notes, parse_notes
from binade.data.same_data import NATS
from binade.data.text import counted, one_line

MOST_RUNS, MOST_EVENTS = 200, 200  # runs whose events and losses are read; events that are shown
MOST_REASONS = 20  # of runs that did not end normally
OF_RECIPES = ("label", "outcome", "seeds", "gap", "gap_interval", "left")
SPARKS = 40  # points of a small line in the table
STATES = {
    "queued": "◔ queued",
    "done": "✓ done",
    "running": "● running",
    "failed": "✕ failed",
    "cancelled": "◌ cancelled",
    "crashed": "✕ crashed",
}


def show(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    every = opened.runs(damaged=True)
    if every.empty:
        explain_empty(opened)
        return None
    every = matching(opened, reading.where, every)
    runs = every[every["damage"].isna()]
    shared = _shared(every)
    _totals(runs, shared)
    named = every_run(opened)
    named = named[named["run_id"].isin(runs["run_id"])]
    key = "losses of runs", opened.progress, tuple(runs["run_id"])
    course, against, compared = opened.kept(key, lambda: _course(opened, runs, named))
    _table(view, every, named, course, against, shared)
    _recipes(compared)
    _notes(opened, runs, named)
    _events(opened, runs)
    for model, config in runs.drop_duplicates("model")[["model", "config"]].itertuples(index=False):
        if note := on_a_grid(config):
            st.caption(plain(f"{model}: {note}"))
    return layout.show_question(opened, view, reading)


def _recipes(compared: Comparison) -> None:
    """The recipes over their seeds, and when each leaves bf16's band."""
    if not compared.recipes:
        return
    table = compared.recipe_table
    listed = [field for field in RECIPE_FIELDS if field.name in OF_RECIPES and table[field.name].notna().any()]
    columns = {field.name: Column(field=field) for field in listed}
    written, config = with_texts(*displayed(table, columns))
    st.subheader("Recipes", anchor=False)
    st.dataframe(
        written, hide_index=True, placeholder="–", column_config=config, key="recipes_table",
        height=height_of(len(table)),
    )  # fmt: skip


def height_of(rows: int) -> int:
    """The height in pixels of a table with up to ten visible rows, which Streamlit would find out after it has drawn
    what is below."""
    return 35 * min(rows + 1, 11) + 3


def _shared(runs: pd.DataFrame) -> dict[str, str]:
    """The columns that have the same value for all runs, which the table leaves out."""
    values = {name: runs[name].unique() for name in ("model", "size", "dataset")}
    return {name: str(distinct[0]) for name, distinct in values.items() if len(distinct) == 1 and pd.notna(distinct[0])}


def _totals(runs: pd.DataFrame, shared: Mapping[str, str]) -> None:
    if runs.empty:
        st.caption("No run can be read.")
        return
    counts = runs["state"].value_counts()
    states = ", ".join(f"{counts[state]:,} {state}" for state in STATES if state in counts)
    st.caption(
        plain(
            " · ".join(
                (
                    f"{counted(len(runs), 'run')} ({states})",
                    *shared.values(),
                    f"{int(runs['tensors'].sum()):,} tensors",
                    f"{bytes_text(float(runs['bytes'].sum()))} in tensor files",
                )
            )
        )
    )


def _course(
    opened: Catalog, runs: pd.DataFrame, named: pd.DataFrame
) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]], Comparison]:
    """(the losses of the newest runs by run_id, at most SPARKS points per run; by run_id and column of the table, how
    they compare with their bf16 runs; the comparison of their recipes)."""
    newest = runs["run_id"].head(MOST_RUNS)
    table = with_plain_runs(opened, named)
    plain = table.loc[~table["quantized"], "run_id"]
    steps = losses_of(opened, list(dict.fromkeys([*newest, *plain])), lost=True)
    every = {
        run: [record["loss"] for record in records if record["loss"] is not None] for run, records in steps.items()
    }
    compared = compare(table, steps)
    units = dict(zip(named["run_id"], named["unit"], strict=True))
    outcomes = {run: outcome_of(steps[run], units.get(run, NATS) == NATS) for run in newest}
    against: dict[str, dict[str, Any]] = {
        "gap": dict(zip(compared.costs["run_id"], compared.costs["gap"], strict=True)),
        "diverged": {run: outcome.diverged for run, outcome in outcomes.items() if outcome.diverged is not None},
        "unit": {run: unit for run, unit in units.items() if unit != NATS},
        "baseline": dict.fromkeys(references_in(named), "● baseline"),
        "branch": {
            run: f"{other} from iteration {at:.0f}"
            for run, other, at in zip(named["run_id"], named["branch_of"], named["branched"], strict=True)
            if pd.notna(other)
        },
    }
    return {run: losses[:: -(-len(losses) // SPARKS) or 1] for run, losses in every.items()}, against, compared


def _table(
    view: View,
    runs: pd.DataFrame,
    named: pd.DataFrame,
    course: Mapping[str, list[float]],
    against: Mapping[str, Mapping[str, Any]],
    shared: Mapping[str, str],
) -> None:
    names = named["rounded"].where(named["recipe"].notna())  # an import has no recipe
    source = runs["config"].map(_source).astype(object)
    seconds = (runs["finished"] - runs["started"]).dt.total_seconds()
    table = runs.assign(
        state=runs["state"].map(STATES).where(runs["damage"].isna(), "✕ damaged"),
        reason=runs["damage"].fillna(runs["reason"]),
        recipe=runs["run_id"].map(dict(zip(named["run_id"], names, strict=True))).astype(object).fillna(runs["recipe"]),
        source=source,
        seconds=seconds.where(source.isna()),  # an import may have been continued days later
        megabytes=runs["bytes"] / 1e6,
        course=runs["run_id"].map(course),
        **{name: runs["run_id"].map(dict(values)) for name, values in against.items()},
    )
    columns = {
        "state": Column("State"),
        "source": Column("Imported from", help="What was imported: a directory of tensors, or a loss log"),
        "name": Column("Name"),
        "recipe": Column("Recipe", help="The recipe, or what was rounded if its name does not say so"),
        "course": Column("Loss", width=110),
        "loss_last": Column("Last loss", ".4f", help="The last finite one, in nats per token"),
        "gap": Column(
            "Mean gap to bf16", "+.4f",
            help="Mean loss minus that of the bf16 run on the same data, over the iterations that both have, in nats "
            "per token",
        ),
        "diverged": Column("Diverged at", "d", help=f"Iteration from which {DEFINITION}"),
        "unit": Column("Unit of the loss", help="Where it is not nats per token. Such losses are not compared"),
        "baseline": Column("Baseline", help="Other runs are compared with it"),
        "branch": Column("Branch of", help="The run whose checkpoint it starts from"),
        "model": Column("Model"),
        "size": Column("Size"),
        "dataset": Column("Dataset"),
        "started": Column("Started (UTC)", width=165),
        "seconds": Column("Time (s)", ".1f"),
        "tensors": Column("Tensors", "d"),
        "tensors_without_raw": Column(
            "Without values", "d",
            help="Over the byte budget, or values were not requested. Statistics, sketches and scores are complete",
        ),
        "megabytes": Column("Tensor files (MB)", ".1f"),
        "loss_first": Column("First loss", ".4f", help="The first finite one, in nats per token"),
        "backend": Column("Quantized by"),
        "note": Column("Note"),
        "run_id": Column("Run"),
    }  # fmt: skip
    optional = ("source", "name", "note", *against)
    listed = [name for name in columns if name not in shared and (name not in optional or table[name].notna().any())]
    shown, config, formats = displayed(table, {name: columns[name] for name in listed})
    losses, started = columns["course"], columns["started"]
    kinds: dict[str, Any] = {
        "course": st.column_config.LineChartColumn(losses.title, width=losses.width),
        "started": st.column_config.DatetimeColumn(started.title, width=started.width, format="YYYY-MM-DD HH:mm:ss"),
    }
    config |= {name: kind for name, kind in kinds.items() if name in config}
    written, config = with_texts(shown, config, formats)
    event = st.dataframe(
        written, hide_index=True, placeholder="–", column_config=config, key="runs_table",
        on_select="rerun", selection_mode="multi-row", height=height_of(len(table)),
    )  # fmt: skip
    _actions(view, table.iloc[[row for row in event["selection"]["rows"] if row < len(table)]])
    reasons = table.dropna(subset=["reason"])
    for run in reasons.head(MOST_REASONS).itertuples():  # too long for a cell
        st.caption(plain(f"{run.state} · {run.run_id}: {run.reason}"))
    if len(reasons) > MOST_REASONS:
        st.caption(f"The reasons of the {MOST_REASONS} newest runs; {len(reasons) - MOST_REASONS} more have one.")
    if len(runs) > MOST_RUNS:
        st.caption(f"Losses, gaps and divergence are of the {MOST_RUNS} newest of {len(runs):,} runs.")


def _actions(view: View, runs: pd.DataFrame) -> None:
    """What can be done with the selected runs: some of it with recorded tensors only."""
    chosen, recorded = runs["run_id"].tolist(), bool((runs["tensors"] > 0).all())
    if not chosen:
        st.caption("Select runs to compare them, or to open them in the Map.")
        return
    with st.container(horizontal=True, gap="small"):
        one, several = recorded and len(chosen) == 1, recorded and len(chosen) == 2
        first, last = chosen[0], chosen[-1]
        address.link(view.at("map", run_id=first), "Open in the Map", ":material/grid_on:", disabled=not one)
        address.link(view.at("map", run_id=first, versus=last), "Map of the difference", disabled=not several)
        address.link(view.at("runs", "recipes", run_id=chosen), "Compare losses", ":material/balance:")
        distributions = view.at("explore", run_id=chosen, by="run_id")
        address.link(distributions, "Compare distributions", disabled=not recorded)
        difference = view.at("runs", "difference", run_a=first, run_b=last, run_id=None)
        address.link(difference, "First difference", ":material/difference:", disabled=not several)


def _notes(opened: Catalog, runs: pd.DataFrame, named: pd.DataFrame) -> None:
    """A form for the name, note and color of a run, which all pages use."""
    if runs.empty or read_only():
        return
    with st.expander("Name a run"):
        labels = dict(zip(named["run_id"], named["label"], strict=True))
        titles, looks = run_titles(named), dict(zip(named["run_id"], named["look"], strict=True))
        ids: list[str] = runs["run_id"].tolist()
        run_id = st.selectbox("Run", ids, key="named_run", format_func=lambda name: titles[name])
        row = runs[runs["run_id"] == run_id].iloc[0]
        run = {field: "" if pd.isna(row[field]) else str(row[field]) for field in ("name", "color", "note")}
        if f"note_{run_id}" not in st.session_state:  # the form keeps these texts, even if the run's notes change
            st.session_state[f"seen_{run_id}"] = RunNotes(**run)
        with st.form(f"notes_{run_id}", border=False):
            name_cell, own_cell, color_cell = st.columns([4, 1.2, 1], vertical_alignment="bottom")
            name = name_cell.text_input(
                "Name", run["name"], max_chars=80, placeholder=labels[run_id], key=f"name_{run_id}"
            )
            custom = own_cell.checkbox(
                "Custom color", bool(run["color"]), key=f"own_{run_id}", help="In charts of runs"
            )
            color = color_cell.color_picker("Color", run["color"] or looks[run_id][0], key=f"color_{run_id}")
            note = st.text_area("Note", run["note"], max_chars=10_000, key=f"note_{run_id}")
            saved = st.form_submit_button("Save")
    if saved:
        given, recipes = (name or "").strip(), named.set_index("run_id")[["recipe", "rounded"]]
        try:
            if given not in {*recipes.loc[run_id]} and (is_recipe(given) or given in {*recipes.to_numpy().flat}):
                raise RunError(f"{given} is the name of a recipe or a format, and not of this run’s")
            wanted = parse_notes(name or "", color if custom else "", note or "")
            change_notes(opened.root / run_id, wanted, st.session_state[f"seen_{run_id}"])
            opened.sync()
        except NotesChangedError as error:
            st.session_state[f"seen_{run_id}"] = error.current
            text = f"Not saved: {one_line(error)}. Choose Save again to replace it with yours."
            st.error(plain(text), icon=":material/error:")
        except (RunError, ReadOnlyError, OSError) as error:
            st.error(plain(f"The name was not saved: {one_line(error)}."), icon=":material/error:")
        else:
            st.session_state[f"seen_{run_id}"] = wanted
            st.rerun()


def _events(opened: Catalog, runs: pd.DataFrame) -> None:
    """What happened in the newest runs, the latest first."""
    newest = runs["run_id"].head(MOST_RUNS)
    events, count = opened.kept(("events", opened.progress, tuple(newest)), lambda: _latest(opened.root, newest))
    if count:
        shown = ["kind", "iteration", "rank", "trigger", "text", "time", "run"]
        st.subheader("Events", anchor=False)
        st.dataframe(
            events,
            hide_index=True,
            placeholder="–",
            column_order=shown,
            column_config={
                **{name: st.column_config.Column(name.capitalize()) for name in shown},
                "text": st.column_config.TextColumn("What happened", width=600),
            },
        )
        if count > MOST_EVENTS:
            st.caption(f"The latest {MOST_EVENTS} of {count:,} events.")


def _latest(root: Path, runs: Iterable[str]) -> tuple[pd.DataFrame, int]:
    """(the latest MOST_EVENTS events of runs, how many there are)."""
    events = [(event, run_id) for run_id in runs for event in reversed(read_events(root / run_id))]
    events.sort(key=lambda pair: pair[0].time, reverse=True)
    rows = [asdict(event) | {"kind": event.kind.value, "run": run_id} for event, run_id in events[:MOST_EVENTS]]
    return pd.DataFrame(rows), len(events)


def _source(config: str) -> str | None:
    """The directory or file that an import refers to."""
    read = json.loads(config)
    return str(read.get("source")) if read.get("kind") == IMPORT else None
