"""Draws the pictures of docs/loss.md from what bench_loss saves: python docs/loss.py SAME.npz OTHER.npz"""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

HERE = Path(__file__).parent / "loss"


def main() -> None:
    HERE.mkdir(exist_ok=True)
    same, other = (np.load(path) for path in sys.argv[1:3])
    first, second = same["predicted"][0, 0, :, :2].T
    layers = pd.DataFrame({"layer": same["names"], "measured": same["measured"][0, 0, :, 0]})
    layers["kind"] = layers["layer"].str.replace(r"layer\d+\.", "", regex=True)
    layers = pd.concat(
        [layers.assign(predicted=first, by="first order"), layers.assign(predicted=first + second, by="both orders")]
    )
    line = alt.Chart(pd.DataFrame({"at": [-0.02, 0.05]})).mark_line(color="#999", strokeDash=[4, 4])
    points = (
        alt.Chart()
        .mark_point(filled=True, size=60)
        .encode(
            x=alt.X("predicted:Q", title="predicted change (nats)", scale=alt.Scale(domain=[-0.02, 0.05])),
            y=alt.Y("measured:Q", title="measured", scale=alt.Scale(domain=[-0.02, 0.05])),
            color=alt.Color("kind:N", title=None),
            shape=alt.Shape("kind:N", title=None),
        )
    )
    both = alt.layer(line.encode(x="at:Q", y="at:Q"), points, data=layers).properties(width=280, height=260)
    both.facet(column=alt.Column("by:N", title=None, sort=["first order"])).save(HERE / "same.png", scale_factor=1.2)

    gaps = other["gaps"]
    table = pd.DataFrame({"recipe": other["recipes"], "bits": other["bits"], "gap": gaps.mean(0)})
    error = 2 * gaps.std(0, ddof=1) / len(gaps) ** 0.5
    table = table.assign(low=table["gap"] - error, high=table["gap"] + error)
    table["kind"] = table["recipe"].str.replace(r", .*", "", regex=True)
    table["kind"] = table["kind"].where(table["recipe"].str.contains(","), "one format")
    base = alt.Chart(table).encode(x=alt.X("bits:Q", title="bits per value", scale=alt.Scale(zero=False, padding=30)))
    color = alt.Color("kind:N", title=None)
    marks = base.mark_point(filled=True, size=80).encode(
        y=alt.Y("gap:Q", title="loss above float32 (nats)", scale=alt.Scale(type="log", domain=[0.05, 2], nice=False)),
        color=color,
    )
    bars = base.mark_rule().encode(y="low:Q", y2="high:Q", color=color)
    names = base.transform_filter("datum.kind == 'one format'").mark_text(dy=-12).encode(y="gap:Q", text="recipe:N")
    (bars + marks + names).properties(width=480, height=280).save(HERE / "recipes.png", scale_factor=1.2)


if __name__ == "__main__":
    main()
