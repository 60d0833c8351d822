"""HiFloat8's precision by magnitude: its codebook under all values, and the precision that each group's values get.

Read from binade sketches, exactly: every limit between two precisions is a power of two, and so an edge of a bin (arXiv
2409.16626, table 1; the mantissa's width follows from the exponent before rounding)."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.figure import Figure, source
from binade.app.formatting import big
from binade.app.params import TITLES
from binade.app.questions.codes.charts import tier_color
from binade.app.questions.shared import distributions
from binade.app.questions.shared.distributions import Distribution, log2_histogram
from binade.app.questions.shared.labels import group_name
from binade.app.questions.shared.rounded import about_format
from binade.app.questions.why import compute as why_compute
from binade.app.questions.why.charts import codebook as draw_codebook
from binade.app.questions.why.charts import shares_of_values
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.quant.specs import Spec

HIFP8 = Spec.of("hifp8")
CLIPPED, THREE, TWO, ONE, DENORMAL, FLUSHED, ZERO = PRECISIONS = (
    "clipped", "3 mantissa bits", "2 mantissa bits", "1 mantissa bit", "denormal", "flushed to zero", "zero",
)  # fmt: skip
# The precision of the magnitudes between two of these powers of two, given by their exponents.
EXPONENTS = (-np.inf, -23, -15, -7, -3, 4, 8, 15, np.inf)
BANDS = (FLUSHED, DENORMAL, ONE, TWO, THREE, TWO, ONE, CLIPPED)


def precision_shares(catalog: Catalog, where: Filter, by: str | None = None) -> pd.DataFrame:
    """What HiFloat8 would give the selection's values: columns group (a value of `by`, or "all"), precision (one of
    PRECISIONS, each present), count, share (of the group's finite values).

    clipped contains values of 2**15 or more, including the largest finite value, which loses nothing.
    """
    sketch = catalog.distribution(where, by)
    moments = catalog.moments(where, by)
    zeros = dict(zip(moments["group"].map(group_name), moments["zeros"], strict=True))
    inner = sketch[["low", "high"]].abs().min(axis=1).to_numpy()
    with np.errstate(divide="ignore"):
        exponent = np.log2(inner)
    band = pd.cut(exponent, EXPONENTS, right=False, labels=BANDS, ordered=False)
    table = sketch.assign(group=sketch["group"].map(group_name), precision=np.asarray(band))
    counts = table.groupby(["group", "precision"], sort=False)["count"].sum().unstack(fill_value=0)
    counts = counts.reindex(columns=list(PRECISIONS), fill_value=0)
    counts[ZERO] = [int(zeros[group]) for group in counts.index]
    counts[FLUSHED] -= counts[ZERO]
    long = counts.rename_axis(columns="precision").stack().reset_index().rename(columns={0: "count"})
    total = long.groupby("group")["count"].transform("sum")
    return long.assign(share=long["count"] / total.clip(lower=1))


def zones(table: pd.DataFrame) -> pd.DataFrame:
    """A `precision_shares` table of one group as `why_compute.zones`: what becomes of the values."""
    share = table.set_index("precision")["share"]
    rows = {"flushed": share[FLUSHED], "saturated": share[CLIPPED], "zero": share[ZERO], "lost": 0.0}
    rows["kept"] = 1.0 - sum(rows.values())
    table = pd.DataFrame({"zone": [*rows], "share": [*rows.values()]})
    return table.assign(of_nonzero=table["share"] / ((1.0 - rows["zero"]) or 1.0))


def magnitudes(found: Distribution) -> pd.DataFrame:
    """The distribution as `why_compute.codebook_histogram`: HiFloat8 has no scale to divide by."""
    return log2_histogram([found])[["low", "high", "share"]]


COLORS = {
    CLIPPED: style.CLIPPED,
    THREE: tier_color("3 mantissa bits"),
    TWO: tier_color("2 mantissa bits"),
    ONE: tier_color("1 mantissa bit"),
    DENORMAL: "#db9a3a",
    FLUSHED: style.BAD,
    ZERO: style.GREY,
}


def _precisions_chart(table: pd.DataFrame, subtitle: str | list[str]) -> alt.Chart:
    """Chart of `precision_shares`: one bar per group, divided by the precision that its values get."""
    shown = table.assign(order=table["precision"].map({name: index for index, name in enumerate(COLORS)}))
    names = [name for name in COLORS if shown.loc[shown["precision"] == name, "count"].any()]
    scale = alt.Scale(domain=names, range=[COLORS[name] for name in names])
    result: alt.Chart = (
        alt.Chart(shown[shown["count"] > 0])
        .mark_bar(size=18)
        .encode(
            x=alt.X(
                "share:Q",
                title="share of the finite values",
                stack="zero",
                axis=alt.Axis(format="~%", tickCount=5),
                scale=alt.Scale(domain=[0, 1], nice=False),
            ),
            y=style.names_axis("group", style.groups_of(table)),
            color=alt.Color(
                "precision:N", scale=scale, legend=alt.Legend(title=None, orient="bottom", columns=4, labelLimit=160)
            ),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("group:N", title="group"),
                alt.Tooltip("precision:N", title="precision"),
                alt.Tooltip("share:Q", title="share of the values", format=".3~p"),
                alt.Tooltip("count:Q", title="values", format=","),
            ],
        )
        .properties(title=style.title("HiFloat8 precision by magnitude", subtitle))
    )
    return result


GROUPS = 24
LIMITS = (
    "By magnitude: below 2⁻²³ flushed to zero; from 2⁻²³ denormal; from 2⁻¹⁵ 1 mantissa bit; from 2⁻⁷ 2; from 2⁻³ 3; "
    "from 2⁴ 2; from 2⁸ 1; from 2¹⁵ clipped."
)


def codebook(opened: Catalog, where: Filter) -> Figure | None:
    """All values of the selection over HiFloat8's codes; None where none is finite and nonzero."""
    found = [d for d in distributions.distributions(opened, where) if d.total]
    table = magnitudes(found[0]) if found else None
    if table is None or table.empty:
        return None
    shares = zones(precision_shares(opened, where))
    edges = why_compute.zone_edges(HIFP8.format.element, HIFP8.rounding)
    what = f"{big(found[0].total)} values · from sketches"
    chart = draw_codebook(table, shares_of_values(shares), HIFP8, edges, what)
    caption = (
        f"{source(where, f'{what}; bins of 1/8 binade')}\n{about_format(HIFP8)}. Flushed: nonzero values below "
        "half the smallest code, as a share of the nonzero values. Saturated: 2¹⁵ and above, as a share of all."
    )
    return Figure("codebook", chart, table, caption, height=400)


def precisions(opened: Catalog, where: Filter, by: str) -> Figure | None:
    """The precision that values get, by group; if there are many groups, those with the smallest share of 3 mantissa
    bits."""
    table = precision_shares(opened, where, by)
    if table.empty:
        return None
    best = table[table["precision"] == THREE].set_index("group")["share"].sort_values(kind="stable")
    kept = [group for group in table["group"].unique() if group in set(best.index[:GROUPS])]
    left = f" · the {GROUPS} of {len(best)} groups with the fewest values at 3 bits" if len(best) > GROUPS else ""
    shown = table[table["group"].isin(kept)]
    chart = _precisions_chart(shown, f"by {TITLES[by].lower()} · from sketches{left}")
    what = f"{big(int(shown['count'].sum()))} values by {TITLES[by].lower()}, from sketches"
    caption = f"{source(where, what)}\n{LIMITS}"
    return Figure(f"precisions_{by}", chart, shown, caption, height=175 + 28 * len(kept))
