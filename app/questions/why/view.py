"""Why does it suffer? Magnitudes over the codebook, channels, tokens, and how the values lie."""

from __future__ import annotations

import math
from typing import Any

import streamlit as st

from binade.app import show
from binade.app.questions.shared.selection import SelectedTensor
from binade.app.questions.why import question
from binade.app.style import MEASURES, short
from binade.quant.metrics import outlier_ratio

FACTS = ("absmax", "crest_factor", "dynamic_range", "kurtosis", "outlier_ratio", "zero_share")


def show_view(selected: SelectedTensor, values: dict[str, Any]) -> None:
    drawn = question.draw(selected, values)
    show.verdict(drawn.verdict)
    _facts(selected)
    show.problems(drawn)
    if figure := drawn.get("codebook"):
        show.draw(figure)
    for cell, name in zip(st.columns(2, gap="large"), ("channels", "tokens"), strict=True):
        if figure := drawn.get(name):
            with cell:
                show.draw(figure)


def _facts(selected: SelectedTensor) -> None:
    row = selected.row
    values = {
        "absmax": row["absmax"],
        "crest_factor": row["absmax"] / row["rms"] if row["rms"] else math.nan,
        "dynamic_range": math.log2(row["absmax"] / row["absmin"]) if row["absmax"] > 0 else math.nan,
        "kurtosis": row["kurtosis"],
        "zero_share": row["zeros"] / row["numel"] if row["numel"] else math.nan,
    }
    if selected.x.numel() <= 1 << 24:
        values["outlier_ratio"] = outlier_ratio(selected.x)
    shown = [name for name in FACTS if name in values]
    cells = [cell for row in range(0, len(shown), 3) for cell in st.columns(3)[: len(shown) - row]]
    for cell, name in zip(cells, shown, strict=True):
        measure = MEASURES[name]
        text = short(values[name] * measure.factor)
        unit = f" {measure.unit}" if measure.unit and text != "–" else ""
        cell.metric(measure.label, f"{text}{unit}", help=measure.definition, border=True)
