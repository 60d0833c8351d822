"""Runs: what was collected, how it ended, and its loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

import pandas as pd
import streamlit as st

from binade.app.draw.components import inline
from binade.app.draw.formatting import bytes_text, plain
from binade.app.frame import address
from binade.app.frame.callbacks import while_shown
from binade.app.frame.state import explain_empty
from binade.app.jobs.saved_recipes import is_recipe
from binade.app.questions import layout
from binade.app.questions.runs.groups import groups_of
from binade.app.questions.runs.question import RUNS, drawn_lines
from binade.app.questions.runs.table import DAMAGED, STATES, data_of
from binade.app.questions.shared.runs import every_run, matching, run_titles
from binade.app.view.params import read
from binade.app.view.view import Reading, View
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import events_of
from binade.data.run.access import ReadOnlyError, read_only
from binade.data.run.directory import RunError, RunNotes
from binade.data.run.notes import on_a_grid
from binade.data.run.run_notes import NotesChangedError, change_notes, parse_notes
from binade.data.words.text import counted, one_line

MOST_EVENTS = 200  # that are shown
MOST_RUNS = 200  # whose events are read
KEY = "runs"  # of the component


def show(opened: Catalog, view: View, reading: Reading) -> None:
    every = opened.runs(damaged=True)
    if every.empty:
        explain_empty(opened)
        return
    every = matching(opened, reading.where, every)
    _show(opened, view, reading)
    runs = every[every["damage"].isna()]
    named = every_run(opened)
    _notes(opened, runs, named[named["run_id"].isin(runs["run_id"])])
    _events(opened, runs)
    for model, config in runs.drop_duplicates("model")[["model", "config"]].itertuples(index=False):
        if note := on_a_grid(config):
            st.caption(plain(f"{model}: {note}"))


@st.fragment
def _show(opened: Catalog, view: View, reading: Reading) -> None:
    """The table, and the chart of what it chooses with what that used. A choice draws only these again, any other
    change the whole page."""
    now = address.followed(view)
    params = RUNS.params(opened)
    chosen, _ = read(params, {name: now.params.get(name, []) for name in params})
    values = reading.values | chosen
    runs = matching(opened, reading.where, opened.runs(damaged=True))
    key = "table of runs", opened.progress, opened.version, tuple(runs["run_id"])
    table = opened.kept(key, lambda: data_of(opened, runs))
    names = [column["name"] for column in table["columns"]]
    columns = [name for name in (values["columns"] or "").split(",") if name in names] or table["usual"]
    lines, _ = drawn_lines(opened, values, reading.where)
    drawn = {run for line in lines for run in (*line.runs, *line.short)}
    data = table | {
        "version": repr((key[:3], now.params.get("chosen"), now.params.get("hidden"))),
        "picked": {
            "chosen": values["chosen"], "hidden": values["hidden"], "columns": columns, "sort": values["sort"] or "",
        },
        "drawn": [*drawn, *(group.key for group in groups_of(opened) if not drawn.isdisjoint(group.runs))],
        "said": _said(runs),
    }  # fmt: skip
    result = inline("runs", "questions/runs/table")(
        key=KEY,
        data=data,
        height="content",
        on_go_change=lambda: None,
        on_picked_change=while_shown(KEY, lambda: _pick(table["usual"])),
    )
    if result.go:
        link = dict(result.go)
        link.pop("help", None)
        address.go(view.at("runs", str(link.pop("view")), run_id=None, **link))
    _actions(view, runs[runs["run_id"].isin(_chosen_runs(opened, values["chosen"]))])
    used = st.empty()  # filled once the answer is known
    used.caption("&nbsp;")
    scope = layout.show_question(opened, now, replace(reading, view=now, values=values))
    used.caption(plain(scope.sentence) if scope else "&nbsp;")


def _pick(usual: list[str]) -> None:
    """Write what was chosen in the table into the address."""
    picked = st.session_state[KEY].picked or {}
    columns = list(picked.get("columns", usual))
    address.change(
        chosen=picked.get("chosen") or None, hidden=picked.get("hidden") or None, sort=picked.get("sort") or None,
        columns=None if columns == usual else ",".join(columns),
    )  # fmt: skip


def _chosen_runs(opened: Catalog, chosen: Iterable[str]) -> list[str]:
    """The runs of the rows that are chosen."""
    groups = {group.key: group.runs for group in groups_of(opened)}
    return [run for key in chosen for run in groups.get(key, (key,))]


def _said(runs: pd.DataFrame) -> str:
    """How many runs there are, and what they hold."""
    states = runs["state"].where(runs["damage"].isna(), DAMAGED).value_counts()
    counts = ", ".join(f"{states[state]:,} {state}" for state in (*STATES, DAMAGED) if state in states)
    size = bytes_text(float(runs["bytes"].sum()))
    return f"{counted(len(runs), 'run')} ({counts}) · {int(runs['tensors'].sum()):,} tensors · {size} in tensor files"


def _actions(view: View, runs: pd.DataFrame) -> None:
    """What can be done with the chosen runs: some of it with recorded tensors only."""
    chosen, recorded = runs["run_id"].tolist(), bool((runs["tensors"] > 0).all())
    trained = bool(runs["first_step"].notna().any())
    if not chosen:
        return
    with st.container(horizontal=True, gap="small"):
        one, several = recorded and len(chosen) == 1, recorded and len(chosen) == 2
        first, last = chosen[0], chosen[-1]
        address.link(view.at("map", run_id=first), "Open in the Map", ":material/grid_on:", disabled=not one)
        address.link(view.at("map", run_id=first, versus=last), "Map of the difference", disabled=not several)
        losses = view.at("runs", "recipes", run_id=chosen)
        address.link(losses, "Compare losses", ":material/balance:", disabled=not trained)
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
    """What happened in the newest runs, the latest first, folded until it is opened."""
    newest = runs["run_id"].head(MOST_RUNS)
    events, count = opened.kept(("events", opened.progress, tuple(newest)), lambda: _latest(opened, newest))
    if count:
        shown = ["kind", "iteration", "rank", "trigger", "text", "time", "run"]
        with st.expander(f"{counted(count, 'event')}"):
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


def _latest(opened: Catalog, runs: Iterable[str]) -> tuple[pd.DataFrame, int]:
    """(the latest MOST_EVENTS events of runs, how many there are)."""
    events = [(event, run_id) for run_id, own in events_of(opened, runs).items() for event in reversed(own)]
    events.sort(key=lambda pair: pair[0].time, reverse=True)
    rows = [asdict(event) | {"kind": event.kind.value, "run": run_id} for event, run_id in events[:MOST_EVENTS]]
    return pd.DataFrame(rows), len(events)
