"""Would another format fix it? The values, rounded to any formats with any options."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd
import streamlit as st
from torch import Tensor

from app import charts, show, style
from app.analysis import whatif
from app.analysis.distribution import log2_histogram
from app.pages.views.look import Look
from app.state import bytes_text
from data.catalog import Catalog, CatalogError
from data.store import TensorFileError
from quant.formats import FORMATS
from quant.metrics import METRICS

DEFAULT = ("mxfp8", "mxfp4", "nvfp4", "hifp8")
OWN = "default"
CHOICES = {
    "scale_rule": (OWN, "floor", "ceil", "even", "rceil", "amax", "pow2", "none"),
    "rounding": (OWN, "nearest", "half_away", "stochastic"),
    "block_size": (OWN, "8", "16", "32", "64", "128"),
    "overflow": (OWN, "saturate", "inf"),
    "hadamard": ("off", "16", "32", "64", "128"),
}
TITLES = {
    "scale_rule": ("Scale rule", "How a block’s (or tensor’s) scale is found from its largest magnitude"),
    "rounding": ("Rounding", "nearest: ties to even. half_away: ties away from zero. stochastic: seeded, unbiased"),
    "block_size": ("Block size", "Values that share a scale"),
    "overflow": ("Overflow", "What lies beyond the largest code: the largest code, or infinity where there is one"),
    "hadamard": ("Hadamard", "Rotate runs of so many values along the contracted axis before, and back after"),
}
OVER = ("tensor", "selection")
MOST_TENSORS = 12
REMEMBERED = 32
EACH = 1 << 16  # values tried of each tensor of a selection


def view(look: Look) -> None:
    formats = st.multiselect("Formats", list(FORMATS), key="formats", placeholder="choose formats")
    knobs = {}
    for cell, (name, values) in zip(st.columns(len(CHOICES)), CHOICES.items(), strict=True):
        title, help = TITLES[name]
        knobs[name] = cell.selectbox(title, values, key=name, help=help)
    over = st.segmented_control(
        "Applied to",
        OVER,
        key="over",
        required=True,
        format_func=lambda name: {"tensor": "this tensor"}.get(name, "the filter’s operands"),
    )
    if not formats:
        st.info("Choose a format.", icon=":material/experiment:")
        return
    axis = look.x.shape[look.dim] if look.x.dim() else 1
    hadamard = 0 if knobs["hadamard"] == "off" else int(knobs["hadamard"])
    if hadamard and axis % hadamard and over == "tensor":
        st.warning(f"A rotation of {hadamard} does not divide the contracted axis of {axis}: not applied.")
        hadamard = 0
    options = {name: value for name, value in knobs.items() if name != "hadamard" and value != OWN}
    if "block_size" in options:
        options["block_size"] = int(options["block_size"])
    trials = [whatif.trial(name, hadamard=hadamard, **options) for name in formats]
    _say_ignored(trials)
    trials = whatif.with_defaults(trials)
    if over == "selection":
        ids = _operands(look, hadamard)
        if not ids:
            st.info("The filter selects no operand with values on disk.", icon=":material/filter_alt_off:")
            return
    else:
        ids = [look.row["tensor_id"]]
    with show.progress(len(ids) * len(trials), "Rounding") as done:
        table, shown = _tried(look.opened, ids, trials, done)
    _results(look, table, shown, over, ids)


def _say_ignored(trials: list[whatif.Trial]) -> None:
    for name, (title, _) in TITLES.items():
        without = [one.format for one in trials if name in one.ignored]
        if without:
            st.caption(f"{title} as chosen does not apply to {', '.join(without)}: at its default there.")


def _operands(look: Look, hadamard: int) -> list[str]:
    """The operands of the filter with values on disk, spread evenly over it where there are many."""
    rows = look.opened.tensors(look.where)
    rows = rows[rows["contracted_axis"].notna() & rows["path"].notna() & (rows["numel"] > 0)]
    if hadamard:
        rows = rows[[row.shape[int(row.contracted_axis)] % hadamard == 0 for row in rows.itertuples()]]
    if len(rows) > MOST_TENSORS:
        st.caption(f"{MOST_TENSORS} of the filter’s {len(rows):,} operands, spread evenly, are tried.")
        rows = rows.iloc[[index * len(rows) // MOST_TENSORS for index in range(MOST_TENSORS)]]
    return rows["tensor_id"].tolist()


@st.cache_resource
def _memory() -> dict[tuple, tuple[pd.DataFrame, list]]:
    """The last results. Not st.cache_data: what computes them moves a progress bar, which that would replay."""
    return {}


def _tried(
    opened: Catalog, ids: list[str], trials: list[whatif.Trial], done: Callable[[int], None]
) -> tuple[pd.DataFrame, list]:
    asked = (str(opened.root), *ids, *(one.label for one in trials))
    memory = _memory()
    if asked not in memory:
        while len(memory) >= REMEMBERED:
            memory.pop(next(iter(memory)), None)
        memory[asked] = _try(opened, ids, trials, done)
    return memory[asked]


def _try(
    opened: Catalog, ids: list[str], trials: list[whatif.Trial], done: Callable[[int], None]
) -> tuple[pd.DataFrame, list]:
    rows = opened.rows_of(ids).set_index("tensor_id")

    def tensors() -> Iterator[tuple[Tensor, int]]:
        for tensor_id in ids:
            axis = rows.loc[tensor_id, "contracted_axis"]
            try:
                yield opened.load(tensor_id), -1 if pd.isna(axis) else int(axis)
            except (CatalogError, TensorFileError):
                continue

    limit = whatif.LIMIT if len(ids) == 1 else EACH
    return whatif.try_formats(tensors(), trials, distributions=len(ids) == 1, limit=limit, done=done)


def _results(look: Look, table: pd.DataFrame, shown: list, over: str, ids: list[str]) -> None:
    best = table.loc[table["sqnr_db"].fillna(-1e9).idxmax()]
    measure = style.MEASURES["sqnr_db"]
    text = measure.text(best["sqnr_db"])
    unit = " dB" if text[0].isdigit() or text[0] == "-" else ""
    show.verdict(
        f"Best of these by SQNR: {best['label']}, {text}{unit}, at {best['bits_per_value']:g} bits a value "
        f"({style.MEASURES['flush_to_zero'].text(best['flush_to_zero'])} % flushed)."
    )
    limit = whatif.LIMIT if len(ids) == 1 else EACH
    sampled = look.x.numel() > limit if len(ids) == 1 else True
    how = f"a sample of whole lines, at most {limit:,} values a tensor" if sampled else "exact"
    what = look.source(how) if over == "tensor" else show.source(look.where, f"{len(ids)} operands ({how})")
    definitions = " ".join(f"{METRICS[name].label}: {METRICS[name].definition}." for name, *_ in charts.ERROR_PANELS)
    caption = f"{what}\n{definitions} With a rotation, flush, saturation and codes are of the rotated values."
    show.panels(charts.trial_panels(table), "trials", table, caption, charts.format_height(table))
    if sampled:
        st.caption(f"Of {how}.")
    _table(table)
    histogram = log2_histogram([d for d in shown if d.total])
    if not histogram.empty:
        groups = [d.group for d in shown]
        chart = charts.log2_histogram(histogram, "as captured, and after each round trip", "values")
        height = 360 + style.legend_height(groups)
        words = f"{what}\nShares of all values per binade; zeros have no magnitude."
        show.figure(chart, "trial_histogram", histogram, words, height=height)


def _table(table: pd.DataFrame) -> None:
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    shown = table.assign(
        flushed=table["flush_to_zero"] * 100,
        clipped=table["saturated"] * 100,
        codes=[f"{row.codes_used:,} of {row.codes_total:,}" for row in table.itertuples()],
        scales=[_range(row.scale_exponent_min, row.scale_exponent_max) for row in table.itertuples()],
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
            "label": text("Format and options", width=230),
            "sqnr_db": number("SQNR (dB)", format="%.2f", help=METRICS["sqnr_db"].definition),
            "flushed": number("Flushed (%)", format="%.3f", help=METRICS["flush_to_zero"].definition),
            "clipped": number("Saturated (%)", format="%.3f", help=METRICS["saturated"].definition),
            "codes": text("Codes used", width=110, help=METRICS["codes_used"].definition),
            "code_entropy_bits": number("Entropy (bits)", format="%.2f", help=METRICS["code_entropy_bits"].definition),
            "element_bits": number("Of (bits)", width=75),
            "scales": text("log₂ scales", width=95, help="Smallest to largest block scale; all-zero blocks left out"),
            "bits_per_value": number("Bits a value", format="%.3f", help="The block’s scale byte shared out"),
            "size": text("Size", width=85, help="Of all the values in this format"),
        },
    )


def _range(low: float, high: float) -> str:
    return "" if pd.isna(low) else f"{low:.0f} to {high:.0f}"
