"""Recipes: which part costs the most loss, and what becomes of the gradients, against bf16 on the same data."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from app import show, style
from app.address import One, Whole, follow, plain, write
from app.analysis import recipes
from app.charts import runs as draw
from app.filters import sidebar
from app.state import catalog, explain_empty, explain_refused, losses_of
from app.style import MEASURES
from data.catalog import Catalog
from data.filter import Filter

VIEWS = {"cost": "Loss", "gradients": "Gradients"}
NAMES = ("grad_weight", "grad_input", "grad_output")
NOTE = "Runs are compared with the bf16 run of the same model, data, seed and warm-up, iteration by iteration."


def page() -> None:
    opened = catalog()
    st.title("Recipes", anchor=False)
    explain_refused(opened)
    if not opened.totals().tensors:
        explain_empty(opened)
        return
    params = {"view": One(tuple(VIEWS)), "gradient": One(NAMES), "at": Whole(0, 10**9)}
    follow(opened, "recipes", params)
    where = sidebar(opened)
    st.caption(NOTE)
    view = st.segmented_control("View", VIEWS, key="view", required=True, format_func=lambda name: VIEWS[name])
    runs = _runs_of(opened, where)
    table = recipes.overview(runs, opened.parts())
    if not table["quantized"].any() or table.loc[table["quantized"], "reference"].isna().all():
        st.info(_no_reference(table), icon=":material/balance:")
        write(where, params)
        return
    if view == "gradients":
        _gradients(opened, where, table)
    else:
        _cost(opened, where, table)
    write(where, params)


def _runs_of(opened: Catalog, where: Filter) -> pd.DataFrame:
    """The runs that the filter's words about runs allow; bf16's stay, to compare with."""
    runs = opened.runs()
    keep = pd.Series(True, index=runs.index)
    for name in ("model", "size", "dataset"):
        if wanted := getattr(where, name):
            keep &= runs[name].isin(wanted)
    for name in ("run_id", "recipe"):
        if wanted := getattr(where, name):
            keep &= runs[name].isin(wanted) | (runs["recipe"] == "bf16")
    return runs[keep]


def _no_reference(table: pd.DataFrame) -> str:
    if table.empty:
        return "The filter selects no run."
    if not table["quantized"].any():
        return "No run here was quantized as it trained: collect one to compare, `python -m collector quick mxfp4`."
    return "No bf16 run saw the same data as these runs: collect one with the same options, `--quantization bf16`."


def _cost(opened: Catalog, where: Filter, table: pd.DataFrame) -> None:
    gaps = recipes.loss_gaps(table, losses_of(opened, table["run_id"].tolist()))
    costs = recipes.costs(gaps, table)
    if costs.empty:
        st.info("No run has an iteration in common with its bf16 run yet.", icon=":material/hourglass_empty:")
        return
    show.verdict(_answer(costs))
    latest = costs.head(style.MAX_GROUPS)
    source = show.source(where, f"{len(costs)} runs and their bf16 runs, from loss.jsonl")
    caption = f"{source}\nGap: the run’s loss minus the bf16 run’s at the same iteration, in nats per token."
    left, right = st.columns(2, gap="large")
    with left:
        chart = draw.costs(latest, "mean over the recorded iterations")
        show.figure(chart, "costs", latest, caption, note=_noise(costs), height=draw.costs_height(latest))
    with right:
        shown = gaps[gaps["run_id"].isin(latest["run_id"])]
        groups = list(dict.fromkeys(shown["label"]))
        height = max(draw.costs_height(latest), 360) + style.legend_height(groups)
        show.figure(draw.gaps(shown, "above the dashed line: worse than bf16"), "gaps", shown, caption, height=height)
    _table(table, costs)


def _answer(costs: pd.DataFrame) -> str:
    """Which part costs most, of the runs in which one part alone is rounded; else which run."""
    alone = costs[costs["only"].notna()]
    if len(alone):
        parts = ", ".join(f"{row.only} in {row.label} {row.gap:+.4f}" for row in alone.itertuples())
        return f"Rounded alone, {alone['only'].iloc[0]} costs the most loss (nats per token: {parts})."
    first = costs.iloc[0]
    advice = "To tell the parts apart, collect FA_… and linear_… recipes."
    return f"{first['label']} costs the most loss: {first['gap']:+.4f} nats per token. {advice}"


def _noise(costs: pd.DataFrame) -> str:
    iterations = int(costs["iterations"].max())
    return (
        f"Over {iterations} iteration{'s' * (iterations != 1)}: gaps of a few thousandths of a nat come and go with "
        "the rounding of a single run. More iterations tell more (`--control-iter`)."
    )


def _table(table: pd.DataFrame, costs: pd.DataFrame) -> None:
    shown = costs.merge(table[["run_id", *recipes.PARTS]], on="run_id")
    used = [part for part in recipes.PARTS if (shown[part] != "bf16").any()]
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    titles = {"linear": "Linear layers", "QK": "QKᵀ", "PV": "PV", "router": "Router"}
    st.dataframe(
        shown,
        hide_index=True,
        placeholder="",
        column_order=("label", *used, "gap", "last", "iterations", "run_id"),
        column_config={
            "label": text("Run", width=160),
            **{part: text(titles[part], width=110) for part in used},
            "gap": number("Mean gap (nats)", format="%+.5f", help="Mean over the iterations of loss − bf16’s loss"),
            "last": number("Last gap (nats)", format="%+.5f"),
            "iterations": number("Iterations", width=90),
            "run_id": text("Directory", width=330),
        },
    )


@st.cache_data(max_entries=64, show_spinner=False)
def _compared(_opened: Catalog, root: str, run_id: str, reference: str, name: str, at: int) -> tuple[Any, int]:
    where = Filter(tensor_name=[name], iteration=[at])
    return recipes.gradients(_opened, _opened.pairs(run_id, reference, where))


def _gradients(opened: Catalog, where: Filter, table: pd.DataFrame) -> None:
    left, right = st.columns([2, 1])
    name = left.segmented_control("Gradient", NAMES, key="gradient", required=True, format_func=_words) or NAMES[0]
    iterations = opened.facets(Filter(tensor_name=[name])).get("iteration", [])
    if not iterations:
        st.info(f"No {_words(name)} was recorded.", icon=":material/block:")
        return
    if st.session_state.get("at") not in iterations:
        st.session_state["at"] = iterations[0]
    at = right.select_slider("Iteration", iterations, key="at") if len(iterations) > 1 else iterations[0]
    runs = table[table["quantized"] & table["reference"].notna()].tail(style.MAX_GROUPS)
    parts, unread = [], 0
    with show.progress(len(runs), "Comparing gradients") as done:
        for count, (_, run) in enumerate(runs.iterrows()):
            found, missing = _compared(opened, str(opened.root), run["run_id"], run["reference"], name, int(at))
            parts.append(found.assign(group=run["label"]))
            unread += missing
            done(count + 1)
    together = pd.concat(parts, ignore_index=True)
    if together.empty:
        st.info("No gradient of these runs has a twin with values in its bf16 run.", icon=":material/block:")
        return
    together["place"] = [f"L{int(row.layer_index)} {row.module}" for row in together.itertuples()]
    summary = recipes.gradient_summary(together, ["group", "place"])
    worst = recipes.gradient_summary(together, ["group"]).sort_values("cosine").iloc[0]
    show.verdict(
        f"Furthest from bf16’s: {worst['group']}, mean cosine {worst['cosine']:.3f}, "
        f"gradient bias {worst['gradient_bias']:.3g}."
    )
    what = f"{len(together):,} pairs of {name} tensors, iteration {at}, exact"
    bias = MEASURES["gradient_bias"].definition
    caption = (
        f"{show.source(where, what)}\nCosine: {MEASURES['cosine'].definition}, x being bf16’s gradient of the same "
        f"iteration and data. Gradient bias: {bias}."
    )
    for cell, column in zip(st.columns(2, gap="large"), ("cosine", "gradient_bias"), strict=True):
        with cell:
            chart = draw.agreement(summary, column, f"{_words(name)} · iteration {at} · {len(together):,} pairs")
            show.figure(chart, column, summary, caption, height=draw.agreement_height(summary))
    later = " Later iterations hold the drift of the weights as well." if at > min(iterations) else ""
    st.caption(f"Gradient bias: {plain(bias)}.{later}")
    if unread:
        st.warning(f"{unread} pairs could not be read and are left out.", icon=":material/broken_image:")


def _words(name: str) -> str:
    return name.replace("grad_", "gradient of ")
