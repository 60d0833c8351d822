"""HiFloat8's own analysis: its codebook beneath all values, and the precision that their sizes give them."""

from __future__ import annotations

from binade.app import analysis
from binade.app.analysis import anatomy, hifp8
from binade.app.charts import hifp8 as draw
from binade.app.charts.tensor import codebook as draw_codebook
from binade.app.figure import Figure, source
from binade.app.figures.look import about_format
from binade.app.formatting import big
from binade.app.params import TITLES
from binade.data.catalog import Catalog
from binade.data.filter import Filter

GROUPS = 24
LIMITS = (
    "By magnitude: below 2⁻²³ flushed to zero, to 2⁻¹⁵ denormal, then 1, 2 and 3 mantissa bits from 2⁻¹⁵, 2⁻⁷ and 2⁻³, "
    "2 bits again from 2⁴, 1 from 2⁸, clipped from 2¹⁵."
)


def codebook(opened: Catalog, where: Filter) -> Figure | None:
    """All values of the selection over HiFloat8's codes; None where none is finite and nonzero."""
    found = [d for d in analysis.distributions(opened, where) if d.total]
    table = hifp8.magnitudes(found[0]) if found else None
    if table is None or table.empty:
        return None
    zones = hifp8.zones(hifp8.precisions(opened, where))
    edges = anatomy.zone_edges(hifp8.HIFP8.element, hifp8.HIFP8.rounding)
    what = f"{big(found[0].total)} values · from sketches"
    chart = draw_codebook(table, zones, hifp8.HIFP8, edges, what)
    caption = (
        f"{source(where, f'{what}; bins of 1/8 binade')}\n{about_format(hifp8.HIFP8)}. Flushed: nonzero values below "
        "half the smallest code. Saturated: 2¹⁵ and above. Shares are of all finite values."
    )
    return Figure("codebook", chart, table, caption, height=400)


def precisions(opened: Catalog, where: Filter, by: str) -> Figure | None:
    """The precision that values get, by group; of many groups those with the least share of 3 mantissa bits."""
    table = hifp8.precisions(opened, where, by)
    if table.empty:
        return None
    best = table[table["precision"] == hifp8.THREE].set_index("group")["share"].sort_values(kind="stable")
    kept = [group for group in table["group"].unique() if group in set(best.index[:GROUPS])]
    left = f" · the {GROUPS} of {len(best)} with the fewest at 3 bits" if len(best) > GROUPS else ""
    shown = table[table["group"].isin(kept)]
    chart = draw.precisions(shown, f"by {TITLES[by].lower()} · from sketches{left}")
    what = f"{big(int(shown['count'].sum()))} values by {TITLES[by].lower()}, from sketches"
    caption = f"{source(where, what)}\n{LIMITS}"
    return Figure(f"precisions_{by}", chart, shown, caption, height=draw.precisions_height(shown))
