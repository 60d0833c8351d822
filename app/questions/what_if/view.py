"""Would another format fix it? The values, rounded to any formats with any options."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from binade.app import show
from binade.app.formatting import bytes_text
from binade.app.questions.shared.selection import SelectedTensor
from binade.app.questions.what_if import question
from binade.app.questions.what_if.question import CHOICES, OVER, TITLES, Plan, Tried
from binade.quant.formats import FORMATS
from binade.quant.metrics import METRICS

HELP = {
    "scale_rule": "How a block’s (or tensor’s) scale is found from its largest magnitude",
    "rounding": "nearest: ties to even. half_away: ties away from zero. stochastic: seeded, unbiased",
    "block_size": "Values that share a scale",
    "overflow": "What lies beyond the largest code: the largest code, or infinity where there is one",
    "hadamard": "Rotate runs of so many values along the contracted axis before, and back after",
}
REMEMBERED = 32


def show_view(selected: SelectedTensor, values: dict[str, Any]) -> None:
    values = {"formats": st.multiselect("Formats", list(FORMATS), key="formats", placeholder="choose formats")}
    for cell, (name, allowed) in zip(st.columns(len(CHOICES)), CHOICES.items(), strict=True):
        values[name] = cell.selectbox(TITLES[name], allowed, key=name, help=HELP[name])
    values["over"] = st.segmented_control(
        "Applied to",
        OVER,
        key="over",
        required=True,
        format_func=lambda name: {"tensor": "this tensor"}.get(name, "the filter’s operands"),
    )
    made = question.plan(selected, values)
    if not made.trials or not made.ids:
        st.info(made.said[-1], icon=":material/experiment:")
        return
    asked = (str(selected.opened.root), *made.ids, *(one.label for one in made.trials))
    memory, steps = _memory(), len(made.ids) * len(made.trials)
    if asked not in memory:
        if show.stopped("Rounding", asked):
            return
        with show.progress("Rounding", asked) as done:
            tried = question.try_all(selected.opened, made, lambda count: done(count, steps))
        while len(memory) >= REMEMBERED:
            memory.pop(next(iter(memory)), None)
        memory[asked] = tried
    _results(selected, made, memory[asked])


@st.cache_resource
def _memory() -> dict[tuple[str, ...], Tried]:
    """The last results. Not st.cache_data: what computes them moves a progress bar, which that would replay."""
    return {}


def _results(selected: SelectedTensor, made: Plan, tried: Tried) -> None:
    drawn = question.results(selected, made, tried)
    for said in drawn.problems:
        st.caption(said)
    show.verdict(drawn.verdict)
    show.side_by_side([figure for figure in drawn.figures if figure.group == "trials"])
    _table(drawn.tables["trials"])
    if figure := drawn.get("trial_histogram"):
        show.draw(figure)


def _table(table: pd.DataFrame) -> None:
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    shown = table.assign(
        flushed=table["flush_to_zero"] * 100,
        clipped=table["saturated"] * 100,
        codes=[f"{row.codes_used:,} of {row.codes_total:,}" for row in table.itertuples()],
        scales=[
            _range(low, high)
            for low, high in zip(table["scale_exponent_min"], table["scale_exponent_max"], strict=True)
        ],
        size=table["nbytes"].map(bytes_text),
    )
    st.dataframe(
        shown,
        hide_index=True,
        placeholder="",
        column_order=(
            *("label", "sqnr_db", "flushed", "clipped", "codes", "code_entropy_bits", "element_bits", "scales"),
            *("bits_per_value", "size"),
        ),
        column_config={
            "label": text("Format", width=max(90, min(330, 20 + 7 * int(shown["label"].str.len().max())))),
            "sqnr_db": number("SQNR (dB)", width=85, format="%.2f", help=METRICS["sqnr_db"].definition),
            "flushed": number("Flushed (%)", width=90, format="%.3f", help=METRICS["flush_to_zero"].definition),
            "clipped": number("Saturated (%)", width=108, format="%.3f", help=METRICS["saturated"].definition),
            "codes": text("Codes used", width=95, help=METRICS["codes_used"].definition),
            "code_entropy_bits": number(
                "Entropy (bits)", width=104, format="%.2f", help=METRICS["code_entropy_bits"].definition
            ),
            "element_bits": number("Of (bits)", width=72),
            "scales": text("log₂ scales", width=95, help="Smallest to largest block scale; all-zero blocks left out"),
            "bits_per_value": number("Bits a value", width=94, format="%.3f", help="The block’s scale byte shared out"),
            "size": text("Size", width=75, help="Of all the values in this format"),
        },
    )


def _range(low: float, high: float) -> str:
    return "no blocks" if pd.isna(low) else f"{low:.0f} to {high:.0f}".replace("-", "−")
