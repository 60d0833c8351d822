"""Is it normal? Q-Q against fitted laws, another tensor or the filter's selection, and boxes."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import analysis, charts, show
from app.address import plain
from app.analysis import laws
from app.analysis.distribution import Distribution
from app.charts.distribution import LAW_TITLES
from app.pages.views.look import Look
from data.catalog import CatalogError
from data.store import TensorFileError
from quant import sketch
from quant.metrics import METRICS

AGAINST = (*laws.LAWS, "tensor", "selection")
TITLES = LAW_TITLES | {"tensor": "another tensor", "selection": "the filter’s selection"}


def view(look: Look, labels: dict[str, str]) -> None:
    against = st.segmented_control("Against", AGAINST, key="law", required=True, format_func=lambda name: TITLES[name])
    own = analysis.distribution_of("this tensor", look.x, (look.row["mean"], look.row["std"]))
    if not own.total:
        st.info("Nothing to draw: there is no finite value.", icon=":material/block:")
        return
    precision = "exact" if own.exact else "within 1/128 of each value: float32 too large to sort"
    if against in laws.LAWS:
        other = None
        _against_law(look, own, against, precision)
    else:
        other = _other(look, against, labels)
        if other is not None:
            _against(look, own, other, precision)
    shown = [d for d in (own, other) if d is not None and d.total]
    table = analysis.boxes(shown)
    marks = "box: quartiles · line: 0.1 % to 99.9 % · dots: extremes"
    chart = charts.boxes(table, f"{marks} · {precision}", "which")
    show.figure(chart, "boxes", table, f"{look.source(precision)}\n{marks}.", height=charts.boxes_height(table))


def _against_law(look: Look, own: Distribution, law: str, precision: str) -> None:
    table = laws.laws_table([own])
    points = laws.qq([own], law)
    if points.empty:
        st.info("No Q–Q plot: all values are equal.", icon=":material/block:")
        return
    closest = table.iloc[0]
    show.verdict(
        f"Closest of the four laws: {TITLES[closest['law']]}, Kolmogorov–Smirnov distance {closest['ks']:.3f}. "
        f"Kurtosis {look.row['kurtosis']:.3g}, 3 for a normal."
    )
    fitted = laws.fit(own, law)
    fit_note = f"Fitted {TITLES[law]}: {fitted.text if fitted else 'none'}."
    if law == "student_t":
        fit_note += f" ν makes the plot straightest over {laws.FIT_POINTS} quantiles, 0.25 % to 99.75 %."
    left, right = st.columns([3, 2], gap="large")
    with left:
        caption = f"{look.source(precision)}\nQuantiles against a {TITLES[law]}. {fit_note}"
        chart = charts.qq(points, f"{precision} · {own.total:,} values · {look.label}", "tensor", law=law)
        show.figure(chart, "qq", points, caption, note=fit_note, height=420)
    with right:
        st.markdown("**How close each law comes**")
        st.dataframe(
            table.assign(law=table["law"].map(TITLES)),
            hide_index=True,
            column_order=("law", "ks", "parameters"),
            column_config={
                "law": st.column_config.TextColumn("Law", width=100),
                "ks": st.column_config.NumberColumn("KS distance", format="%.4f", help=METRICS["ks"].definition),
                "parameters": st.column_config.TextColumn("Fitted", width=260),
            },
        )
        st.caption("KS: the largest gap between the two cumulative shares; 0 is the same, 1 is nothing in common.")


def _other(look: Look, against: str, labels: dict[str, str]) -> Distribution | None:
    if against == "selection":
        found = [d for d in analysis.distributions(look.opened, look.where) if d.total]
        if not found:
            st.info("The filter selects no finite value.", icon=":material/filter_alt_off:")
            return None
        d = found[0]
        name = look.where.sentence()
        st.caption(f"The selection: {plain(name)}. Drawn from its sketch, bins of 1/8 binade.")
        return Distribution("the selection", d.low, d.high, d.count, d.mean, d.std, d.exact, d.bin_width)
    others = [tensor_id for tensor_id in labels if tensor_id != look.row["tensor_id"]]
    if not others:
        st.info("The filter selects no other tensor.", icon=":material/filter_alt_off:")
        return None
    if st.session_state.get("other") not in others:
        st.session_state["other"] = others[0]
    chosen = st.selectbox("The other tensor", others, key="other", format_func=lambda name: labels[name])
    row = look.opened.rows_of([chosen]).iloc[0]
    try:
        return analysis.distribution_of("the other tensor", look.opened.load(chosen), (row["mean"], row["std"]))
    except (CatalogError, TensorFileError):
        st.caption("Its values are not on disk: drawn from its sketch, bins of 1/8 binade.")
        (d,) = analysis.distributions(look.opened, look.where.__class__(), None, [chosen])
        return Distribution("the other tensor", d.low, d.high, d.count, d.mean, d.std, d.exact, d.bin_width)


def _against(look: Look, own: Distribution, other: Distribution, precision: str) -> None:
    points = laws.qq_between([own], other)
    if points.empty:
        st.info("Nothing to draw: there is no finite value.", icon=":material/block:")
        return
    theirs = "exact" if other.exact else "from the sketch"
    distances = _distances(own, other)
    show.verdict(", ".join(f"{METRICS[name].label} {value:.3g}" for name, value in distances.items()) + ".")
    caption = f"{look.source(precision)}\nQuantiles against those of {other.group} ({theirs}). " + " ".join(
        f"{METRICS[name].label}: {METRICS[name].definition}." for name in distances
    )
    chart = charts.qq_between(points, f"this tensor {precision}, {other.group} {theirs}", "tensor", other.group)
    note = "On the dashed line the two are distributed alike. The distances are taken on bins of 1/8 binade."
    show.figure(chart, "qq", points, caption, note=note, height=420)


def _distances(a: Distribution, b: Distribution) -> dict[str, float]:
    """KS, Wasserstein and Jensen-Shannon on the sketch's bins, as for any two samples here."""
    sketches = [_sketch(d) for d in (a, b)]
    return {"ks": sketch.ks(*sketches), "wasserstein": sketch.wasserstein(*sketches), "js": sketch.js(*sketches)}


def _sketch(d: Distribution) -> sketch.Sketch:
    inner = pd.Series(d.low).where(abs(d.low) <= abs(d.high), d.high).to_numpy("float32")
    return sketch.merge([sketch.Sketch(inner.view("uint32") >> 20, d.count)])
