"""Runs: what was collected, how it ended, and its loss."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import charts
from app.state import catalog, explain_empty, explain_refused
from data.runs import read_losses

STATE_ICONS = {"done": "✓ done", "running": "● running", "failed": "✕ failed", "cancelled": "◌ cancelled", "crashed": "✕ crashed"}


def show() -> None:
    st.title("Runs", anchor=False)
    opened = catalog()
    explain_refused(opened)
    runs = opened.runs()
    if runs.empty:
        explain_empty(opened)
        return
    table = runs.assign(
        state=runs["state"].map(STATE_ICONS), seconds=(runs["finished"] - runs["started"]).dt.total_seconds(),
        megabytes=runs["bytes"] / 1e6,
    )
    st.dataframe(
        table,
        hide_index=True,
        placeholder="",
        column_order=(
            "run_id", "state", "recipe", "model", "size", "dataset", "backend", "tensors", "tensors_without_raw",
            "megabytes", "loss_first", "loss_last", "seconds", "reason",
        ),
        column_config={
            "run_id": st.column_config.TextColumn("Run", width="medium"),
            "state": st.column_config.TextColumn("State"),
            "recipe": st.column_config.TextColumn("Recipe"),
            "model": st.column_config.TextColumn("Model"),
            "size": st.column_config.TextColumn("Size"),
            "dataset": st.column_config.TextColumn("Dataset"),
            "backend": st.column_config.TextColumn("Quantized by"),
            "tensors": st.column_config.NumberColumn("Tensors"),
            "tensors_without_raw": st.column_config.NumberColumn(
                "Without values", help="Recorded with statistics only: over the byte budget, or values not asked for"
            ),
            "megabytes": st.column_config.NumberColumn("Tensor files (MB)", format="%.1f"),
            "loss_first": st.column_config.NumberColumn("First loss", format="%.4f", help="nats per token"),
            "loss_last": st.column_config.NumberColumn("Last loss", format="%.4f", help="nats per token"),
            "seconds": st.column_config.NumberColumn("Time (s)", format="%.1f"),
            "reason": st.column_config.TextColumn("Reason", width="large"),
        },
    )
    latest = runs.head(charts.MAX_GROUPS).iloc[::-1]
    again = latest["recipe"].duplicated(keep=False)
    labels = latest["recipe"].where(~again, latest["recipe"] + latest["started"].dt.strftime(" at %H:%M:%S UTC"))
    losses = [
        {"group": label, "iteration": record["iteration"], "loss": record["loss"]}
        for run_id, label in zip(latest["run_id"], labels, strict=True)
        for record in read_losses(opened.root / run_id)
    ]
    if losses:
        if len(runs) > len(latest):
            st.caption(f"Losses of the {len(latest)} newest of {len(runs)} runs.")
        st.altair_chart(charts.losses(pd.DataFrame(losses)), height=440)
