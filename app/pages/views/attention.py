"""What happens inside attention? Probability maps, entropy, the scores' range, and how much of P flushes."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import show
from app.analysis import attention
from app.charts import tensor as draw
from app.pages.views.look import Look
from data.catalog import CatalogError
from data.filter import Filter
from data.store import TensorFileError

NAMES = {"attention_probs": "probabilities", "attention_scores": "scores"}


def view(look: Look) -> None:
    found, rows = {}, {}
    for name in NAMES:
        row = _sibling(look, name)
        if row is None:
            continue
        try:
            heads = attention.heads(look.opened.load(row["tensor_id"]))
        except (CatalogError, TensorFileError):
            heads = None
        if heads is not None:
            found[name], rows[name] = heads, row
    if not found:
        st.info(
            "No attention map with values was recorded for this layer, run and iteration: choose another tensor.",
            icon=":material/block:",
        )
        return
    first = next(iter(found.values()))
    place = rows[next(iter(rows))]
    words = _place(place)
    note = f" · {first.note}" if first.note else ""
    probs = found.get("attention_probs")
    if probs is not None:
        _probabilities(look, probs, rows["attention_probs"], words + note)
    scores = found.get("attention_scores")
    left, right = st.columns(2, gap="large")
    with left:
        if scores is not None:
            table = attention.ranges(scores)
            caption = f"{_source(look, rows['attention_scores'], scores)}\nScores: what softmax is taken of."
            show.figure(draw.score_ranges(table, words), "scores", table, caption, height=330)
    with right:
        _map(look, found, rows)


def _sibling(look: Look, name: str) -> pd.Series | None:
    """The attention map of the same layer, run, iteration, micro-batch and rank."""
    row = look.row
    if row["tensor_name"] == name:
        return row
    same = {
        field: [row[field].item() if hasattr(row[field], "item") else row[field]]
        for field in ("run_id", "layer_index", "iteration", "micro_batch", "rank")
        if not pd.isna(row[field])
    }
    rows = look.opened.tensors(Filter(tensor_name=[name], **same))
    # One import may hold logs in several formats.
    alike = rows["quant_type"].eq(row["quant_type"]).astype(int) + rows["stage"].eq(row["stage"])
    return None if rows.empty else rows.loc[alike.idxmax()]


def _place(row: pd.Series) -> str:
    words = ("layer", row["layer_index"]), ("iteration", row["iteration"]), ("run", row["recipe"])
    return ", ".join(f"{word} {value}" for word, value in words if not pd.isna(value)) or "of an unknown place"


def _source(look: Look, row: pd.Series, heads: attention.Heads) -> str:
    shape = " × ".join(str(n) for n in row["shape"])
    return show.source(Filter(), f"{row['tensor_name']}, {row['tensor_id']}, {shape} ({heads.note or 'exact'})")


def _probabilities(look: Look, probs: attention.Heads, row: pd.Series, words: str) -> None:
    entropy = attention.entropy(probs)
    axis = -1 if pd.isna(row["contracted_axis"]) else int(row["contracted_axis"])
    flushed = attention.flushed(probs, look.format.name, axis)
    worst = flushed.loc[flushed["flush_to_zero"].fillna(-1).idxmax()]
    focused = entropy.loc[entropy["entropy"].fillna(1e9).idxmin()]
    show.verdict(
        f"In {look.format.name}, head {worst['head']:.0f} loses most: {worst['flush_to_zero']:.2%} of its nonzero "
        f"probabilities flush, holding {worst['mass']:.2%} of the probability. "
        f"Most focused: head {focused['head']:.0f}, {focused['entropy']:.2f} bits."
    )
    caption = f"{_source(look, row, probs)}\nEntropy: −Σp·log₂ p over the keys, mean over queries."
    left, right = st.columns(2, gap="large")

    def choose(head: int) -> None:
        st.session_state["head"] = int(head)

    with left:
        note = "Dashed: attention that looks at every earlier key alike. Thin lines: the range over queries."
        chart = draw.entropy(entropy, words)
        note += " Choose a head to see its map."
        show.figure(chart, "entropy", entropy, caption, note=note, height=330, choose="head", on_choose=choose)
    with right:
        chart = draw.flushed_by_head(flushed, look.format, words)
        held = "Flushed: nonzero probabilities that become 0, of the nonzero ones."
        show.figure(chart, "flushed", flushed, f"{_source(look, row, probs)}\n{held}", note=held, height=330)


def _map(look: Look, found: dict[str, attention.Heads], rows: dict[str, pd.Series]) -> None:
    shape = next(iter(found.values())).x.shape
    for name, count in (("head", shape[1]), ("sequence", shape[0])):
        if not 1 <= (st.session_state.get(name) or 1) <= count:
            st.session_state[name] = 1
    cells = st.columns([1.7, 1, 1])
    name = cells[0].selectbox("Map of", list(found), key="map", format_func=lambda name: NAMES[name])
    head = cells[1].number_input("Head", 1, shape[1], key="head")
    sequence = cells[2].number_input("Sequence", 1, shape[0], key="sequence") if shape[0] > 1 else 1
    values = attention.head_map(found[name], int(sequence) - 1, int(head) - 1)
    probs = name == "attention_probs"
    title = f"{NAMES[name].capitalize()} of head {head}"
    size = (shape[3], int(rows[name]["shape"][2]))
    chart = draw.head_map(values, size, title, f"sequence {sequence} · queries down, keys across", probs)
    caption = f"{_source(look, rows[name], found[name])}\nHead {head}, sequence {sequence}; grey: zero or masked."
    show.figure(chart, "head_map", show.grid(values), caption, height=360)
