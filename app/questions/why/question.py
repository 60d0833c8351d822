"""Why does it lose precision? Magnitudes over the codebook, by column and by row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Drawn, Facts, Figure, Item, Table, Text, grid
from binade.app.draw.style import MEASURES, drag, power_of_two
from binade.app.questions.question import AS_OPERAND, Question
from binade.app.questions.shared.axes import KEY, Axes
from binade.app.questions.shared.rounded import Subject, about_format, coordinates
from binade.app.questions.shared.selection import Of, SelectedTensor
from binade.app.questions.shared.unscaled import with_scale
from binade.app.questions.why import charts, compute
from binade.app.view.params import Interval, Range, Whole
from binade.data.compare.evidence import SHARE, Measure, Sentence, exact, say, together
from binade.data.run.tensor_kinds import has_tokens
from binade.data.words.text import counted, number_text
from binade.quant.error_causes import ErrorCauses
from binade.quant.metrics import sqnr_db, streamed_score
from binade.quant.statistics import outlier_ratio
from binade.quant.transform import mean_energy

LARGE = 1 << 24  # values whose outliers take too long to count
NAMED = 0.1  # the share of the error from which a value, column or row is named
VALUE = Measure("value", "Value", "")
PART = Measure("share", "Share", "%")  # of a range, which may hold little
AREAS = "Areas: shares of the squared error of all values, by the binade of the magnitude over its scale."
OUTCOMES = (
    "Flushed: nonzero values that become 0; saturated: above the largest code; within the grid: rounded to a "
    "neighboring code."
)
RANGE = Control(
    name="range", label="Range of magnitudes", param=Range(), inline=True,
    help="log₂ of |value / scale|, from low up to but not including high: which rows, columns and blocks hold it",
)  # fmt: skip
CHANNEL = Control(
    name="channel", label="Channel or column", param=Whole(0, 10**9), inline=True,
    help="Index along the last axis: the histogram is of its values only",
)  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """The parts of a tensor that are linked; None where nothing is chosen.

    axes         what its rows and columns are
    range, held  the magnitudes, and where they are
    bar, of      the first and last channel of the bar that is chosen, and the mask of their values
    """

    axes: Axes
    range: Interval | None = None
    held: compute.Held | None = None
    bar: tuple[int, int] | None = None
    of: Tensor | None = None

    @property
    def words(self) -> str:
        return f"{power_of_two(self.range.low)} to {power_of_two(self.range.high)}" if self.range else ""

    @property
    def definition(self) -> str:
        low, _, high = self.words.partition(" to ")
        return f"{low} ≤ |value / scale| < {high}; zeros and values that are not finite are outside."

    @property
    def channel(self) -> str:
        first, last = self.bar or (0, 0)
        words = self.axes.column, self.axes.columns
        return f"{words[0]} {first:,}" if first == last else f"{words[1]} {first:,} to {last:,}"


def draw(selected: SelectedTensor, values: dict[str, Any]) -> Drawn:
    if selected.problem:
        return Drawn(problems=(selected.problem,))
    subject = selected.rounded()
    zones = compute.zones(subject)
    share = zones.set_index("zone")["share"]
    sqnr, of_sample = total_sqnr(selected, subject)
    causes = causes_of(selected)
    lost = say(", lost to NaN or Inf {lost}", lost=exact(SHARE, share["lost"])) if share["lost"] else Sentence()
    sqnr_of = exact(MEASURES["sqnr_db"], sqnr)
    sentence = say("In {spec}{sample}: SQNR {sqnr}", spec=str(selected.spec), sample=of_sample, sqnr=sqnr_of)
    verdict = together(
        Sentence(f"{sentence}{lost}.", (*sentence.evidence, *lost.evidence)),
        Sentence(selected.recorded.before(selected.spec)), by_cause(causes), contributors(causes, selected.axes),
    )  # fmt: skip
    if causes.shares[0] > 0 and (scaled := with_scale(selected.spec)):
        sqnr, _ = total_sqnr(selected, selected.rounded(scaled))
        text = "With a tensor scale, {spec}: {sqnr}."
        verdict = together(verdict, say(text, spec=str(scaled), sqnr=exact(MEASURES["sqnr_db"], sqnr)))
    table = compute.codebook_histogram(subject)
    caption = f"{selected.source(subject.note or 'exact')}\n{about_format(selected.spec)}."
    items: list[Item] = [facts(selected)]
    chosen, problems = _chosen(selected, subject, values)
    if table.empty:
        problems.append("Nothing to draw: there are no finite nonzero values.")
    else:
        items.append(_codebook(selected, subject, table, zones, causes, chosen, caption))
        items += filter(None, (_decomposition(causes),))
        if chosen.held:
            items.append(Text(_where(selected, chosen)))
        if chosen.held and chosen.held.values:
            items += filter(None, (_range_by_channel(selected, chosen), _range_by_token(selected, chosen)))
        else:
            items += filter(None, (_channels(selected, chosen.bar), tokens(selected)))
    return Drawn(tuple(items), verdict, tuple(problems))


def _chosen(selected: SelectedTensor, subject: Subject, values: dict[str, Any]) -> tuple[Chosen, list[str]]:
    """(what is chosen, a sentence for each choice that is not possible)."""
    interval, channel, x = values.get("range"), values.get("channel"), selected.x
    if interval is None and channel is None:
        return Chosen(selected.axes), []
    if selected.spec.hadamard:
        words = f"{selected.spec} rotates the values: no {selected.axes.column} or range of magnitudes can be chosen."
        return Chosen(selected.axes), [words]
    token, channels = coordinates(x, selected.spec, selected.dim)
    chosen, problems, column = Chosen(selected.axes), [], selected.axes.column
    if interval is not None:
        chosen = Chosen(selected.axes, interval, compute.held(subject, interval, token, channels))
    if channel is not None:
        bars = compute.channel_bars(x.shape[-1] if x.dim() else 1)
        bar = bars[(bars["channel"] <= channel) & (bars["last"] >= channel)]
        if bar.empty:
            problems.append(f"There is no {column} {channel:,}: the last is {bars['last'].iloc[-1]:,}.")
        else:
            first, last = (int(end) for end in bar.iloc[0])
            of = subject.blocks.valid & (channels >= first) & (channels <= last)
            if of.any():
                chosen = replace(chosen, bar=(first, last), of=of)
            else:
                problems.append(f"{column.capitalize()} {channel:,} is not in the sample.")
    return chosen, problems


def causes_of(selected: SelectedTensor) -> ErrorCauses:
    """The causes of its error, from all values, cached."""

    def compute_causes(_: object = None) -> ErrorCauses:
        return selected.recorded.causes(selected.x, selected.spec, selected.dim)

    cache = selected.opened.cache
    if not cache:
        return compute_causes()
    key = ("error_causes", selected.opened.contents([selected.row["tensor_id"]]), selected.gemm, str(selected.spec))
    return cache.get(None, key, compute_causes)


def by_cause(causes: ErrorCauses) -> Sentence:
    """The shares of the squared error, and what the rounding of the scales costs."""
    if math.isnan(causes.shares[0]):
        return Sentence()
    flushed, saturated, grid = (exact(SHARE, share) for share in causes.shares)
    text = (
        "Of the squared error, {flushed} is of values flushed to zero, {saturated} of saturated ones and {grid} of "
        "rounding within the grid."
    )
    sentence = say(text, flushed=flushed, saturated=saturated, grid=grid)
    if causes.scale is None:
        return sentence
    without = causes.scale.without
    if abs(without - 1) < 0.005:
        change = exact(SHARE, abs(without - 1))
        return together(sentence, say("The rounding of the scales changes it by {change}.", change=change))
    other = say("With scales that are not rounded it would be {without} of it.", without=exact(SHARE, without))
    return together(sentence, other)


def contributors(causes: ErrorCauses, axes: Axes) -> Sentence:
    """The value, and else the column and the row, with a share of the squared error above NAMED; without one, the
    column with the largest share."""
    names = []
    for largest in causes.largest:
        share, token, channel = exact(SHARE, largest.share), largest.token, largest.channel
        if largest.share < NAMED:
            continue
        if token is not None and channel is not None:
            value = exact(VALUE, largest.value)
            place = f"{axes.name_of(token)}, {axes.column} {channel:,}"
            return say(
                "The value {value} of {place} holds {share} of the error.", value=value, place=place, share=share
            )
        place = axes.name_of(token) if token is not None else f"{axes.column} {channel:,}"
        place = place[:1].upper() + place[1:]
        names.append(say("{place} holds {share} of the error.", place=place, share=share))
    for largest in () if names else causes.largest:
        if largest.token is None and largest.channel is not None:
            text = "The error is spread: the largest share of a {column} is {share}, of {column} {channel}."
            share = exact(SHARE, largest.share)
            names.append(say(text, column=axes.column, share=share, channel=largest.channel))
    return together(*names)


def _decomposition(causes: ErrorCauses) -> Table | None:
    if causes.scale is None:
        return None
    frame = compute.decomposition(causes.scale)
    columns = {
        "part": Column("Part"),
        "percent": Column("Σ / Σe² (%)", text=lambda row: number_text(row["percent"], ".1f"), align="right"),
        "meaning": Column("What it is"),
    }
    note = (
        "Q: what x becomes; Q*: the same with the scale max|x| / largest code, not rounded. The parts are correlated, "
        "so single ones can exceed 100%; together they are the squared error (arXiv 2605.20402)."
    )
    title = "What the rounding of the scales costs"
    return Table("decomposition", frame, columns, title=title, note=note, foldable=True)


def _codebook(
    selected: SelectedTensor, subject: Subject, table: pd.DataFrame, zones: pd.DataFrame, causes: ErrorCauses,
    chosen: Chosen, caption: str,
) -> Figure:  # fmt: skip
    """The histogram of all values, or of those of a channel with all values behind them. table, zones: of all."""
    only, behind, of = "", None, "all values"
    edges = compute.zone_edges(selected.spec.format.element, selected.spec.rounding)
    error = compute.error_by_binade(causes, edges[1])
    words_of = charts.shares_of_error(causes.shares)
    label = f"{selected.label} · {subject.note or 'all values'}"
    meaning = AREAS
    if chosen.of is not None:
        only, behind = f"{chosen.channel} only", table
        table, zones = compute.codebook_histogram(subject, chosen.of), compute.zones(subject, chosen.of)
        words_of = charts.shares_of_values(zones)
        error = error.head(0)
        of = f"the {int(chosen.of.sum()):,} values of {chosen.channel}"
        label = f"{selected.label} · {of}{f' in {subject.note}' if subject.note else ''}"
        meaning = f"Bars, and flushed and saturated as shares of the values: of {of}. Grey: of all values."
    zeros = float(zones.set_index("zone")["share"]["zero"])
    text = "Zeros, {zero} of {values}, have no magnitude."
    zero = say(text, zero=exact(SHARE, zeros), values=selected.all_values) if zeros else ""
    caption = f"{caption}\n{meaning} {OUTCOMES}"
    chart = charts.codebook(table, error, words_of, selected.spec, edges, label, only, behind, chosen.range)
    drawn = pd.concat([table.assign(of="values"), error.rename(columns={"cause": "of"})], ignore_index=True)
    left = table["low"] < charts.shown(table if behind is None else behind, error, edges)[0]
    beyond = float((table["share"] * (table["high"] - table["low"]))[left].sum())
    cut = say("{share} of the values lie left of the axis.", share=exact(SHARE, beyond)) if beyond else ""
    if chosen.held:
        caption += f"\nMarked: {chosen.definition} {_counted(chosen.held)}."
    brush = "" if selected.spec.hadamard else "range"
    if brush:
        chart = chart.add_params(drag())
    text = "Areas: share of the squared error. Grey: share of all values, at most {most} per binade."
    if only:
        text = "Bars: share of {of}, at most {most} per binade. Grey: of all values."
    drawn_as = say(text, of=of, most=exact(SHARE, float(table["share"].max())))
    about = f"{about_format(selected.spec)}. Ticks beneath: its codes."
    return Figure(
        "codebook", chart, drawn, caption, note=together(about, drawn_as, zero, cut), height=400,
        hint=f"Drag over a range to see which {selected.axes.columns} and {selected.axes.rows} hold it.",
        brush=brush, marked=chosen.range,
    )  # fmt: skip


def _counted(held: compute.Held) -> str:
    sample = " in the sample" if held.found.every > 1 else ""
    return f"{held.values:,} of {held.of_values:,} values{sample}"


def _where(selected: SelectedTensor, chosen: Chosen) -> Sentence:
    """Where the values of the range are, in counts of the whole tensor or of the sample."""
    held = chosen.held
    assert held
    if not held.values:
        return say("{range}: {counted}.", range=chosen.words, counted=_counted(held))
    axes = chosen.axes
    pairs = zip(("channels", "tokens", "blocks"), (held.channels, held.tokens, held.blocks), strict=True)
    counts = {name: f"{count:,} of {of:,}" for name, (count, of) in pairs}
    where = say(
        "{range}{sample}: {values} values, {share} of all, in {channels} {columns}, {tokens} {rows}, {blocks} {what}; "
        "they hold {squares} of the sum of squares.",
        range=chosen.words, sample=" (in the sample)" * (held.found.every > 1), values=held.values,
        share=exact(PART, held.values / held.of_values), squares=exact(PART, held.squares),
        columns=axes.columns, rows=axes.rows,
        what="runs of 32 values" if not selected.spec.has_blocks else "blocks", **counts,
    )  # fmt: skip
    if chosen.of is None:
        return where
    inside, of = int((held.inside & chosen.of).sum()), int(chosen.of.sum())
    in_channel = say(
        "{values} of them are in {channel}: {share} of the {of} values there.",
        values=inside, channel=chosen.channel, share=exact(PART, inside / of), of=of,
    )  # fmt: skip
    return together(where, in_channel)


def _range_by_channel(selected: SelectedTensor, chosen: Chosen) -> Figure | None:
    if not selected.x.dim():
        return None
    assert chosen.held
    count, held = selected.x.shape[-1], chosen.held
    table = held.by_channel(count)
    run = compute.run_of(count)
    taken = f" · each bar is the sum of {run} {chosen.axes.columns}" if run > 1 else ""
    caption = f"{selected.source(held.found.note or 'exact')}\nBars: {chosen.definition}"
    subtitle = f"{_counted(held)} · {len(table) if run == 1 else count:,} {chosen.axes.columns}{taken}"
    marked = chosen.bar and chosen.bar[0]
    title = f"Values of {chosen.words} by {chosen.axes.column}"
    chart = charts.channels(table, title, subtitle, chosen.axes, marked)
    return Figure("channels", chart, table, caption, "", 330, "channel", CLICK, marked=marked, group="axes")


def _range_by_token(selected: SelectedTensor, chosen: Chosen) -> Figure:
    assert chosen.held
    held, matrix = chosen.held, compute.rows_by_channels(selected.x)
    shape = matrix.shape[0], matrix.shape[1]
    share = held.by_cell(shape)
    cell = compute.cell_of(shape)
    subtitle = f"of each cell of {cell[0]} × {cell[1]} values" if max(cell) > 1 else "one cell per value"
    subtitle += " · gray: not in the sample" if held.found.every > 1 else ""
    chart = charts.range_by_cell(share, shape, chosen.words, subtitle, chosen.axes)
    caption = f"{selected.source(held.found.note or 'exact')}\nShare of each cell’s values: {chosen.definition}"
    return Figure("tokens", chart, grid(share), caption, height=330, group="axes")


def total_sqnr(selected: SelectedTensor, subject: Subject) -> tuple[float, str]:
    """SQNR in dB: as recorded, in the format that the tensor was rounded to; else of the whole tensor, or of the
    sample, as the text says, if no kernel measures without a copy."""
    if selected.recorded.in_format(subject.blocks.spec):
        left_out = selected.row["tokens_left_out"]
        padding = "" if pd.isna(left_out) else f" without {counted(int(left_out), 'padding token')}"
        return selected.recorded_sqnr_db, f" (as recorded{padding})"
    if subject.every > 1 and (whole := streamed_score(selected.x, subject.blocks.spec, selected.dim)):
        return whole.sqnr_db, ""
    return sqnr_db(subject.blocks.sums.signal, subject.blocks.sums.noise), " (a sample)" * (subject.every > 1)


def facts(selected: SelectedTensor) -> Facts:
    row = selected.row
    values = {
        "absmax": row["absmax"],
        "crest_factor": row["absmax"] / row["rms"] if row["rms"] else math.nan,
        "dynamic_range": math.log2(row["absmax"] / row["absmin"]) if row["absmax"] > 0 else math.nan,
        "kurtosis": row["kurtosis"],
    }
    if selected.x.numel() <= LARGE:
        values["outlier_ratio"] = outlier_ratio(selected.x)
        if has_tokens(row["layer_type"], row["tensor_name"]):
            values["mean_energy"] = mean_energy(selected.x)
    return Facts(values | {"zero_share": row["zeros"] / row["numel"] if row["numel"] else math.nan})


CLICK = "Click a bar for the histogram of its values."


def _channels(selected: SelectedTensor, bar: tuple[int, int] | None) -> Figure | None:
    table = compute.channels(selected.x)
    if table.empty or not selected.x.dim():
        return None
    count, axes = selected.x.shape[-1], selected.axes
    run = compute.run_of(count)
    taken = f" · each bar is the largest of {run} {axes.columns}" if run > 1 else ""
    finite = table.loc[np.isfinite(table["absmax"]), "absmax"]
    middle = float(finite.median()) if len(finite) > 1 else math.nan
    ratio = exact(MEASURES["hot_ratio"], finite.max() / middle) if middle > 0 else None
    text = "The largest {column} is {ratio} times the median one."
    note = say(text, column=axes.column, ratio=ratio) if ratio else ""
    caption = f"{selected.source()}\nabsmax: the largest magnitude over all {axes.rows}, by {axes.column}."
    clickable = not selected.spec.hadamard
    title, marked = f"Largest magnitude by {axes.column}", bar and bar[0]
    chart = charts.channels(table, title, f"{count:,} {axes.columns}{taken}", axes, marked, clickable)
    choose = "channel" if clickable else None
    return Figure("channels", chart, table, caption, note, 330, choose, CLICK, marked=marked, group="axes")


def tokens(selected: SelectedTensor) -> Figure | None:
    """Its magnitudes by row and column; None where it has no values."""
    matrix = compute.rows_by_channels(selected.x)
    if not matrix.numel():
        return None
    values = compute.pooled(selected.x)
    taken = compute.taken(matrix.shape)
    chart = charts.rows_by_columns(values, (matrix.shape[0], matrix.shape[1]), taken, selected.axes)
    caption = f"{selected.source()}\nlog2 of the largest magnitude of each cell ({taken}); gray: zero or not finite."
    note = "" if selected.axes.column == KEY else "Outlier channels appear as bright columns."
    return Figure("tokens", chart, grid(values), caption, note=note, height=330, group="axes")


WHY = Question(
    text="Why do they lose precision?",
    title="In the format",
    icon=":material/search_insights:",
    help="Magnitudes over the format’s codebook, by channel and by token",
    page="tensor",
    of=Of.TENSOR,
    takes=AS_OPERAND,
    view="why",
    draw=draw,
    controls=(RANGE, CHANNEL),
    of_values=True,
)
