"""Why does it lose precision? Magnitudes over the codebook, channels, tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from binade.app.figure import Drawn, Facts, Figure, Item, grid
from binade.app.questions.question import Question
from binade.app.questions.shared.rounded import Subject, about_format
from binade.app.questions.shared.selection import Of, SelectedTensor
from binade.app.questions.shared.unscaled import with_scale, with_scale_it_has
from binade.app.questions.why import charts, compute
from binade.app.report.section import ReportSelection, Section
from binade.app.style import MEASURES
from binade.data.evidence import SHARE, Sentence, exact, say, together
from binade.data.text import plain_name
from binade.quant.metrics import outlier_ratio, sqnr_db, streamed_score

LARGE = 1 << 24  # values whose outliers take too long to count


def draw(selected: SelectedTensor, values: dict[str, Any]) -> Drawn:
    found = selected.rounded()
    zones = compute.zones(found)
    share = zones.set_index("zone")["share"]
    sqnr, flushed, saturated, of_sample = _totals(selected, found)
    lost = say(", lost to NaN or Inf {lost}", lost=exact(SHARE, share["lost"])) if share["lost"] else Sentence()
    own = say(
        "In {spec}{sample}: SQNR {sqnr}, {flushed} of the nonzero values flushed to zero, {saturated} of all values "
        "saturated",
        spec=str(selected.spec), sample=of_sample, sqnr=exact(MEASURES["sqnr_db"], sqnr),
        flushed=exact(SHARE, flushed), saturated=exact(SHARE, saturated),
    )  # fmt: skip
    verdict = Sentence(f"{own}{lost}.", (*own.evidence, *lost.evidence))
    if flushed and (scaled := with_scale(selected.spec)):
        sqnr, of, *_ = _totals(selected, selected.rounded(scaled))
        verdict = together(verdict, with_scale_it_has(scaled, exact(MEASURES["sqnr_db"], sqnr), of))
    table = compute.codebook_histogram(found)
    caption = (
        f"{selected.source(found.note or 'exact')}\n{about_format(selected.spec)}. Flushed: nonzero values below "
        "half the smallest code, as a share of the nonzero values. Saturated: above the largest, as a share of "
        "all."
    )
    items: list[Item] = [_facts(selected)]
    problems = []
    if table.empty:
        problems.append("Nothing to draw: there are no finite nonzero values.")
    else:
        edges = compute.zone_edges(selected.spec.format.element, selected.spec.rounding)
        zero = (
            say("Zeros, {zero} of the values, have no magnitude.", zero=exact(SHARE, share["zero"]))
            if share["zero"]
            else ""
        )
        chart = charts.codebook(table, zones, selected.spec, edges, f"{selected.label} · {found.note or 'all values'}")
        words = f"{about_format(selected.spec)}. Ticks beneath: its codes. Bars: share of all values."
        items.append(Figure("codebook", chart, table, caption, note=together(words, zero), height=400))
        items += filter(None, (_channels(selected), tokens(selected)))
    return Drawn(tuple(items), verdict, tuple(problems))


def _totals(selected: SelectedTensor, found: Subject) -> tuple[float, float, float, str]:
    """SQNR in dB, the share of nonzero values that are flushed and the share of all values that saturate: of the whole
    tensor, or of the sample, as the text says, if no kernel measures without a copy."""
    if found.every > 1 and (whole := streamed_score(selected.x, found.blocks.spec, selected.dim)):
        return whole.sqnr_db, 0.0 if math.isnan(whole.flush_to_zero) else whole.flush_to_zero, whole.saturated, ""
    sums, zones = found.blocks.sums, compute.zones(found).set_index("zone")["share"]
    flushed = sums.flushed / max(sums.nonzero, 1)
    return sqnr_db(sums.signal, sums.noise), flushed, float(zones["saturated"]), " (a sample)" * (found.every > 1)


def _facts(selected: SelectedTensor) -> Facts:
    row = selected.row
    values = {
        "absmax": row["absmax"],
        "crest_factor": row["absmax"] / row["rms"] if row["rms"] else math.nan,
        "dynamic_range": math.log2(row["absmax"] / row["absmin"]) if row["absmax"] > 0 else math.nan,
        "kurtosis": row["kurtosis"],
    }
    if selected.x.numel() <= LARGE:
        values["outlier_ratio"] = outlier_ratio(selected.x)
    return Facts(values | {"zero_share": row["zeros"] / row["numel"] if row["numel"] else math.nan})


def _channels(selected: SelectedTensor) -> Figure | None:
    table = compute.channels(selected.x)
    if table.empty or not selected.x.dim():
        return None
    count = selected.x.shape[-1]
    run = int(table["last"].iloc[0] - table["channel"].iloc[0]) + 1
    taken = f" · each bar is the largest of {run} channels" if run > 1 else ""
    finite = table.loc[np.isfinite(table["absmax"]), "absmax"]
    middle = float(finite.median()) if len(finite) > 1 else math.nan
    ratio = exact(MEASURES["hot_ratio"], finite.max() / middle) if middle > 0 else None
    note = say("The largest channel is {ratio} times the median one.", ratio=ratio) if ratio else ""
    caption = f"{selected.source()}\nabsmax: the largest magnitude over all tokens; the last axis is the channel."
    chart = charts.channels(table, f"{count:,} channels{taken}")
    return Figure("channels", chart, table, caption, note=note, height=330, group="axes")


def tokens(selected: SelectedTensor) -> Figure | None:
    """Its magnitudes by token and channel; None where it has no values."""
    matrix = compute.rows_by_channels(selected.x)
    if not matrix.numel():
        return None
    values = compute.pooled(selected.x)
    cell = tuple(-(-n // m) for n, m in zip(matrix.shape, values.shape, strict=True))
    taken = f"each cell is the largest of {cell[0]} × {cell[1]} values" if max(cell) > 1 else "one cell per value"
    chart = charts.tokens_by_channels(values, (matrix.shape[0], matrix.shape[1]), taken)
    caption = f"{selected.source()}\nlog2 of the largest magnitude of each cell ({taken}); gray: zero or not finite."
    note = "Outlier channels appear as bright columns."
    return Figure("tokens", chart, grid(values), caption, note=note, height=330, group="axes")


def report(selection: ReportSelection) -> Iterator[Section]:
    for fmt in selection.formats:
        for tensor_id in selection.ranked(fmt)["tensor_id"].head(1):
            selected, problems = selection.tensor(tensor_id, fmt)
            figure = tokens(selected) if selected else None
            figures = []
            if figure:
                caption = f"{figure.caption}\nThe tensor with the lowest SQNR in {fmt}."
                figures = [replace(figure, name=f"tokens_worst_{plain_name(fmt)}", caption=caption)]
            yield Section("heatmaps", figures=figures, problems=problems)


WHY = Question(
    text="Why do they lose precision?",
    title="Why",
    icon=":material/search_insights:",
    help="Magnitudes over the format’s codebook, channels, tokens",
    page="tensor",
    of=Of.TENSOR,
    view="why",
    draw=draw,
    of_values=True,
    report=report,
)
